//! Chunks of an image in the order in which to fetch them.

use std::{ops::Range, sync::Arc};

use lazuli_image::{Digest, Stored, Trace, oci::Descriptor};

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

/// The chunks in these ranges of each blob, the first range of each first.
pub(super) fn of_ranges(ranges: &[Vec<Range<Stored>>], blobs: &[Arc<CachedBlob>]) -> Vec<ChunkAt> {
    let of_blob = |(position, (ranges, blob)): (usize, (&Vec<_>, &Arc<CachedBlob>))| {
        let chunks = |range| blob.stored_in(range).map(|chunk| (position, chunk)).collect();
        ranges.iter().map(chunks).collect()
    };
    let by_blob = ranges.iter().zip(blobs).enumerate().map(of_blob).collect();
    in_turns(by_blob).into_iter().flat_map(|chunks: Vec<ChunkAt>| chunks).collect()
}

/// What the image's maker says of its start: the hot part of each blob, or the ranges that it
/// guessed if no blob has one.
pub(super) fn baked(layers: &[Descriptor]) -> Vec<(Digest, Range<Stored>)> {
    // What an index says is of its layer.
    let id = |layer: &Descriptor| layer.index_of().unwrap_or(layer.digest);
    let hot = |layer: &Descriptor| Some((id(layer), Stored(0)..Stored(layer.hot_bytes()?)));
    let hot: Vec<_> = layers.iter().filter_map(hot).collect();
    if !hot.is_empty() {
        return hot;
    }
    let guessed = |layer: &Descriptor| {
        let ranges = layer.start_ranges().into_iter();
        ranges.map(|range| (id(layer), range)).collect()
    };
    in_turns(layers.iter().map(guessed).collect())
}

/// The first element of each list, then the second of each, and so on.
fn in_turns<T>(lists: Vec<Vec<T>>) -> Vec<T> {
    let mut lists: Vec<_> = lists.into_iter().map(Vec::into_iter).collect();
    let longest = lists.iter().map(ExactSizeIterator::len).max().unwrap_or_default();
    (0..longest)
        .flat_map(|_| lists.iter_mut().filter_map(Iterator::next).collect::<Vec<_>>())
        .collect()
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
