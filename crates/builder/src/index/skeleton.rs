//! Skeletons: records the bytes of an unpacked layer that are in no chunk, and puts them between
//! the chunks again.

use std::io::{self, Read, Write as _};

use lazuli_image::{Algorithm, Chunk, Digest, rafs::ReadIndex};

use crate::error::SourceError;

/// Maximum size of a skeleton before compression, in bytes. Headers and padding take a kilobyte for
/// each file; more than this is left out of the index.
const LIMIT: u64 = 1 << 30;

/// Headers and padding differ little: higher levels save a hundredth of the index.
const LEVEL: i32 = 3;

/// Records the bytes of a layer outside its chunks.
pub(super) struct Recorder {
    /// `None` after giving up.
    encoder: Option<zstd::stream::write::Encoder<'static, Vec<u8>>>,
    left: u64,
    is_paused: bool,
}

impl Recorder {
    pub(super) fn new() -> io::Result<Self> {
        let encoder = zstd::stream::write::Encoder::new(Vec::new(), LEVEL)?;
        Ok(Recorder { encoder: Some(encoder), left: LIMIT, is_paused: false })
    }

    /// Skips the following bytes: they are in chunks.
    pub(super) fn pause(&mut self) {
        self.is_paused = true;
    }

    /// Records the following bytes.
    pub(super) fn resume(&mut self) {
        self.is_paused = false;
    }

    /// Gives up: some skipped bytes are in no chunk.
    pub(super) fn give_up(&mut self) {
        self.encoder = None;
    }

    pub(super) fn record(&mut self, bytes: &[u8]) -> io::Result<()> {
        if self.is_paused {
            return Ok(());
        }
        match self.left.checked_sub(bytes.len() as u64) {
            Some(left) => self.left = left,
            None => self.encoder = None,
        }
        self.encoder.as_mut().map_or(Ok(()), |encoder| encoder.write_all(bytes))
    }

    /// The skeleton; empty if it was given up.
    pub(super) fn finish(self) -> io::Result<Vec<u8>> {
        self.encoder.map_or_else(|| Ok(Vec::new()), |encoder| encoder.finish())
    }
}

/// Brings the content of a chunk into a buffer of its size.
pub(super) type Fill<'a> = dyn FnMut(&Chunk, &mut [u8]) -> io::Result<()> + 'a;

/// The unpacked layer: a skeleton with the chunks in it.
pub(super) struct Joined<'a> {
    skeleton: Box<dyn Read + 'a>,
    index: &'a ReadIndex,
    fill: &'a mut Fill<'a>,
    at: u64,
    /// The number of the next chunk.
    next: usize,
    /// The unread part of a chunk.
    chunk: Vec<u8>,
    read: usize,
}

impl<'a> Joined<'a> {
    pub(super) fn new(index: &'a ReadIndex, fill: &'a mut Fill<'a>) -> io::Result<Self> {
        let skeleton = index.skeleton.as_deref();
        let skeleton = skeleton.ok_or_else(|| io::Error::other("the index has no skeleton"))?;
        let skeleton = zstd::stream::read::Decoder::with_buffer(skeleton)?.take(LIMIT);
        let skeleton = Box::new(skeleton);
        Ok(Joined { skeleton, index, fill, at: 0, next: 0, chunk: Vec::new(), read: 0 })
    }

    /// The chunk that begins at this place of the unpacked layer, if it is the next one.
    pub(super) fn chunk_at(&self, place: u64) -> Option<&'a Chunk> {
        let start = *self.index.starts.get(self.next)?;
        (start == place).then(|| &self.index.record.blob.chunks[self.next])
    }

    /// Returns whether all chunks were read.
    pub(super) fn has_read_all(&self) -> bool {
        self.next == self.index.starts.len()
    }

    /// Goes on behind the next chunk, which begins here.
    pub(super) fn pass_chunk(&mut self) {
        self.at += u64::from(self.index.record.blob.chunks[self.next].decoded_size);
        self.next += 1;
    }

    fn bring_chunk(&mut self) -> io::Result<()> {
        let chunk = &self.index.record.blob.chunks[self.next];
        self.chunk.resize(chunk.decoded_size as usize, 0);
        (self.fill)(chunk, &mut self.chunk)?;
        self.read = 0;
        self.next += 1;
        Ok(())
    }
}

impl Read for Joined<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        let start = self.index.starts.get(self.next).copied();
        if self.read == self.chunk.len() && start == Some(self.at) {
            self.bring_chunk()?;
        }
        let of_chunk = &self.chunk[self.read..];
        let count = if of_chunk.is_empty() {
            let until = start.map_or(u64::MAX, |start| start - self.at);
            let count = buffer.len().min(usize::try_from(until).unwrap_or(usize::MAX));
            self.skeleton.read(&mut buffer[..count])?
        } else {
            let count = buffer.len().min(of_chunk.len());
            buffer[..count].copy_from_slice(&of_chunk[..count]);
            self.read += count;
            count
        };
        self.at += count as u64;
        Ok(count)
    }
}

/// Bytes of the unpacked layer.
///
/// # Errors
/// The index has no skeleton, or one that cannot be read.
pub fn tar_size(index: &ReadIndex) -> io::Result<u64> {
    let chunks: u64 =
        index.record.blob.chunks.iter().map(|chunk| u64::from(chunk.decoded_size)).sum();
    let skeleton = index.skeleton.as_deref();
    let skeleton = skeleton.ok_or_else(|| io::Error::other("the index has no skeleton"))?;
    let mut skeleton = zstd::stream::read::Decoder::with_buffer(skeleton)?.take(LIMIT);
    Ok(chunks + io::copy(&mut skeleton, &mut io::sink())?)
}

/// The SHA-256 of the unpacked layer, restored from `index` and its chunks. `fill` reads a chunk
/// into a buffer of its size.
///
/// # Errors
/// The index has no skeleton, or one that ends before the last chunk, or content cannot be had.
pub fn diff_id(
    index: &ReadIndex,
    mut fill: impl FnMut(&Chunk, &mut [u8]) -> io::Result<()>,
) -> Result<Digest, SourceError> {
    let failed = |error: io::Error| SourceError::Archive { offset: 0, problem: error.to_string() };
    let mut joined = Joined::new(index, &mut fill).map_err(failed)?;
    let mut hasher = Algorithm::Sha256.hasher();
    let mut buffer = vec![0; 128 << 10];
    loop {
        match joined.read(&mut buffer).map_err(failed)? {
            0 if joined.has_read_all() => return Ok(hasher.finish()),
            0 => return Err(failed(io::Error::other("its skeleton ends before its last chunk"))),
            count => hasher.update(&buffer[..count]),
        }
    }
}
