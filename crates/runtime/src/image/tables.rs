//! Chunk tables that come without a digest.
//!
//! Upstream's builder leaves out of some bootstraps where the chunks of batches are stored; only the tables at the end of the
//! blob say so, and no digest covers them. A wrong one would be kept with the image, and its chunks could not be read for
//! as long as it is. So some of the chunks are read where the tables lead, and compared with their digests, before the
//! image is used.

use std::{ops::Range, sync::Arc};

use bytes::Bytes;
use futures_util::future::join_all;
use lazuli_image::{Blob, Chunk, Codec, Stored, codec::Decoder};
use lazuli_registry::{RegistryError, Repository};

/// A place that holds the image.
type Mirror = Arc<dyn Repository>;

/// What [`prove`] found.
pub(super) struct Read {
    /// Whether the chunks are where they should be; if not, which one is missing.
    pub(super) proof: Result<(), String>,
    pub(super) bytes: u64,
    pub(super) requests: u64,
}

/// Tables of a blob, from the first of `places` that has them, and which that is: never from other nodes.
pub(super) async fn fetch(
    places: &[Mirror],
    blob: &Blob,
    range: Range<Stored>,
) -> Result<(Bytes, Mirror), RegistryError> {
    let mut failures = Vec::new();
    for place in places.iter().filter(|place| !place.is_for_all()) {
        match place.read(&blob.id, blob.stored_size, range.clone(), &|_| {}).await {
            Ok(bytes) => return Ok((bytes, place.clone())),
            Err(error) => failures.push(error),
        }
    }
    Err(RegistryError::Everywhere { failures })
}

/// Reads the first, the middle and the last batch of a blob. A place with other bytes says nothing about the tables,
/// as long as another one has the right ones.
pub(super) async fn prove(places: &[Mirror], blob: &Blob) -> Result<Read, RegistryError> {
    let batched: Vec<_> = blob.chunks.iter().filter(|chunk| chunk.batch.is_some()).collect();
    let mut chosen: Vec<_> = [0, batched.len() / 2, batched.len().saturating_sub(1)]
        .into_iter()
        .filter_map(|at| batched.get(at).copied())
        .collect();
    chosen.dedup_by(|a, b| a.shares_unit(b));
    let looks = chosen.into_iter().map(|chunk| look(places, blob, chunk));
    let mut all = Read { proof: Ok(()), bytes: 0, requests: 0 };
    for read in join_all(looks).await {
        let Read { proof, bytes, requests } = read?;
        all.proof = all.proof.and(proof);
        (all.bytes, all.requests) = (all.bytes + bytes, all.requests + requests);
    }
    Ok(all)
}

/// Reads one chunk.
async fn look(places: &[Mirror], blob: &Blob, chunk: &Chunk) -> Result<Read, RegistryError> {
    let mut read = Read { proof: Ok(()), bytes: 0, requests: 0 };
    let mut failures = Vec::new();
    for place in places {
        let range = chunk.stored..chunk.stored_end();
        read.requests += 1;
        match place.read(&blob.id, blob.stored_size, range, &|_| {}).await {
            Ok(stored) => {
                read.bytes += stored.len() as u64;
                let (codec, chunk) = (blob.codec, *chunk);
                let checked = tokio::task::spawn_blocking(move || is(codec, &chunk, &stored));
                if checked.await.unwrap_or(false) {
                    return Ok(read);
                }
            }
            Err(error) => failures.push(error),
        }
    }
    if failures.len() == places.len() {
        return Err(RegistryError::Everywhere { failures });
    }
    read.proof = Err(format!("chunk {} is not at {}", chunk.number, chunk.stored));
    Ok(read)
}

/// Whether stored bytes are those of a chunk.
fn is(codec: Codec, chunk: &Chunk, stored: &[u8]) -> bool {
    let mut buffer = Vec::new();
    let unit = Decoder::new().unit(codec, chunk, stored, &mut buffer);
    unit.ok().and_then(|unit| chunk.part_of(unit)).is_some_and(|part| chunk.digest.matches(part))
}
