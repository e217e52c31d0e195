//! Fetches chunk tables that don't come with the bootstrap.
//!
//! The tables of an unconverted layer are in its index, a blob of the manifest.
//!
//! Some bootstraps of upstream's builder omit where the chunks of batches are stored. Only the
//! tables at the end of the blob have it, and no digest covers these. A wrong table would be stored
//! with the image and make its chunks unreadable for as long as the image stays on the node. So a
//! few chunks are read where the tables say, and compared with their digests, before the image is
//! used.

use std::sync::Arc;

use bytes::Bytes;
use futures_util::future::join_all;
use lazuli_image::{
    Algorithm, Blob, Chunk, Codec, Digest, Stored,
    codec::Decoder,
    oci::{Descriptor, Manifest},
    rafs::{BlobRecord, IndexBlob, TailInfo},
};
use lazuli_registry::{Pull, RegistryError, from_reader};
use tokio::io::AsyncReadExt as _;

/// A place that holds the image.
type Mirror = Arc<dyn Pull>;

/// The result of [`prove`].
pub(super) struct Read {
    /// Whether the chunks are at their places; the error names a missing one.
    pub(super) proof: Result<(), String>,
    pub(super) bytes: u64,
    pub(super) requests: u64,
}

/// Maximum size of a layer's index that is held in memory, in bytes.
const INDEX_LIMIT: u64 = 512 << 20;

/// Tables of a blob, from [`TailInfo::ci_offset`] to [`TailInfo::meta_end`].
pub(super) struct Tables {
    pub(super) bytes: Bytes,
    /// The place that they came from.
    pub(super) place: Mirror,
    /// Whether a digest covers the tables.
    pub(super) is_checked: bool,
    /// Bytes that were read for them.
    pub(super) read: u64,
}

/// Fetches the tables of a blob from the first of `places` that has them. Other nodes are asked
/// only for tables with a digest. The tables of an unconverted layer are in its index, a blob of
/// `manifest`.
pub(super) async fn fetch(
    places: &[Mirror],
    manifest: &Manifest,
    record: &BlobRecord,
) -> Result<Tables, RegistryError> {
    let BlobRecord { blob, tail } = record;
    let Some(index) = tail.index else {
        let range = (blob.id, blob.stored_size);
        return fetch_range(places, range, tail, None).await;
    };
    let layer = manifest.layers.iter().find(|layer| layer.digest == index.digest);
    match layer.and_then(Descriptor::index_tables) {
        Some(digest) => fetch_range(places, (index.digest, index.size), tail, Some(digest)).await,
        None => fetch_whole(places, index, tail).await,
    }
}

/// The tables alone, which have this digest if there is one.
async fn fetch_range(
    places: &[Mirror],
    (blob, size): (Digest, u64),
    tail: &TailInfo,
    digest: Option<Digest>,
) -> Result<Tables, RegistryError> {
    let mut failures = Vec::new();
    let range = || Stored(tail.ci_offset)..Stored(tail.meta_end());
    let may_answer = |place: &&Mirror| digest.is_some() || !place.request_policy().is_peer();
    for place in places.iter().filter(may_answer) {
        match place.read(&blob, size, range(), &|_| {}).await {
            Ok(bytes) if digest.is_some_and(|digest| !digest.matches(&bytes)) => {
                let object = format!("the chunk tables of index {blob}");
                let got = Algorithm::Sha256.digest(&bytes);
                failures.extend(digest.map(|expected| RegistryError::WrongDigest {
                    place: place.describe(),
                    object,
                    got,
                    expected,
                }));
            }
            Ok(bytes) => {
                let (place, read) = (place.clone(), bytes.len() as u64);
                return Ok(Tables { bytes, place, is_checked: digest.is_some(), read });
            }
            Err(error) => failures.push(error),
        }
    }
    Err(RegistryError::Everywhere { failures })
}

/// Extracts the tables from the whole index, which is checked against its digest in the manifest.
async fn fetch_whole(
    places: &[Mirror],
    index: IndexBlob,
    tail: &TailInfo,
) -> Result<Tables, RegistryError> {
    let mut failures = Vec::new();
    for place in places {
        match read_whole(place, index).await {
            Ok(bytes) => {
                let (start, end) = (tail.ci_offset as usize, tail.meta_end() as usize);
                let inside = start <= end && end <= bytes.len();
                let tables = if inside { bytes.slice(start..end) } else { Bytes::new() };
                let (place, read) = (place.clone(), index.size);
                return Ok(Tables { bytes: tables, place, is_checked: true, read });
            }
            Err(error) => failures.push(error),
        }
    }
    Err(RegistryError::Everywhere { failures })
}

async fn read_whole(place: &Mirror, index: IndexBlob) -> Result<Bytes, RegistryError> {
    let IndexBlob { digest, size } = index;
    if size > INDEX_LIMIT {
        let (place, object) = (place.describe(), format!("index {digest}"));
        return Err(RegistryError::TooLarge { place, object, limit: INDEX_LIMIT });
    }
    let mut reader = place.blob(&digest, size).await?;
    let mut bytes = Vec::new();
    let read = reader.read_to_end(&mut bytes).await;
    read.map_err(|error| from_reader(error, &place.describe(), &format!("index {digest}")))?;
    Ok(bytes.into())
}

/// Checks the tables with the first, the middle and the last batch of a blob. A place with other
/// bytes proves nothing about the tables as long as another place has the right ones.
pub(super) async fn prove(places: &[Mirror], blob: &Blob) -> Result<Read, RegistryError> {
    let batched: Vec<_> = blob.chunks.iter().filter(|chunk| chunk.part.is_some()).collect();
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

/// Returns whether stored bytes are those of a chunk.
fn is(codec: Codec, chunk: &Chunk, stored: &[u8]) -> bool {
    let mut buffer = Vec::new();
    let unit = Decoder::new().unit(&chunk.unit(codec), stored, &mut buffer);
    unit.ok().and_then(|unit| chunk.part_of(unit)).is_some_and(|part| chunk.digest.matches(part))
}
