//! Small blobs, whole: configurations and bootstraps, which a mount waits for.
//!
//! A new connection carries ten segments, 14.6 kB, in the first round trip, and twice as many in each that follows: a blob of 300 kB
//! takes five. So it is asked for in parts at the same time, over as many connections, each with a beginning of its own: it takes two.

use std::ops::Range;

use bytes::Bytes;
use futures_util::future::try_join_all;
use lazuli_image::{Stored, oci::Descriptor};
use tokio::io::AsyncReadExt as _;

use crate::{
    Repository,
    error::{self, RegistryError},
    manifest::DOCUMENT_LIMIT,
};

/// Most parts: what a place is asked for at a time, for one blob.
const PARTS: u64 = 8;

/// Smallest part, in bytes: about what a connection carries in its first round trip.
const SMALLEST_PART: u64 = 16 << 10;

/// A blob in memory, and what it took to get it.
#[derive(Clone, Debug)]
pub struct SmallBlob {
    /// All of it.
    pub content: Bytes,
    /// Requests to the place that it came from.
    pub requests: u64,
}

/// Fetches and checks a whole blob. In parts, if it has more than two of the smallest, from a server that reads ranges.
pub(crate) async fn read<R: Repository + ?Sized>(
    repository: &R,
    blob: &Descriptor,
) -> Result<SmallBlob, RegistryError> {
    let object = format!("blob {}", blob.digest);
    let place = repository.describe();
    if blob.size > DOCUMENT_LIMIT {
        return Err(RegistryError::TooLarge { place, object, limit: DOCUMENT_LIMIT });
    }
    let mut requests = 1;
    if repository.health().is_some() && blob.size > 2 * SMALLEST_PART {
        let reads = parts(blob.size).map(|part| repository.read(&blob.digest, part, &|_| {}));
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

/// Equal parts of so many bytes, but for the last one.
fn parts(size: u64) -> impl Iterator<Item = Range<Stored>> {
    let length = size.div_ceil((size / SMALLEST_PART).clamp(1, PARTS));
    let end = move |start: u64| (start + length).min(size);
    (0..size).step_by(length.max(1) as usize).map(move |start| Stored(start)..Stored(end(start)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_all_of_it() {
        for (size, count) in [
            (0, 0),
            (1, 1),
            (2 * SMALLEST_PART, 2),
            (2 * SMALLEST_PART + 1, 2),
            (3 * SMALLEST_PART - 1, 2),
            (3 * SMALLEST_PART, 3),
            (300_001, 8),
            (DOCUMENT_LIMIT, 8),
        ] {
            let parts: Vec<_> = parts(size).collect();
            assert_eq!(parts.len(), count, "{size}");
            let mut at = 0;
            for part in &parts {
                assert_eq!(part.start.0, at);
                assert!(part.end > part.start);
                at = part.end.0;
            }
            assert_eq!(at, size);
            let whole = parts.len().saturating_sub(1);
            let long = |part: &Range<Stored>| part.end.0 - part.start.0 >= SMALLEST_PART;
            assert!(parts[..whole].iter().all(long), "{size}");
        }
    }
}
