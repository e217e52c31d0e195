//! Writes a blob chunk by chunk, from chunks that are stored elsewhere.

use std::{
    fs::File,
    io::{BufWriter, Write as _},
    path::PathBuf,
};

use lazuli_image::{
    Algorithm, Chunk, Codec, Decoded, Stored, digest::Hasher, offset::round_up_to_block,
};

use crate::{
    error::BuildError,
    pack::{BuiltBlob, Unsealed},
    spool::Scratch,
};

/// A blob that grows.
#[derive(Debug)]
pub(super) struct BlobWriter {
    scratch: Scratch,
    path: PathBuf,
    file: BufWriter<File>,
    hasher: Hasher,
    chunks: Vec<Chunk>,
}

impl BlobWriter {
    /// An empty blob in a new file called `name`.
    pub(super) fn create(scratch: Scratch, name: &str) -> Result<Self, BuildError> {
        let path = scratch.join(name);
        let file = File::create_new(&path).map_err(|problem| scratch.failed(problem))?;
        let (file, hasher) = (BufWriter::new(file), Algorithm::Sha256.hasher());
        Ok(BlobWriter { scratch, path, file, hasher, chunks: Vec::new() })
    }

    /// Adds a chunk with these stored bytes behind the others.
    pub(super) fn add(&mut self, chunk: &Chunk, stored: &[u8]) -> Result<(), BuildError> {
        let last = self.chunks.last();
        // Blobs end long before 2^64 bytes: those that do not fit the format are refused in the end.
        let decoded = last.and_then(|last| round_up_to_block(last.decoded_end().0)).unwrap_or(0);
        let chunk = Chunk {
            number: self.chunks.len() as u32,
            stored: last.map_or(Stored(0), Chunk::stored_end),
            decoded: Decoded(decoded),
            ..*chunk
        };
        self.hasher.update(stored);
        self.chunks.push(chunk);
        self.file.write_all(stored).map_err(|problem| self.scratch.failed(problem))
    }

    /// The chunks so far, where they are now.
    pub(super) fn chunks(&self) -> &[Chunk] {
        &self.chunks
    }

    /// Ends the blob, which begins with `hot_bytes` that a start reads.
    pub(super) fn finish(self, codec: Codec, hot_bytes: u64) -> Result<BuiltBlob, BuildError> {
        let BlobWriter { scratch, path, file, hasher, chunks } = self;
        let file = file.into_inner().map_err(|error| scratch.failed(error.into_error()))?;
        let blob = Unsealed { file, path, hasher, chunks }.seal(codec, &scratch)?;
        Ok(BuiltBlob { hot_bytes: Some(hot_bytes), ..blob })
    }
}
