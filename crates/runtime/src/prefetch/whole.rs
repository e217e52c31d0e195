//! Fetches whole images: with low priority after their start, or as fast as the link allows.

use std::{sync::Arc, time::Duration};

use tokio::time::{Instant, sleep, sleep_until};

use super::{
    Prefetcher,
    fetch_in_order::{self, Blobs, Purpose},
    yield_to_readers::yield_to_readers,
};
use crate::{
    cache::{BytesFrom, CachedBlob},
    error::ReadError,
};

/// How long background work waits for readers before each request: a second of demand on the whole
/// node, at most.
const COURTESY: Duration = Duration::from_secs(1);

/// Stored bytes of a background request: small beside those of readers, large beside the cost of a
/// request.
const PIECE: u64 = 1 << 20;

/// How long a background request delays others, if its rate allows that: a second is what one takes
/// at 10 Mbit/s.
const PIECE_TIME: Duration = Duration::from_secs(1);

/// Pause after which a full disk, or a registry that does not deliver, is tried again.
const RETRY: Duration = Duration::from_secs(60);

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

/// Fetches everything that is missing at `rate` stored bytes per second, one request at a time for
/// all images, while no reader waits and the disk has room.
pub(super) async fn in_background(prefetcher: &Prefetcher, blobs: &Blobs, rate: u64) {
    loop {
        match try_in_background(prefetcher, blobs, rate).await {
            Ok(()) => return,
            Err(Pause) => sleep(RETRY).await,
        }
    }
}

/// It does not continue now.
struct Pause;

async fn try_in_background(prefetcher: &Prefetcher, blobs: &Blobs, rate: u64) -> Result<(), Pause> {
    // Repeat as long as that makes progress: chunks that turned out to be missing from other blobs
    // were skipped.
    let mut before = usize::MAX;
    if let Some(all) = blobs.upgrade() {
        let missing = missing(&all);
        let decoded =
            missing.iter().map(|(at, chunk)| u64::from(all[*at].chunk(*chunk).decoded_size));
        // A peer that is told fetches all of it, perhaps to the same disk.
        if prefetcher.cache.has_room_for_the_rest(decoded.sum()) {
            expect(&all);
        }
    }
    loop {
        let Some(all) = blobs.upgrade().map(|blobs| missing(&blobs)) else { return Ok(()) };
        if all.is_empty() || all.len() >= before {
            return Ok(());
        }
        before = all.len();
        bring(prefetcher, blobs, &all, rate).await?;
    }
}

/// Fetches some chunks, piece by piece.
async fn bring(
    prefetcher: &Prefetcher,
    blobs: &Blobs,
    mut rest: &[fetch_in_order::ChunkAt],
    rate: u64,
) -> Result<(), Pause> {
    while !rest.is_empty() {
        yield_to_readers(&prefetcher.cache, COURTESY).await;
        let Some(alive) = blobs.upgrade() else { return Ok(()) };
        let (piece, later) = rest.split_at(piece(rest, &alive));
        rest = later;
        let (blob, first) = (&alive[piece[0].0], piece[0].1);
        let chunks: Vec<_> = (first..first + piece.len()).collect();
        let decoded = chunks.iter().map(|at| u64::from(blob.chunk(*at).decoded_size));
        if !prefetcher.cache.has_room_for_the_rest(decoded.sum()) {
            tracing::info!(
                "the rest of an image is not fetched: the disk or the cache is nearly full"
            );
            return Err(Pause);
        }
        let longest = PIECE_TIME.max(Duration::from_secs_f64(2.0 * PIECE as f64 / rate as f64));
        let fetch = async {
            let begun = Instant::now();
            let mut bytes = 0;
            for (size, request) in blob.prefetch(&chunks, u64::MAX, BytesFrom::BackgroundRequest) {
                bytes += size;
                match request.await {
                    // Told in the log; bytes that no source has right are left to their readers.
                    Ok(Ok(()) | Err(ReadError::Corrupt { .. })) => {}
                    Ok(Err(_)) | Err(_) => return Err(Pause),
                }
            }
            sleep_until(begun + Duration::from_secs_f64(bytes as f64 / rate as f64)).await;
            Ok(())
        };
        prefetcher.rest_slot.run(longest, fetch).await?;
    }
    Ok(())
}

/// How many of `rest`, which is not empty, are the next piece: chunks that follow each other in one
/// blob, to the end of a unit, of which the begin would be fetched twice otherwise.
fn piece(rest: &[fetch_in_order::ChunkAt], blobs: &[Arc<CachedBlob>]) -> usize {
    let (blob, first) = rest[0];
    let mut bytes = 0;
    let fits = |(number, place): (usize, &fetch_in_order::ChunkAt)| {
        let chunk = blobs[blob].chunk(place.1.min(first + number));
        bytes += chunk.stored_share();
        let goes_on = || chunk.shares_unit(blobs[blob].chunk((first + number).saturating_sub(1)));
        *place == (blob, first + number) && (number == 0 || bytes <= PIECE || goes_on())
    };
    rest.iter().enumerate().map(fits).take_while(|fits| *fits).count()
}

/// Tells sources that fetch for several nodes which blobs are about to be read.
fn expect(blobs: &[Arc<CachedBlob>]) {
    let lacking = blobs.iter().filter(|blob| !blob.missing().is_empty());
    let places = lacking.filter_map(|blob| blob.sources().into_iter().next());
    places.filter(|place| place.is_well()).for_each(|place| place.expect_whole());
}

/// The missing chunks.
fn missing(blobs: &[Arc<CachedBlob>]) -> Vec<fetch_in_order::ChunkAt> {
    let of_blob = |(position, blob): (usize, &Arc<CachedBlob>)| {
        blob.missing().into_iter().map(move |chunk| (position, chunk))
    };
    blobs.iter().enumerate().flat_map(of_blob).collect()
}
