//! A queue of bytes between a thread that copies and one that writes, of a limited size.

use rayon::prelude::*;
use std::io::{self, ErrorKind, Write};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

/// The most bytes of a piece.
const PIECE_BYTES: usize = 16 << 20;
/// The least number of pieces: one is written while the next is copied.
const LEAST_PIECES: usize = 2;

/// The end that copies.
pub struct Pieces(SyncSender<Vec<u8>>);

/// The end that writes.
pub struct Wanted(Receiver<Vec<u8>>);

/// Returns the two ends of a queue for contents of these sizes that holds about `limit_bytes` at most, and whether all of them
/// fit at once.
pub fn queue(sizes: &[usize], limit_bytes: u64) -> (Pieces, Wanted, bool) {
    let fits = sizes.iter().map(|bytes| *bytes as u64).sum::<u64>() <= limit_bytes;
    let pieces = match fits {
        true => sizes.iter().map(|n| n.div_ceil(PIECE_BYTES)).sum(),
        false => (limit_bytes as usize / PIECE_BYTES).max(LEAST_PIECES),
    };
    let (sender, receiver) = sync_channel(pieces);
    (Pieces(sender), Wanted(receiver), fits)
}

impl Pieces {
    /// Copies bytes into the queue, a piece on each processor. Waits while it is full. Returns false if the other end is gone.
    pub fn send(&self, bytes: &[u8]) -> bool {
        let mut groups = bytes.chunks(PIECE_BYTES * rayon::current_num_threads());
        groups.all(|group| {
            let pieces: Vec<_> = group.par_chunks(PIECE_BYTES).map(<[u8]>::to_vec).collect();
            pieces.into_iter().all(|piece| self.0.send(piece).is_ok())
        })
    }
}

impl Wanted {
    /// Writes the next `bytes` of the queue.
    ///
    /// # Errors
    /// Those of `out`; the other end is gone before all bytes came.
    pub fn write(&self, bytes: usize, out: &mut dyn Write) -> io::Result<()> {
        let mut left = bytes;
        while left > 0 {
            let piece = self.0.recv().map_err(|_| ErrorKind::BrokenPipe)?;
            out.write_all(&piece)?;
            left = left.saturating_sub(piece.len());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    fn numbers(count: usize) -> Vec<u8> {
        (0..count).map(|i| (i % 251) as u8).collect()
    }

    #[test]
    fn more_than_the_queue_holds_goes_through() {
        let sent = [numbers(3 * PIECE_BYTES + 5), Vec::new(), numbers(7)];
        let sizes = sent.each_ref().map(Vec::len);
        let (pieces, wanted, fits) = queue(&sizes, PIECE_BYTES as u64);
        assert!(!fits);
        let writer = thread::spawn(move || {
            sizes.map(|bytes| {
                let mut got = Vec::new();
                wanted.write(bytes, &mut got).unwrap();
                got
            })
        });
        assert!(sent.iter().all(|bytes| pieces.send(bytes)));
        assert!(writer.join().unwrap() == sent);
    }

    #[test]
    fn either_end_sees_that_the_other_is_gone() {
        let (pieces, wanted, fits) = queue(&[1, 1], 2);
        assert!(fits);
        // All fit: no other end is needed to send them.
        assert!(pieces.send(&[1]));
        drop(pieces);
        let failed = wanted.write(2, &mut Vec::new()).unwrap_err();
        assert_eq!(failed.kind(), ErrorKind::BrokenPipe);
        let (pieces, wanted, _) = queue(&[1], 0);
        drop(wanted);
        assert!(!pieces.send(&[1]));
    }
}
