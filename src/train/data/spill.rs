//! Temporary files for data that is computed once and read in any order.
//!
//! They lie in the system's folder for temporary files (`TMPDIR`) without a name, so they are gone when the process ends,
//! however it ends.

use crate::frontend::file::map_file;
use bytes::Bytes;
use ckpt_passes::ir::{DType, Tensor};
use ckpt_passes::{Error, Result};
use std::fs::File;
use std::io::{BufWriter, Read, Write};

/// A temporary file that grows.
pub(super) struct Spill {
    out: BufWriter<File>,
    bytes: u64,
}

fn failed(e: &std::io::Error) -> Box<Error> {
    let folder = std::env::temp_dir();
    Error::environment("spill", format!("cannot write a temporary file: {e}"))
        .at(folder.display().to_string())
        .help("free some space there, or set TMPDIR to a folder of a larger disk")
}

impl Spill {
    /// Creates an empty file.
    ///
    /// # Errors
    /// A folder or disk that refuses.
    pub fn new() -> Result<Spill> {
        let file = tempfile::tempfile().map_err(|e| failed(&e))?;
        Ok(Spill {
            out: BufWriter::with_capacity(1 << 18, file),
            bytes: 0,
        })
    }

    /// Appends bytes.
    ///
    /// # Errors
    /// A disk that refuses.
    pub fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.bytes += bytes.len() as u64;
        self.out.write_all(bytes).map_err(|e| failed(&e))
    }

    /// Appends all that a stream has, such as a compressed array.
    ///
    /// # Errors
    /// A damaged stream, or a disk that refuses.
    pub fn put_all(&mut self, from: &mut dyn Read) -> Result<()> {
        let mut block = vec![0; 1 << 16];
        loop {
            let read = from.read(&mut block).map_err(|e| {
                Error::usage("data", "the compressed data is damaged").found(e.to_string())
            })?;
            match read {
                0 => return Ok(()),
                _ => self.put(&block[..read])?,
            }
        }
    }

    /// Appends a number.
    ///
    /// # Errors
    /// A disk that refuses.
    pub fn put_u64(&mut self, number: u64) -> Result<()> {
        self.put(&number.to_le_bytes())
    }

    /// Returns the content, mapped, as a vector.
    ///
    /// # Errors
    /// A disk or system that refuses.
    pub fn finish(self, dtype: DType) -> Result<Tensor> {
        let elements = self.bytes / dtype.size_bytes();
        Ok(Tensor::new(dtype, [elements], self.mapped()?))
    }

    /// Returns the content, mapped.
    ///
    /// # Errors
    /// A disk or system that refuses.
    pub fn mapped(self) -> Result<Bytes> {
        let file = self.out.into_inner().map_err(|e| failed(e.error()))?;
        match self.bytes {
            0 => Ok(Bytes::new()),
            _ => map_file(&file).map_err(|e| failed(&e)),
        }
    }
}
