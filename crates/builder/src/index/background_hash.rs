//! Computes a digest on another thread.

use std::{
    io, mem,
    panic::resume_unwind,
    sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel},
    thread::{self, JoinHandle},
};

use lazuli_image::{Algorithm, Digest};

/// Bytes handed over at a time: the thread wakes up some thousand times for a GB.
const PIECE: usize = 256 << 10;

/// Pieces that wait for the thread.
const WAITING: usize = 2;

/// The SHA-256 of a stream, computed on another thread. To decode a layer takes about twice as
/// long.
#[derive(Debug)]
pub struct BackgroundHash {
    piece: Vec<u8>,
    pieces: SyncSender<Vec<u8>>,
    /// Pieces that are hashed, to be filled again.
    hashed: Receiver<Vec<u8>>,
    thread: JoinHandle<Digest>,
}

impl BackgroundHash {
    /// The hash of nothing yet.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn new() -> io::Result<Self> {
        let (pieces, waiting) = sync_channel(WAITING);
        let (back, hashed) = channel();
        let hash = move || hash(&waiting, &back);
        let thread = thread::Builder::new().name("digest".to_owned()).spawn(hash)?;
        Ok(BackgroundHash { piece: Vec::with_capacity(PIECE), pieces, hashed, thread })
    }

    /// Adds the next bytes. Waits if the thread has half a MiB to do.
    pub fn update(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let (now, later) = bytes.split_at(bytes.len().min(PIECE - self.piece.len()));
            self.piece.extend_from_slice(now);
            bytes = later;
            if self.piece.len() == PIECE {
                self.hand_over();
            }
        }
    }

    fn hand_over(&mut self) {
        let mut next = self.hashed.try_recv().unwrap_or_default();
        next.clear();
        next.reserve_exact(PIECE);
        // Fails only if the thread has panicked, which `finish` passes on.
        let _ = self.pieces.send(mem::replace(&mut self.piece, next));
    }

    /// The digest, once the thread has done all.
    pub fn finish(self) -> Digest {
        let BackgroundHash { piece, pieces, thread, .. } = self;
        let _ = pieces.send(piece);
        drop(pieces);
        thread.join().unwrap_or_else(|panic| resume_unwind(panic))
    }
}

fn hash(pieces: &Receiver<Vec<u8>>, hashed: &Sender<Vec<u8>>) -> Digest {
    let mut hasher = Algorithm::Sha256.hasher();
    for piece in pieces {
        hasher.update(&piece);
        // The other side may have no more use for it.
        let _ = hashed.send(piece);
    }
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_digest_is_that_of_all_bytes_however_they_come() {
        let bytes: Vec<u8> = (0..5 * PIECE + 17).map(|at| (at / 3) as u8).collect();
        for size in [1000, PIECE, 3 * PIECE + 1, bytes.len()] {
            let mut hash = BackgroundHash::new().unwrap();
            bytes.chunks(size).for_each(|part| hash.update(part));
            assert_eq!(hash.finish(), Algorithm::Sha256.digest(&bytes), "{size}");
        }
        let empty = BackgroundHash::new().unwrap();
        assert_eq!(empty.finish(), Algorithm::Sha256.digest(b""));
    }
}
