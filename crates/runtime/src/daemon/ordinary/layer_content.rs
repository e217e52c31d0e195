//! Content of layers that are here: in the cache after a first pull, in containerd's content store
//! after it has unpacked them.

use std::{fs::File, os::unix::fs::FileExt as _, sync::Arc};

use async_trait::async_trait;
use lazuli_image::{Blob, Chunk, codec::Decoder};

use super::content_store::ContentStore;
use crate::{
    cache::{Cache, CachedBlob},
    prefetch::DecodedBlobs,
};

/// Reads the layers of an image without a registry.
pub(super) struct LayerContent<'a> {
    blobs: &'a [Blob],
    /// For each blob where it is.
    places: Vec<Places>,
}

struct Places {
    cached: Option<Arc<CachedBlob>>,
    stored: Option<File>,
}

impl<'a> LayerContent<'a> {
    pub(super) fn open(
        blobs: &'a [Blob],
        cache: &Cache,
        content_store: Option<&ContentStore>,
    ) -> Self {
        let place = |blob: &Blob| Places {
            cached: cache.find(blob).ok().flatten(),
            stored: content_store
                .and_then(|store| store.open(&blob.id).ok().flatten())
                .and_then(|(file, size)| (size == blob.stored_size).then_some(file)),
        };
        LayerContent { blobs, places: blobs.iter().map(place).collect() }
    }

    /// Reads a chunk, which matches its digest.
    fn chunk(&self, position: usize, chunk: &Chunk, decoder: &mut Decoder) -> Option<Vec<u8>> {
        let Places { cached, stored } = &self.places[position];
        let range = chunk.decoded..chunk.decoded_end();
        if let Some(cached) = cached.as_ref().filter(|cached| cached.is_filled(&range)) {
            let mut bytes = vec![0; chunk.decoded_size as usize];
            let read = cached.file().read_exact_at(&mut bytes, chunk.decoded.0);
            // It may have been evicted in between.
            if read.is_ok() && chunk.digest.matches(&bytes) {
                return Some(bytes);
            }
        }
        let (mut bytes, mut unit) = (vec![0; chunk.stored_size as usize], Vec::new());
        stored.as_ref()?.read_exact_at(&mut bytes, chunk.stored.0).ok()?;
        let blob = &self.blobs[position];
        let unit = decoder.unit(&blob.unit(chunk), &bytes, &mut unit).ok()?;
        chunk.verified(unit).ok().map(<[u8]>::to_vec)
    }
}

#[async_trait]
impl DecodedBlobs for LayerContent<'_> {
    async fn decode(&self, blob: usize, chunks: &[Chunk]) -> Option<Vec<Vec<u8>>> {
        let mut decoder = Decoder::new();
        chunks.iter().map(|chunk| self.chunk(blob, chunk, &mut decoder)).collect()
    }
}
