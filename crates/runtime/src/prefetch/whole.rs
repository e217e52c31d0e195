//! Fetches whole images, as fast as the link allows.

use std::sync::Arc;

use super::{
    Prefetcher,
    fetch_in_order::{self, Blobs, Purpose},
};
use crate::{cache::CachedBlob, error::ReadError};

/// Fetches all missing chunks, as fast as the link allows. Returns when they are present, checked,
/// and on the disk.
///
/// # Errors
/// No source delivers some of it, or there is no room.
pub(crate) async fn fast(prefetcher: &Prefetcher, blobs: &Blobs) -> Result<(), ReadError> {
    let Some(all) = blobs.upgrade() else { return Ok(()) };
    let cache = &prefetcher.cache;
    if let Some(blob) = all.iter().max_by_key(|blob| blob.file_size())
        && !cache.may_hold(all.iter().map(|blob| blob.file_size()).sum())
    {
        return Err(ReadError::NoSpace { blob: blob.id(), path: blob.path() });
    }
    expect(&all);
    fetch_in_order::fetch(blobs, missing(&all), None, &prefetcher.pace, Purpose::Order(cache))
        .await?;
    // Chunks that others were fetching, suspect ones, and those that did not arrive, with the
    // error.
    for blob in all.iter() {
        for chunk in blob.unready() {
            let chunk = blob.chunk(chunk);
            blob.prefetch_range(&(chunk.decoded..chunk.decoded_end())).await?;
        }
        blob.settled().await?;
    }
    Ok(())
}

/// Tells sources that fetch for several nodes which blobs are about to be read.
pub(super) fn expect(blobs: &[Arc<CachedBlob>]) {
    let lacking = blobs.iter().filter(|blob| !blob.missing().is_empty());
    let places = lacking.filter_map(|blob| blob.sources().into_iter().next());
    places.filter(|place| place.is_well()).for_each(|place| place.expect_whole());
}

/// The missing chunks.
pub(super) fn missing(blobs: &[Arc<CachedBlob>]) -> Vec<fetch_in_order::ChunkAt> {
    let of_blob = |(position, blob): (usize, &Arc<CachedBlob>)| {
        blob.missing().into_iter().map(move |chunk| (position, chunk))
    };
    blobs.iter().enumerate().flat_map(of_blob).collect()
}
