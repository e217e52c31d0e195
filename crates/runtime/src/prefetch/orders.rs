//! Chunks of an image in the order in which to fetch them.

use std::{ops::Range, sync::Arc};

use lazuli_image::{Digest, Stored, Trace, oci::Descriptor};
use lazuli_registry::Manifest;

use super::fetch_in_order::ChunkAt;
use crate::cache::CachedBlob;

/// The chunks that a trace calls hot, as far as the image has them.
pub(super) fn of_trace(trace: &Trace, blobs: &[Arc<CachedBlob>]) -> Vec<ChunkAt> {
    let place = |(id, number): (Digest, u32)| {
        let blob = blobs.iter().position(|blob| blob.id() == id)?;
        Some((blob, blobs[blob].position(number)?))
    };
    trace.hot().filter_map(place).collect()
}

/// The chunks that the image's maker calls hot.
pub(super) fn of_maker(hot: &[u64], blobs: &[Arc<CachedBlob>]) -> Vec<ChunkAt> {
    let of_blob = |(position, (hot, blob)): (usize, (&u64, &Arc<CachedBlob>))| {
        blob.stored_within(*hot).map(move |chunk| (position, chunk))
    };
    hot.iter().zip(blobs).enumerate().flat_map(of_blob).collect()
}

/// The hot part of each blob, as marked by the image's maker.
pub(super) fn baked(manifest: &Manifest) -> impl Iterator<Item = (Digest, Range<Stored>)> {
    let hot = |layer: &Descriptor| Some((layer.digest, Stored(0)..Stored(layer.hot_bytes()?)));
    manifest.parsed.layers.iter().filter_map(hot)
}

/// As many of the first chunks of `order` as have `most` stored bytes.
pub(super) fn first_of(blobs: &[Arc<CachedBlob>], order: Vec<ChunkAt>, most: u64) -> Vec<ChunkAt> {
    let mut left = most;
    let mut fits = |(blob, chunk): &ChunkAt| {
        let rest = left.checked_sub(blobs[*blob].chunk(*chunk).stored_share());
        left = rest.unwrap_or(0);
        rest.is_some()
    };
    order.into_iter().take_while(|place| fits(place)).collect()
}
