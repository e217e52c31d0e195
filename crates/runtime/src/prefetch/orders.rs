//! Chunks of an image in the order in which to fetch them.

use std::{collections::HashSet, ops::Range, sync::Arc};

use lazuli_image::{
    Digest, Stored, Trace,
    oci::{Descriptor, NotedGuess},
    trace::MAX_TOUCHES,
};

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

/// The chunks that a maker guesses, and then those that lie between them in its spans: they arrive
/// with these.
pub(super) fn of_guess(guess: &Trace, blobs: &[Arc<CachedBlob>]) -> Vec<ChunkAt> {
    let within = |(id, range): (Digest, Range<Stored>)| {
        let blob = blobs.iter().position(|blob| blob.id() == id)?;
        Some(blobs[blob].stored_in(&range).map(move |chunk| (blob, chunk)))
    };
    let mut order = of_trace(guess, blobs);
    let mut known: HashSet<_> = order.iter().copied().collect();
    // Spans may overlap, whoever wrote them.
    let between = guess.spans().filter_map(within).flatten().take(MAX_TOUCHES);
    order.extend(between.filter(|place| known.insert(*place)));
    order
}

/// The image's maker's guess, unless it is malformed: it is only a hint.
pub(super) fn decoded(guess: Option<&NotedGuess>) -> Option<Trace> {
    let decoded = guess?.decode();
    decoded.inspect_err(|error| tracing::info!(%error, "the guess in a manifest is ignored")).ok()
}

/// What the image's maker says of its start: the hot part of each blob, or where the beginning of
/// its guess is stored if no blob has one.
pub(super) fn baked(
    layers: &[Descriptor],
    guess: Option<&NotedGuess>,
) -> Vec<(Digest, Range<Stored>)> {
    // What an index says is of its layer.
    let id = |layer: &Descriptor| layer.index_of().unwrap_or(layer.digest);
    let hot = |layer: &Descriptor| Some((id(layer), Stored(0)..Stored(layer.hot_bytes()?)));
    let hot: Vec<_> = layers.iter().filter_map(hot).collect();
    match hot.is_empty() {
        true => decoded(guess).iter().flat_map(Trace::spans).collect(),
        false => hot,
    }
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
