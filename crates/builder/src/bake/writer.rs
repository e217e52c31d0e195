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
    Options,
    built_blob::BuiltBlob,
    error::BuildError,
    pack::Unsealed,
    scratch::Scratch,
    unit::{InUnit, UnitEncoder},
};

/// A blob that grows.
#[derive(Debug)]
pub(crate) struct BlobWriter {
    scratch: Scratch,
    path: PathBuf,
    file: BufWriter<File>,
    hasher: Hasher,
    codec: Codec,
    /// Re-encodes chunks that were part of a unit.
    encoder: Option<UnitEncoder>,
    chunks: Vec<Chunk>,
}

impl BlobWriter {
    /// Creates an empty blob in a new file `name`, with chunks compressed with `codec`.
    pub(crate) fn create(scratch: Scratch, name: &str, codec: Codec) -> Result<Self, BuildError> {
        let path = scratch.join(name);
        let file = File::create_new(&path).map_err(|problem| scratch.failed(problem))?;
        let (file, hasher) = (BufWriter::new(file), Algorithm::Sha256.hasher());
        Ok(BlobWriter { scratch, path, file, hasher, codec, encoder: None, chunks: Vec::new() })
    }

    /// Adds a chunk with these stored bytes, or all chunks of a batch, behind the others.
    pub(crate) fn add(&mut self, unit: &[Chunk], stored: &[u8]) -> Result<(), BuildError> {
        let start = self.chunks.last().map_or(Stored(0), Chunk::stored_end);
        for chunk in unit {
            let end = self.chunks.last().map(|last| round_up_to_block(last.decoded_end().0));
            let chunk = Chunk {
                number: self.chunks.len() as u32,
                stored: start,
                // Blobs end long before 2^64 bytes: those that do not fit the format are refused in
                // the end.
                decoded: Decoded(end.flatten().unwrap_or(0)),
                ..*chunk
            };
            self.chunks.push(chunk);
        }
        self.hasher.update(stored);
        self.file.write_all(stored).map_err(|problem| self.scratch.failed(problem))
    }

    /// Adds chunks with this content, as a unit of their own.
    pub(crate) fn add_anew(&mut self, parts: &[(Chunk, &[u8])]) -> Result<(), BuildError> {
        let encoder = match &mut self.encoder {
            Some(encoder) => encoder,
            none => {
                let new = UnitEncoder::new(self.codec, Options::LEVEL);
                none.insert(new.map_err(BuildError::Compress)?)
            }
        };
        let contents: Vec<&[u8]> = parts.iter().map(|(_, content)| *content).collect();
        let mut stored = Vec::new();
        let places = encoder.encode(&contents, &mut stored);
        let place = |((chunk, _), InUnit { stored_size, part }): (&(Chunk, _), InUnit)| Chunk {
            stored_size,
            part,
            ..*chunk
        };
        let unit: Vec<Chunk> = parts.iter().zip(places).map(place).collect();
        self.add(&unit, &stored)
    }

    /// The chunks written so far, at their new places.
    pub(crate) fn chunks(&self) -> &[Chunk] {
        &self.chunks
    }

    /// Ends the blob, which begins with `hot_bytes` that a start reads.
    pub(crate) fn finish(self, hot_bytes: u64) -> Result<BuiltBlob, BuildError> {
        let BlobWriter { scratch, path, file, hasher, codec, chunks, .. } = self;
        let file = file.into_inner().map_err(|error| scratch.failed(error.into_error()))?;
        let blob = Unsealed { file, path, hasher, chunks }.seal(codec, &scratch)?;
        Ok(BuiltBlob { hot_bytes: Some(hot_bytes), ..blob })
    }
}
