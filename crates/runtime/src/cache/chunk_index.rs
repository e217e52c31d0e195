//! Chunks that another blob in the cache has: copied instead of fetched.
//!
//! Two versions of an image, or two images with the same package, share chunks although their blobs
//! differ. The index maps a part of each digest to a place in the cache. It is small, and sometimes
//! wrong, which is harmless: copies are checked like answers, and a chunk that doesn't match is
//! fetched.

use std::{
    collections::HashMap,
    io,
    os::unix::fs::FileExt as _,
    sync::{Arc, Mutex, Weak},
};

use lazuli_image::{BLOCK_SIZE, Blob, Chunk, Digest};

use super::{
    Cache, CacheError, ReadyMap, allowed_repositories::AllowedRepositories, layout::Layout,
    store::Store,
};
use crate::sync::lock;

/// Chunks that are known at most, in up to 36 MB. As many as forty images of python:3.12's size
/// have.
const MAX_CHUNKS: usize = 1 << 20;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct ChunkIndex(Mutex<Locations>);

#[derive(Debug, Default)]
struct Locations {
    /// By the beginning of the digest.
    chunks: HashMap<u64, Location>,
    blobs: Vec<KnownBlob>,
    numbers: HashMap<Arc<str>, u32>,
}

/// A blob that has chunks.
#[derive(Debug)]
struct KnownBlob {
    /// The name of its directory in the cache.
    key: Arc<str>,
    allowed: Arc<AllowedRepositories>,
}

/// The place of a chunk's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Location {
    /// Position in [`Locations::blobs`].
    blob: u32,
    /// The first block in the blob's data file. The format limits files to 2^32 blocks.
    block: u32,
}

impl ChunkIndex {
    /// Notes that the blob in a directory has some chunks.
    pub(super) fn enter<'a>(
        &self,
        key: &str,
        allowed: &Arc<AllowedRepositories>,
        chunks: impl Iterator<Item = &'a Chunk>,
    ) {
        let mut index = lock(&self.0);
        let index = &mut *index;
        let blob = *index.numbers.entry(key.into()).or_insert_with_key(|key| {
            index.blobs.push(KnownBlob { key: key.clone(), allowed: allowed.clone() });
            (index.blobs.len() - 1) as u32
        });
        // It may have been opened again.
        index.blobs[blob as usize].allowed = allowed.clone();
        for chunk in chunks {
            let place = Location { blob, block: (chunk.decoded.0 / BLOCK_SIZE) as u32 };
            if index.chunks.len() < MAX_CHUNKS {
                index.chunks.entry(beginning(&chunk.digest)).or_insert(place);
            }
        }
    }

    /// Forgets a chunk of the blob in a directory.
    pub(super) fn forget(&self, key: &str, chunk: &Chunk) {
        let mut index = lock(&self.0);
        let of = index.numbers.get(key).copied();
        let beginning = beginning(&chunk.digest);
        if index.chunks.get(&beginning).is_some_and(|place| Some(place.blob) == of) {
            index.chunks.remove(&beginning);
        }
    }

    /// Forgets everything of the blob in a directory.
    pub(super) fn forget_all(&self, key: &str) {
        let mut index = lock(&self.0);
        if let Some(blob) = index.numbers.get(key).copied() {
            index.chunks.retain(|_, place| place.blob != blob);
        }
    }

    /// The directory and the first block of a blob, another one than that in `own`, that has a
    /// chunk and may share it with images of `own`.
    pub(super) fn find(
        &self,
        own: &str,
        allowed: &AllowedRepositories,
        chunk: &Chunk,
    ) -> Option<(Arc<str>, u32)> {
        let index = lock(&self.0);
        let place = index.chunks.get(&beginning(&chunk.digest))?;
        let blob = &index.blobs[place.blob as usize];
        let is_usable = *blob.key != *own && blob.allowed.share_with(allowed);
        is_usable.then(|| (blob.key.clone(), place.block))
    }
}

fn beginning(digest: &Digest) -> u64 {
    let (beginning, _) = digest.hash.split_first_chunk().expect("a digest has 32 bytes");
    u64::from_le_bytes(*beginning)
}

impl Cache {
    /// Indexes the chunks on disk of a blob that was not opened yet.
    pub(crate) fn remember(&self, blob: &Blob) -> Result<(), CacheError> {
        let layout = Layout::new(blob)?;
        let key = layout.key();
        let Some(known) = Store::peek(&self.dir.join(&key), &layout, &self.boot) else {
            return Ok(());
        };
        let known = ReadyMap::new(layout.chunks().len(), &known);
        let chunks = layout.chunks().iter().enumerate();
        let here = chunks.filter(|(at, _)| known.is_ready(*at)).map(|(_, chunk)| chunk);
        let allowed = Arc::new(AllowedRepositories::read(&self.dir.join(&key)));
        self.chunk_index.enter(&key, &allowed, here);
        Ok(())
    }

    /// Reads from the data file in a blob's directory.
    pub(super) fn read_elsewhere(&self, key: &str, start: u64, bytes: &mut [u8]) -> io::Result<()> {
        let blobs = lock(&self.blobs);
        if let Some(blob) = blobs.get(key).and_then(Weak::upgrade) {
            drop(blobs);
            return blob.file().read_exact_at(bytes, start);
        }
        // Under the lock: a file that was opened before it is marked can be read without a question
        // of the kernel's to us.
        let file = Store::open_closed(&self.dir.join(key))?;
        drop(blobs);
        file.read_exact_at(bytes, start)
    }
}
