//! Small blobs, whole: configurations and bootstraps, which a mount waits for.
//!
//! A new connection carries ten segments, 14.6 kB, in the first round trip, and twice as many in
//! each that follows: a blob of 300 kB takes five. So it is asked for in parts at the same time,
//! over as many connections, each with a beginning of its own: it takes two.

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
};

/// Minimum size of a part in bytes: about the capacity of a connection's first round trip.
const SMALLEST_PART: u64 = 16 << 10;

/// Fetches and checks a whole blob. In parts, if it has two of the smallest and the server reads
/// ranges.
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
    let (whole, count) = (Stored(0)..Stored(blob.size), blob.size / SMALLEST_PART);
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
