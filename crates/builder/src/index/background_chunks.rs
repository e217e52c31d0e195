//! Computes digests of chunks, and passes the chunks on, on another thread.

use std::{
    io, mem,
    panic::resume_unwind,
    sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel},
    thread::{Builder, Scope, ScopedJoinHandle},
};

use lazuli_image::{Algorithm, Decoded, Digest};

/// Takes the content of chunks, on a thread of its own: the place of each among the decoded bytes
/// of the layer's blob, and its bytes.
pub type ChunkSink<'a> = dyn FnMut(Decoded, &[u8]) -> io::Result<()> + Send + 'a;

/// Pieces that wait for the thread.
const WAITING: usize = 2;

/// Chunks of a piece: those of files of a few bytes.
const MOST: usize = 4096;

/// Chunks that lie behind each other: small ones are not handed over one by one.
struct Piece {
    bytes: Vec<u8>,
    filled: usize,
    /// Places among the decoded bytes of the layer's blob, and sizes.
    chunks: Vec<(Decoded, usize)>,
}

impl Piece {
    fn new(size: usize) -> Self {
        Piece { bytes: vec![0; size], filled: 0, chunks: Vec::new() }
    }
}

/// A thread that takes the chunks of a layer.
pub(super) struct BackgroundChunks<'scope> {
    piece: Piece,
    pieces: SyncSender<Piece>,
    /// Pieces that are done, to be filled again.
    done: Receiver<Piece>,
    thread: ScopedJoinHandle<'scope, io::Result<Vec<Digest>>>,
}

impl<'scope> BackgroundChunks<'scope> {
    /// Starts the thread, for chunks of up to `size` bytes.
    ///
    /// # Errors
    /// No thread can be started.
    pub(super) fn new<'a: 'scope>(
        scope: &'scope Scope<'scope, '_>,
        size: usize,
        sink: Option<&'a mut ChunkSink<'a>>,
    ) -> io::Result<Self> {
        let (pieces, waiting) = sync_channel(WAITING);
        let (back, done) = channel();
        let take = move || take(&waiting, &back, sink);
        let thread = Builder::new().name("chunks".to_owned()).spawn_scoped(scope, take)?;
        Ok(BackgroundChunks { piece: Piece::new(size), pieces, done, thread })
    }

    /// The buffer for the next chunk, of `length` bytes.
    pub(super) fn next(&mut self, length: usize) -> &mut [u8] {
        let is_full = self.piece.chunks.len() == MOST;
        if is_full || self.piece.bytes.len() - self.piece.filled < length {
            self.hand_over();
        }
        let Piece { bytes, filled, .. } = &mut self.piece;
        &mut bytes[*filled..*filled + length]
    }

    /// Takes what was written to the buffer. The chunk's place is `at`.
    pub(super) fn add(&mut self, at: Decoded, length: usize) {
        self.piece.filled += length;
        self.piece.chunks.push((at, length));
    }

    /// Returns whether chunks are still taken. Otherwise [`BackgroundChunks::finish`] says why.
    pub(super) fn is_taking(&self) -> bool {
        !self.thread.is_finished()
    }

    fn hand_over(&mut self) {
        let size = self.piece.bytes.len();
        let mut next = self.done.try_recv().unwrap_or_else(|_| Piece::new(size));
        next.filled = 0;
        next.chunks.clear();
        // Fails only if the thread has ended, which `finish` reports.
        let _ = self.pieces.send(mem::replace(&mut self.piece, next));
    }

    /// The digests of all chunks, once the thread has done all.
    ///
    /// # Errors
    /// The sink's.
    pub(super) fn finish(self) -> io::Result<Vec<Digest>> {
        let BackgroundChunks { piece, pieces, thread, .. } = self;
        let _ = pieces.send(piece);
        drop(pieces);
        thread.join().unwrap_or_else(|panic| resume_unwind(panic))
    }
}

fn take(
    pieces: &Receiver<Piece>,
    done: &Sender<Piece>,
    mut sink: Option<&mut ChunkSink<'_>>,
) -> io::Result<Vec<Digest>> {
    let mut digests = Vec::new();
    for piece in pieces {
        let mut start = 0;
        for (at, length) in &piece.chunks {
            let content = &piece.bytes[start..start + length];
            start += length;
            digests.push(Algorithm::Blake3.digest(content));
            if let Some(sink) = &mut sink {
                sink(*at, content)?;
            }
        }
        // The other side may have no more use for it.
        let _ = done.send(piece);
    }
    Ok(digests)
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    /// Chunks of these sizes, each with a place and content of its own.
    fn add(chunks: &mut BackgroundChunks<'_>, sizes: &[usize]) -> Vec<(Decoded, Vec<u8>)> {
        let mut added = Vec::new();
        for (number, size) in sizes.iter().enumerate() {
            let content = vec![number as u8; *size];
            chunks.next(*size).copy_from_slice(&content);
            let at = Decoded(number as u64 * 4096);
            chunks.add(at, *size);
            added.push((at, content));
        }
        added
    }

    #[test]
    fn all_chunks_are_digested_and_passed_on_in_their_order() {
        let sizes: Vec<usize> = (0..200).map(|number| 1 + number * 37 % 1000).collect();
        let mut taken = Vec::new();
        let mut sink = |at: Decoded, content: &[u8]| {
            taken.push((at, content.to_vec()));
            Ok(())
        };
        let (added, digests) = thread::scope(|scope| {
            let mut chunks = BackgroundChunks::new(scope, 1000, Some(&mut sink)).unwrap();
            (add(&mut chunks, &sizes), chunks.finish().unwrap())
        });
        let expected = added.iter().map(|(_, content)| Algorithm::Blake3.digest(content));
        assert_eq!(digests, expected.collect::<Vec<_>>());
        assert_eq!(taken, added);
    }

    #[test]
    fn chunks_are_not_taken_after_a_failure() {
        let mut sink = |at: Decoded, _: &[u8]| match at {
            Decoded(0) => Ok(()),
            _ => Err(io::ErrorKind::StorageFull.into()),
        };
        let failed = thread::scope(|scope| {
            let mut chunks = BackgroundChunks::new(scope, 1000, Some(&mut sink)).unwrap();
            while chunks.is_taking() {
                add(&mut chunks, &[1000; 5]);
            }
            chunks.finish()
        });
        assert_eq!(failed.unwrap_err().kind(), io::ErrorKind::StorageFull);
    }
}
