//! Small blobs, whole: configurations and bootstraps, which a mount waits for.
//!
//! A new connection carries ten segments, 14.6 kB, in the first round trip, and twice as many in
//! each that follows: a blob of 300 kB takes five. So it is asked for in parts at the same time,
//! over several connections, each with a beginning of its own: it takes two. No more connections
//! are used than that needs: lists of referrers and signatures, which a start also waits for, are
//! asked for at the same time, and would have to wait for new connections.

use std::sync::Arc;

use bytes::Bytes;
use futures_util::future::try_join_all;
use lazuli_image::{Stored, oci::Descriptor};
use tokio::io::AsyncReadExt as _;

use crate::{
    distribution::range,
    error::{self, RegistryError},
    manifest::DOCUMENT_LIMIT,
    repository::{Pull, SmallBlob},
    transport::CONNECTIONS,
};

/// Bytes of a blob in a connection's first round trip: what the answer's headers leave of ten
/// segments of 1,460 bytes.
const FIRST_BYTES: u64 = 14_000;

/// The smallest number of parts in which a blob arrives after as few round trips as in
/// [`CONNECTIONS`] of them.
fn part_count(size: u64) -> u64 {
    let mut part = FIRST_BYTES;
    while part * CONNECTIONS < size {
        // As much as in all round trips before it, and the first window more.
        part = 2 * part + FIRST_BYTES;
    }
    size.div_ceil(part)
}

/// Fetches and checks a whole blob; in parts if the server reads ranges.
pub(crate) async fn read<R: Pull + ?Sized>(
    repository: &R,
    blob: &Descriptor,
) -> Result<SmallBlob, RegistryError> {
    let object = format!("blob {}", blob.digest);
    let place = repository.describe();
    if blob.size > DOCUMENT_LIMIT {
        return Err(RegistryError::TooLarge { place, object, limit: DOCUMENT_LIMIT });
    }
    let mut requests = 1;
    let (whole, count) = (Stored(0)..Stored(blob.size), part_count(blob.size));
    let policy = repository.request_policy();
    let parts: Vec<_> = range::parts(&whole, count, policy.health().map(Arc::as_ref)).collect();
    if parts.len() > 1 {
        let reads =
            parts.into_iter().map(|part| repository.read(&blob.digest, blob.size, part, &|_| {}));
        let reads: Vec<_> = reads.collect();
        let asked = reads.len() as u64;
        match try_join_all(reads).await {
            Ok(parts) => {
                let content = Bytes::from(parts.concat());
                let (expected, got) = (blob.digest, blob.digest.algorithm.digest(&content));
                if got != expected {
                    return Err(RegistryError::WrongDigest { place, object, expected, got });
                }
                return Ok(SmallBlob { content, requests: asked });
            }
            Err(RegistryError::RangeUnsupported { .. }) => requests += asked,
            Err(error) => return Err(error),
        }
    }
    let mut content = Vec::new();
    let read = repository.blob(&blob.digest, blob.size).await?.read_to_end(&mut content).await;
    read.map_err(|error| error::from_reader(error, &place, &object))?;
    Ok(SmallBlob { content: content.into(), requests })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_blob_has_as_many_parts_as_save_a_round_trip() {
        for (size, expected) in [
            (0, 0),
            (1, 1),
            (14_000, 1),
            (14_001, 2),
            // All in the first round trip.
            (16 * 14_000, 16),
            // Two, of 14,000 and 28,000 bytes.
            (16 * 14_000 + 1, 6),
            (16 * 42_000, 16),
            // Three.
            (16 * 42_000 + 1, 7),
            (DOCUMENT_LIMIT, 10),
        ] {
            assert_eq!(part_count(size), expected, "{size}");
        }
    }
}
