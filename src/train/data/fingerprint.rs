//! A hash of the data, by which a resumed run notices that it reads something else.

use sha2::{Digest, Sha256};

/// Blocks of a large file that are hashed.
const BLOCKS: usize = 64;
/// Bytes of such a block.
const BLOCK_BYTES: usize = 4096;

/// A hash that grows.
#[derive(Default)]
pub(super) struct Fingerprint(Sha256);

impl Fingerprint {
    /// Adds bytes under a label.
    pub fn put(&mut self, label: &str, bytes: &[u8]) {
        for part in [label.as_bytes(), bytes] {
            self.0.update((part.len() as u64).to_le_bytes());
            self.0.update(part);
        }
    }

    /// Adds the length of a mapped file and a sample of it: blocks at equal distances, the first and last among them.
    pub fn put_sample(&mut self, label: &str, bytes: &[u8]) {
        self.put(label, &(bytes.len() as u64).to_le_bytes());
        if bytes.len() <= BLOCKS * BLOCK_BYTES {
            return self.put(label, bytes);
        }
        let last = bytes.len() - BLOCK_BYTES;
        for block in 0..BLOCKS {
            let at = (last as u128 * block as u128 / (BLOCKS - 1) as u128) as usize;
            self.put(label, &bytes[at..at + BLOCK_BYTES]);
        }
    }

    /// Returns the hash in hexadecimal.
    pub fn finish(self) -> String {
        self.0
            .finalize()
            .iter()
            .map(|b| format!("{b:02x}"))
            .collect()
    }
}
