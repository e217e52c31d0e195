//! Streams blobs from the registry to clients.
//!
//! Several parts are fetched at a time and delivered in order, hashed as they pass. The last part
//! of a blob is held back until its digest is verified, so that no client ever has the whole of a
//! wrong blob. One memory limit covers all clients; parts wait for memory in the order in which
//! they were requested.

use std::{io, ops::Range, sync::Arc, time::Duration};

use bytes::Bytes;
use futures_util::{
    StreamExt as _,
    stream::{self, BoxStream},
};
use lazuli_image::{Digest, Stored};
use lazuli_registry::{Pull, RegistryError};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, mpsc},
    time::{Instant, sleep},
};
use tokio_util::io::ReaderStream;

/// Bytes of the first part, which is requested alone: one round trip, even over a new connection.
/// It shows that the registry delivers, and where: many redirect to storage.
const FIRST: u64 = 8 << 10;

/// Bytes of the other parts.
const PART: u64 = 2 << 20;

/// Parts of one blob at a time, from a server that is far away.
const FAR: usize = 6;

/// Parts at a time from a nearby server: one is delivered while the next arrives.
const NEAR: usize = 2;

/// Bytes in memory for all blobs in flight.
const MEMORY: u64 = 48 << 20;

/// Bytes per read from a server without range support.
const CHUNK: u64 = 64 << 10;

/// How long a part is retried after transient failures. containerd gives up a pull that receives
/// nothing for a minute.
const GIVE_UP: Duration = Duration::from_secs(30);

/// The pause before a part is asked for again, at first and at last.
const PAUSES: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(2)];

/// A blob at its registry.
#[derive(Clone, Debug)]
pub(crate) struct Blob {
    pub(crate) repository: Arc<dyn Pull>,
    pub(crate) digest: Digest,
    pub(crate) size: u64,
}

/// The memory for blobs in flight. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Memory(Arc<Semaphore>);

impl Default for Memory {
    fn default() -> Self {
        Memory(Arc::new(Semaphore::new(permits(MEMORY) as usize)))
    }
}

impl Memory {
    /// Waits for `bytes` of memory. `None` only if the semaphore is closed, which never happens.
    async fn take(&self, bytes: u64) -> Option<OwnedSemaphorePermit> {
        self.0.clone().acquire_many_owned(permits(bytes)).await.ok()
    }
}

/// Memory is counted in KiB.
fn permits(bytes: u64) -> u32 {
    u32::try_from(bytes.div_ceil(1 << 10)).unwrap_or(u32::MAX)
}

/// Bytes that give their memory back when the last of them is dropped.
struct BytesWithPermit {
    bytes: Bytes,
    _memory: Option<OwnedSemaphorePermit>,
}

impl AsRef<[u8]> for BytesWithPermit {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

type Parts = BoxStream<'static, Result<Bytes, RegistryError>>;

/// Delivers `range` of a blob, which must not be empty. Returns when its first bytes have arrived.
/// `on_wrong` is called if the blob turns out to have another digest.
///
/// # Errors
/// The registry does not deliver the first part.
pub(crate) async fn open(
    blob: Blob,
    range: Range<u64>,
    memory: &Memory,
    on_wrong: impl FnOnce() + Send + 'static,
) -> Result<mpsc::Receiver<io::Result<Bytes>>, RegistryError> {
    let mut parts = in_parts(&blob, range.clone(), memory);
    let first = match parts.next().await {
        Some(Err(RegistryError::RangeUnsupported { .. })) => {
            parts = in_one(&blob, range.clone(), memory).await?;
            parts.next().await
        }
        first => first,
    };
    let first = first.unwrap_or_else(|| Ok(Bytes::new()))?;
    let (sender, receiver) = mpsc::channel(1);
    tokio::spawn(async move {
        let parts = stream::iter([Ok(first)]).chain(parts).boxed();
        deliver(&blob, range, parts, &sender, on_wrong).await;
    });
    Ok(receiver)
}

/// Passes parts on to the client, checked if they are the whole blob.
async fn deliver(
    blob: &Blob,
    range: Range<u64>,
    mut parts: Parts,
    client: &mpsc::Sender<io::Result<Bytes>>,
    on_wrong: impl FnOnce(),
) {
    let mut left = range.end - range.start;
    let mut hasher = (left == blob.size).then(|| blob.digest.algorithm.hasher());
    while left > 0 {
        let part = match parts.next().await {
            Some(Ok(part)) => part,
            broken => {
                let error = match broken {
                    Some(Err(error)) => io::Error::other(error),
                    _ => io::ErrorKind::UnexpectedEof.into(),
                };
                tracing::warn!(digest = %blob.digest, %error, "a blob breaks off");
                let _ = client.send(Err(error)).await;
                return;
            }
        };
        left = left.saturating_sub(part.len() as u64);
        if let Some(hasher) = &mut hasher {
            hasher.update(&part);
        }
        if left == 0 && hasher.take().is_some_and(|hasher| hasher.finish() != blob.digest) {
            let place = blob.repository.describe();
            tracing::warn!(digest = %blob.digest, place, "a blob has another digest");
            let _ = client.send(Err(io::ErrorKind::InvalidData.into())).await;
            return on_wrong();
        }
        if client.send(Ok(part)).await.is_err() {
            // The client has gone.
            return;
        }
    }
}

/// The blob in parts: the first one, then several that are asked for at the same time.
fn in_parts(blob: &Blob, range: Range<u64>, memory: &Memory) -> Parts {
    let (blob, memory) = (blob.clone(), memory.clone());
    let mut parts = cut(range);
    let first = parts.next().map(|part| read(blob.clone(), part, memory.clone(), Duration::ZERO));
    let is_near = blob.repository.request_policy().health().is_some_and(|server| server.is_near());
    let rest = stream::iter(parts)
        .map(move |part| read(blob.clone(), part, memory.clone(), GIVE_UP))
        .buffered(if is_near { NEAR } else { FAR });
    stream::iter(first).then(|first| first).chain(rest).boxed()
}

/// Cuts a range into parts, the first one small.
fn cut(range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let mut start = range.start;
    std::iter::from_fn(move || {
        let size = if start == range.start { FIRST } else { PART };
        let part = start..range.end.min(start.saturating_add(size));
        start = part.end;
        (!part.is_empty()).then_some(part)
    })
}

/// Fetches one part, and retries transient failures within `limit`.
async fn read(
    blob: Blob,
    part: Range<u64>,
    memory: Memory,
    limit: Duration,
) -> Result<Bytes, RegistryError> {
    let held = memory.take(part.end - part.start).await;
    let begun = Instant::now();
    let [mut pause, longest] = PAUSES;
    let bytes = loop {
        let range = Stored(part.start)..Stored(part.end);
        match blob.repository.read(&blob.digest, blob.size, range, &|_| {}).await {
            Ok(bytes) => break bytes,
            Err(error) if error.is_transient() && begun.elapsed() < limit => {
                tracing::debug!(%error, "a part is asked for again");
                sleep(error.retry_after().unwrap_or(pause).min(longest)).await;
                pause = longest.min(pause * 2);
            }
            Err(error) => return Err(error),
        }
    };
    Ok(Bytes::from_owner(BytesWithPermit { bytes, _memory: held }))
}

/// Streams the blob from a server without range support.
async fn in_one(blob: &Blob, range: Range<u64>, memory: &Memory) -> Result<Parts, RegistryError> {
    let held = memory.take(2 * CHUNK).await;
    let reader = blob.repository.blob(&blob.digest, blob.size).await?;
    let chunks = ReaderStream::with_capacity(reader, CHUNK as usize);
    let (place, object) = (blob.repository.describe(), format!("blob {}", blob.digest));
    let mut at = 0;
    let chunks = chunks.filter_map(move |chunk| {
        let _ = &held;
        let wanted = chunk.map(|chunk| {
            let (start, end) = (at, at + chunk.len() as u64);
            at = end;
            let within = |edge: u64| (edge.clamp(start, end) - start) as usize;
            chunk.slice(within(range.start)..within(range.end))
        });
        let wanted = match wanted {
            Ok(chunk) if chunk.is_empty() => None,
            Ok(chunk) => Some(Ok(chunk)),
            Err(error) => Some(Err(broken(&place, &object, error))),
        };
        std::future::ready(wanted)
    });
    Ok(chunks.boxed())
}

fn broken(place: &str, object: &str, error: io::Error) -> RegistryError {
    error.downcast::<RegistryError>().unwrap_or_else(|error| RegistryError::Interrupted {
        place: place.to_owned(),
        object: object.to_owned(),
        cause: error.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_follow_each_other_after_a_small_first_one() {
        let parts: Vec<_> = cut(5..5 + FIRST + PART + 1).collect();
        let second = 5 + FIRST;
        assert_eq!(parts, [5..second, second..second + PART, second + PART..second + PART + 1]);
        assert!(cut(0..1).eq(std::iter::once(0..1)));
        assert_eq!(cut(7..7).count(), 0);
        assert_eq!(cut(u64::MAX - 1..u64::MAX).count(), 1);
    }

    #[tokio::test]
    async fn memory_is_released_with_the_last_byte() {
        let memory = Memory::default();
        let before = memory.0.available_permits();
        let held = memory.take(PART).await;
        let bytes =
            Bytes::from_owner(BytesWithPermit { bytes: Bytes::from_static(b"abc"), _memory: held });
        let part = bytes.slice(1..2);
        drop(bytes);
        assert_eq!(memory.0.available_permits(), before - 2048);
        drop(part);
        assert_eq!(memory.0.available_permits(), before);
    }
}
