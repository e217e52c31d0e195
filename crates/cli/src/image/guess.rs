//! Guesses what a start of an image that was made reads: converters note it for the nodes.

use std::{
    collections::HashMap,
    fs::File,
    os::unix::fs::FileExt as _,
    path::Path,
    sync::{Mutex, PoisonError},
};

use anyhow::Result;
use async_trait::async_trait;
use bytes::Bytes;
use lazuli_image::{
    Blob, Chunk,
    oci::{ImageConfig, NotedGuess},
    rafs::Bootstrap,
};
use lazuli_registry::Pull;
use lazuli_runtime::prefetch::{DecodedBlobs, makers_guess};
use tokio::runtime::Runtime;

use super::read_chunks;

/// Guesses what a start of an image most likely reads; `None` if nothing. Blobs without one of
/// `files` are read at `place`.
pub(crate) fn guess(
    config: &ImageConfig,
    bootstrap: &Bootstrap<&[u8]>,
    files: &[Option<&Path>],
    place: &dyn Pull,
    runtime: &Runtime,
) -> Result<Option<NotedGuess>> {
    let config = serde_json::from_slice(&config.to_json())?;
    let blobs = Blobs { all: bootstrap.blobs(), files, place, fetched: Mutex::default() };
    let guess = || runtime.block_on(makers_guess(&config, bootstrap, &blobs));
    let mut guessed = guess();
    if !blobs.fetched().is_empty() {
        // What is found depends on the order in which `place` answered. Now nothing waits.
        guessed = guess();
    }
    Ok(NotedGuess::of(&guessed))
}

struct Blobs<'a> {
    all: &'a [Blob],
    files: &'a [Option<&'a Path>],
    place: &'a dyn Pull,
    /// Decoded chunks of blobs at `place`, by position of the blob and number.
    fetched: Mutex<HashMap<(usize, u32), Vec<u8>>>,
}

impl Blobs<'_> {
    fn fetched(&self) -> std::sync::MutexGuard<'_, HashMap<(usize, u32), Vec<u8>>> {
        self.fetched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Decodes chunks of a blob.
    async fn chunks(&self, position: usize, wanted: &[Chunk]) -> Result<Vec<Vec<u8>>> {
        let found: Vec<(&Blob, &Chunk)> =
            wanted.iter().map(|chunk| (&self.all[position], chunk)).collect();
        let Some(file) = self.files.get(position).copied().flatten() else {
            return self.fetch(position, &found).await;
        };
        let file = File::open(file)?;
        let stored = |(_, chunk): &(_, &Chunk)| {
            let mut bytes = vec![0; chunk.stored_size as usize];
            file.read_exact_at(&mut bytes, chunk.stored.0)?;
            Ok(Bytes::from(bytes))
        };
        let stored: Vec<Bytes> = found.iter().map(stored).collect::<Result<_>>()?;
        read_chunks::decode(&found, &stored)
    }

    /// The same for a blob at `place`.
    async fn fetch(&self, position: usize, found: &[(&Blob, &Chunk)]) -> Result<Vec<Vec<u8>>> {
        let known =
            |(_, chunk): &(_, &Chunk)| self.fetched().get(&(position, chunk.number)).cloned();
        if let Some(known) = found.iter().map(known).collect() {
            return Ok(known);
        }
        let stored = read_chunks::read(self.place, found, read_chunks::REQUESTS).await?;
        let decoded = read_chunks::decode(found, &stored)?;
        let new = found.iter().zip(&decoded);
        self.fetched().extend(new.map(|((_, it), bytes)| ((position, it.number), bytes.clone())));
        Ok(decoded)
    }
}

#[async_trait]
impl DecodedBlobs for Blobs<'_> {
    async fn decode(&self, position: usize, chunks: &[Chunk]) -> Option<Vec<Vec<u8>>> {
        let decoded = self.chunks(position, chunks).await;
        decoded.inspect_err(|error| tracing::debug!(%error, "a guess is incomplete")).ok()
    }
}
