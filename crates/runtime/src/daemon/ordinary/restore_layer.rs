//! Restores layers that arrived in pieces once they are complete, and checks them.
//!
//! This proves, without any network, whether the layer's tar has the stated digest, and so whether
//! skeleton, windows and digests of chunks led to the layer's own files. If not, the statement is
//! wrong: readers of mounted images get errors, and no new start uses it. Only content that the
//! index itself describes says something of it: another image may describe the layer in another
//! way, and chunks may be evicted meanwhile.

use std::{
    io,
    os::unix::fs::FileExt as _,
    path::Path,
    sync::{Arc, Weak},
};

use lazuli_builder::index::diff_id;
use lazuli_image::{Chunk, Digest, rafs::ReadIndex};

use super::{
    checks::{Checks, PAUSE},
    store::{IndexStore, LayerRecord},
};
use crate::{
    cache::CachedBlob,
    daemon::{node::Node, served::image::ServedImage},
};

/// Checks layers as they become complete, for as long as the node serves. Layers with the indexes
/// `wrong` have not been served since this worker began.
pub(in crate::daemon) async fn keep_checking(node: Weak<Node>, wrong: Vec<Digest>) {
    for index in wrong {
        let Some(node) = node.upgrade() else { return };
        node.condemn(&index).await;
    }
    // By their indexes.
    let mut checks = Checks::default();
    loop {
        tokio::time::sleep(PAUSE).await;
        let Some(node) = node.upgrade() else { return };
        for image in node.images.all().await {
            for blob in image.blobs() {
                let Some(index) = image.index_of(&blob.id()) else { continue };
                if !checks.is_due(&index) || !blob.is_complete() {
                    continue;
                }
                let store = node.ordinaries.store.clone();
                let Some(record) = store.layer(&blob.id()) else { continue };
                if record.is_proven || record.index != index {
                    continue;
                }
                let blob = blob.clone();
                let check = move || check(&store, &blob, record);
                match tokio::task::spawn_blocking(check).await {
                    Ok(Some(is_right)) => {
                        checks.finish(index);
                        if !is_right {
                            node.condemn(&index).await;
                        }
                    }
                    Ok(None) => checks.put_off(index),
                    Err(error) => tracing::error!(%error, "a layer is not checked"),
                }
            }
        }
    }
}

/// Returns whether a complete layer matches its statement; `None` if that cannot be found out.
/// Blocks.
fn check(store: &IndexStore, blob: &CachedBlob, record: LayerRecord) -> Option<bool> {
    let bytes = store.index(&record.index)?;
    let layer = blob.id();
    let mut is_its_content = true;
    let got = ReadIndex::parse(&bytes, layer, blob.stats().stored_bytes).map(|index| {
        diff_id(&index, |chunk, content| {
            let read = read_chunk(blob, chunk, content);
            is_its_content &= read.is_ok();
            read
        })
    });
    if !is_its_content {
        return None;
    }
    let is_right = matches!(&got, Ok(Ok(got)) if *got == record.diff_id);
    let noted = match is_right {
        true => {
            tracing::info!(%layer, "complete, and what was stated of it");
            store.note_layer(&layer, &LayerRecord { is_proven: true, ..record })
        }
        false => {
            tracing::error!(%layer, index = %record.index, expected = %record.diff_id, ?got,
                "a signed index is wrong: it is not used any more");
            store.note_wrong(&record.index)
        }
    };
    if let Err(error) = noted {
        tracing::warn!(%layer, %error, "it is checked again");
    }
    Some(is_right)
}

/// Reads a chunk of a complete blob. Fails if its content has another digest.
pub(super) fn read_chunk(blob: &CachedBlob, chunk: &Chunk, content: &mut [u8]) -> io::Result<()> {
    blob.file().read_exact_at(content, chunk.decoded.0)?;
    match chunk.digest.matches(content) {
        true => Ok(()),
        false => Err(io::Error::other("a chunk has another digest")),
    }
}

impl Node {
    /// Makes reads of adopted images fail if an earlier worker found their indexes wrong, and
    /// returns these indexes. Must be called before any reader is answered.
    pub(in crate::daemon) async fn refuse_wrong(&self) -> Vec<Digest> {
        let mut wrong = Vec::new();
        for image in self.images.all().await {
            for blob in image.blobs() {
                let store = &self.ordinaries.store;
                let index = image.index_of(&blob.id()).filter(|index| store.is_wrong(index));
                if index.is_none() && store.is_right_file(&blob.description()) != Some(false) {
                    continue;
                }
                wrong.extend(index);
                let (layer, blob) = (blob.id(), blob.clone());
                match tokio::task::spawn_blocking(move || blob.refuse()).await {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => tracing::error!(%layer, %error, "cannot be cut off"),
                    Err(error) => tracing::error!(%layer, %error, "cannot be cut off"),
                }
            }
        }
        wrong
    }

    /// Makes all reads fail that this index leads to.
    async fn condemn(&self, index: &Digest) {
        for (mountpoint, image) in self.mounts.served().await {
            let Some(blob) = image.blob_of_index(index) else { continue };
            cut_off(&blob, &image, &mountpoint).await;
        }
    }
}

/// Makes all reads of a blob fail, and those at this mount of an image that has it.
pub(super) async fn cut_off(blob: &Arc<CachedBlob>, image: &Arc<ServedImage>, mountpoint: &Path) {
    let (blob, image, at) = (blob.clone(), image.clone(), mountpoint.to_owned());
    let condemn = move || {
        blob.condemn()?;
        blob.forget_pages();
        image.forget_missing(&at)
    };
    let done: io::Result<_> = tokio::task::spawn_blocking(condemn).await.map_err(io::Error::other);
    let mountpoint = mountpoint.display();
    match done.flatten() {
        Ok(()) => tracing::error!(%mountpoint, "its readers get errors now"),
        Err(error) => tracing::error!(%mountpoint, %error, "cannot be cut off"),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use lazuli_builder::index::{IndexLayer, KnownLayer, index_while_reading};
    use lazuli_image::{Algorithm, Blob};
    use lazuli_testkit::{
        odd::random,
        tarball::{self, Entry},
    };

    use super::*;
    use crate::{
        cache::{Cache, Settings},
        image::from_indexes::blob_of,
    };

    /// A layer of one file, with its index and the blob that this describes.
    fn layer(content: &[u8]) -> (KnownLayer, Blob) {
        let stored = tarball::write(&[Entry::file("file", content)]);
        let (digest, stored_size) = (Algorithm::Sha256.digest(&stored), stored.len() as u64);
        let source = Box::new(Cursor::new(stored));
        let layer = IndexLayer { digest, stored_size, file: None, source };
        let read = index_while_reading(layer, &mut |_, _| Ok(())).unwrap();
        let (diff_id, index) = (read.diff_id, read.index.bytes);
        let known = KnownLayer { digest, stored_size, diff_id, file: None, index };
        let blob = blob_of(known.clone()).unwrap().unwrap();
        (known, blob)
    }

    fn complete(cache: &Cache, blob: &Blob, content: &[u8]) -> Arc<CachedBlob> {
        let incoming = cache.incoming().unwrap();
        incoming.write(blob.chunks[0].decoded, content).unwrap();
        cache.import(incoming, blob).unwrap()
    }

    fn open(directory: &Path) -> (IndexStore, Arc<Cache>) {
        let store = IndexStore::open(directory.join("indexes"), &directory.join("bundle"));
        (store.unwrap(), Cache::open(&directory.join("cache"), Settings::default()).unwrap())
    }

    #[tokio::test]
    async fn only_content_that_an_index_describes_shows_that_it_is_wrong() {
        let directory = tempfile::tempdir().unwrap();
        let (store, cache) = open(directory.path());
        let [content, other] = [1, 2].map(|seed| random(seed, 300_000));
        let (known, blob) = layer(&content);
        let index = store.keep_index(&known.index).unwrap();
        let record = LayerRecord { diff_id: known.diff_id, index, is_proven: false };
        // Another image says that the layer has other content.
        let mut lie = blob.clone();
        for chunk in lie.chunks.to_mut() {
            chunk.digest = Algorithm::Blake3.digest(&other);
        }
        let of_other = complete(&cache, &lie, &other);
        assert_eq!(check(&store, &of_other, record), None);
        assert!(!store.is_wrong(&index) && store.layer(&known.digest).is_none());
        let cached = complete(&cache, &blob, &content);
        let stated = LayerRecord { diff_id: Algorithm::Sha256.digest(b"another tar"), ..record };
        assert_eq!(check(&store, &cached, record), Some(true));
        assert!(store.layer(&known.digest).unwrap().is_proven);
        assert_eq!(check(&store, &cached, stated), Some(false));
        assert!(store.is_wrong(&index));
    }
}
