//! A chunk dictionary: stored blobs whose chunks a new image can use.

use std::collections::HashSet;

use lazuli_image::{
    Algorithm, Blob, Digest,
    rafs::{self, BlobRecord, Bootstrap},
};

use crate::{
    built_blob::BuiltBlob,
    layer_contents::LayerContents,
    options::{MAX_BLOBS, Options},
    scratch::Scratch,
};

/// The blobs that exist at the new image's destination.
#[derive(Debug, Default)]
pub struct Dictionary {
    blobs: Vec<KnownBlob>,
    chunk_size: u32,
}

/// A blob that is stored already.
#[derive(Clone, Debug)]
pub struct KnownBlob {
    /// Its description in the bootstrap of an image that has it.
    pub record: BlobRecord,
    /// The content of its `.blob.meta` file.
    pub meta_file: Vec<u8>,
    /// Stored bytes at its beginning that a start reads, if that is known.
    pub hot_bytes: Option<u64>,
}

impl KnownBlob {
    pub(crate) fn into_built(self, scratch: &Scratch) -> BuiltBlob {
        let KnownBlob { record, meta_file, hot_bytes } = self;
        let (file, scratch) = (None, scratch.clone());
        BuiltBlob { record, file, meta_file, hot_bytes, scratch }
    }
}

impl Dictionary {
    /// Takes all blobs of `image`, wherever they are stored, to build a layer or a bare bootstrap.
    /// Their `.blob.meta` files are unknown here.
    pub fn of<B: AsRef<[u8]>>(image: &Bootstrap<B>) -> Self {
        let mut blobs = Vec::new();
        if image.digest_algorithm() == Algorithm::Blake3 && image.version() == 6 {
            let known = |record| KnownBlob { record, meta_file: Vec::new(), hot_bytes: None };
            blobs.extend(image.blob_records().into_iter().map(known));
        }
        Dictionary { blobs, chunk_size: image.chunk_size() }
    }

    /// Minimum stored bytes of a blob that is reused for single chunks only. Each further blob of
    /// an image costs a start one more request. At 100 Mbit/s, this many bytes take as long as a
    /// request to a registry 20 ms away. Without a limit, each version of an image would leave a
    /// small blob behind that all later ones need.
    const WORTHWHILE: u64 = 256 << 10;

    /// Adds the blobs of `image`. `stored` returns the stored size of a blob and the number of hot
    /// bytes at its beginning, or `None` to leave the blob out. Blobs by other writers are left out
    /// too: only their maker can describe the tables at their end.
    pub fn add<B: AsRef<[u8]>>(
        &mut self,
        image: &Bootstrap<B>,
        stored: impl Fn(&Digest) -> Option<(u64, Option<u64>)>,
    ) {
        if image.digest_algorithm() != Algorithm::Blake3
            || !self.blobs.is_empty() && self.chunk_size != image.chunk_size()
        {
            return;
        }
        self.chunk_size = image.chunk_size();
        for record in image.blob_records() {
            let known = self.blobs.iter().any(|known| known.record.blob.id == record.blob.id);
            let Some((size, hot_bytes)) = stored(&record.blob.id).filter(|_| !known) else {
                continue;
            };
            if let Some(meta_file) = rafs::written_meta_file(&record)
                && size == record.blob.stored_size
            {
                self.blobs.push(KnownBlob { record, meta_file, hot_bytes });
            }
        }
    }

    /// Takes all blobs of a base image, those with hot bytes first: another blob may have the
    /// chunks of a start as well.
    pub(crate) fn of_base(mut blobs: Vec<KnownBlob>, chunk_size: u32) -> Self {
        blobs.sort_by_key(|blob| blob.hot_bytes.is_none());
        Dictionary { blobs, chunk_size }
    }

    /// The ids of all blobs.
    pub fn ids(&self) -> impl Iterator<Item = Digest> {
        self.blobs.iter().map(|known| known.record.blob.id)
    }

    /// Returns whether the dictionary has no blobs.
    pub fn is_empty(&self) -> bool {
        self.blobs.is_empty()
    }

    /// Removes blobs that an image with these `options` and this number of `layers` cannot have.
    /// Removes blobs that are too small to be worth a request, unless a recorded layer needs them;
    /// `layers` has the records. Returns which layers have all of their chunks here.
    pub fn trim(&mut self, layers: &[Option<LayerContents>], options: &Options) -> Vec<bool> {
        self.fit(options, MAX_BLOBS.saturating_sub(layers.len()));
        // Without the option, readers may not support batches.
        let is_batched = |blob: &Blob| blob.chunks.iter().any(|chunk| chunk.part.is_some());
        self.blobs.retain(|known| options.batch_size != 0 || !is_batched(&known.record.blob));
        let all: HashSet<[u8; 32]> = chunks(&self.blobs).collect();
        let is_here = |layer: &Option<LayerContents>| {
            layer.as_ref().is_some_and(|layer| {
                layer.chunk_size() == self.chunk_size
                    && layer.digests().all(|digest| all.contains(digest))
            })
        };
        let here: Vec<bool> = layers.iter().map(is_here).collect();
        let known = layers.iter().zip(&here).filter(|(_, here)| **here);
        let known = known.filter_map(|(layer, _)| layer.as_ref());
        let wanted: HashSet<[u8; 32]> = known.flat_map(LayerContents::digests).copied().collect();
        let is_wanted = |blob: &Blob| blob.chunks.iter().any(|c| wanted.contains(&c.digest.hash));
        self.blobs.retain(|KnownBlob { record, .. }| {
            record.blob.stored_size >= Self::WORTHWHILE || is_wanted(&record.blob)
        });
        here
    }

    /// Removes blobs that an image with these `options` cannot have, and those beyond the first
    /// `limit`.
    pub(crate) fn fit(&mut self, options: &Options, limit: usize) {
        let same_size = self.chunk_size == options.chunk_size;
        self.blobs.retain(|known| same_size && known.record.blob.codec == options.codec);
        self.blobs.truncate(limit);
    }

    pub(crate) fn blobs(&self) -> &[KnownBlob] {
        &self.blobs
    }

    pub(crate) fn into_blobs(self) -> Vec<KnownBlob> {
        self.blobs
    }
}

fn chunks(blobs: &[KnownBlob]) -> impl Iterator<Item = [u8; 32]> {
    blobs.iter().flat_map(|known| &known.record.blob.chunks).map(|chunk| chunk.digest.hash)
}
