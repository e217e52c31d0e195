//! Hot bytes that are fetched together with the image's metadata.
//!
//! Their chunks are known once the bootstrap is present. Until then, they are unchecked bytes in
//! memory; then they take the place of an answer, and are checked like one.

use std::{
    fmt,
    ops::Range,
    sync::{Arc, Mutex},
};

use bytes::{Bytes, BytesMut};
use futures_util::future::{BoxFuture, FutureExt as _, Shared, join_all};
use lazuli_image::{Digest, Stored, oci::Descriptor};
use lazuli_registry::{CONNECTIONS, Pull, range};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::task::AbortOnDropHandle;

use crate::{request_sizes::LEAST_PART, sync::lock};

/// Maximum bytes of one image: what 1 Gbit/s delivers in 130 ms, longer than the metadata takes.
pub(crate) const MOST: u64 = 16 << 20;

/// Maximum bytes of all images, in units of [`STEP`].
const MEMORY: usize = 64;

/// See [`MEMORY`].
const STEP: u64 = 1 << 20;

/// A part of a blob, in flight or complete; `None` if it could not be fetched.
type Part = Shared<BoxFuture<'static, Option<Bytes>>>;

/// Memory for bytes that were not checked yet.
#[derive(Debug)]
pub(crate) struct UncheckedMemory(Arc<Semaphore>);

impl Default for UncheckedMemory {
    fn default() -> Self {
        UncheckedMemory(Arc::new(Semaphore::new(MEMORY)))
    }
}

/// Parts of an image's blobs that were asked for early. Clones are the same.
#[derive(Clone, Default)]
pub(crate) struct Early(Arc<Mutex<Parts>>);

#[derive(Default)]
struct Parts {
    parts: Vec<(Digest, Range<Stored>, Part)>,
    memory: Vec<OwnedSemaphorePermit>,
}

impl fmt::Debug for Early {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Early").finish_non_exhaustive()
    }
}

impl Early {
    /// Asks for `spans` of `layers`, as far as they are such and there is memory. `arrived` learns
    /// of bytes as they come.
    pub(crate) fn ask(
        &self,
        repository: &Arc<dyn Pull>,
        layers: &[Descriptor],
        spans: impl Iterator<Item = (Digest, Range<Stored>)>,
        memory: &UncheckedMemory,
        arrived: impl Fn(u64) + Clone + Send + Sync + 'static,
    ) {
        let mut left = MOST;
        let of_layer = |(blob, range): (Digest, Range<Stored>)| {
            let layer = layers.iter().find(|layer| layer.digest == blob)?;
            (range.end.0 <= layer.size).then_some((layer, range))
        };
        let fits = |(_, range): &(_, Range<Stored>)| {
            let rest = left.checked_sub(range.end.0.saturating_sub(range.start.0));
            left = rest.unwrap_or(left);
            rest.is_some()
        };
        let spans: Vec<_> = spans.filter_map(of_layer).filter(fits).collect();
        let bytes = MOST - left;
        let steps = u32::try_from(bytes.div_ceil(STEP)).unwrap_or(u32::MAX);
        let Ok(permit) = memory.0.clone().try_acquire_many_owned(steps) else { return };
        let part = (bytes / CONNECTIONS).max(LEAST_PART);
        let mut all = lock(&self.0);
        all.memory.push(permit);
        for (layer, span) in spans {
            let (blob, size) = (layer.digest, layer.size);
            let count = (span.end.0 - span.start.0).div_ceil(part);
            let policy = repository.request_policy();
            for range in range::parts(&span, count, policy.health().map(Arc::as_ref)) {
                let (repository, wanted) = (repository.clone(), range.clone());
                let arrived = arrived.clone();
                let read = async move { repository.read(&blob, size, wanted, &arrived).await.ok() };
                // Runs even if no task awaits it, and is aborted with the last handle.
                let read = AbortOnDropHandle::new(tokio::spawn(read));
                let read = read.map(|read| read.ok().flatten());
                all.parts.push((blob, range, read.boxed().shared()));
            }
        }
    }

    /// Those parts that together have all of `range`, if there are such.
    pub(crate) fn parts(&self, blob: &Digest, range: &Range<Stored>) -> Option<EarlyBytes> {
        let all = lock(&self.0);
        let overlaps = |part: &Range<Stored>| part.start < range.end && range.start < part.end;
        let parts = all.parts.iter().filter(|(of, part, _)| of == blob && overlaps(part));
        let mut parts: Vec<_> =
            parts.map(|(_, part, bytes)| (part.clone(), bytes.clone())).collect();
        parts.sort_by_key(|(part, _)| part.start);
        let follow = parts.windows(2).all(|pair| pair[0].0.end == pair[1].0.start);
        let whole = parts.first()?.0.start <= range.start && range.end <= parts.last()?.0.end;
        (follow && whole).then(|| EarlyBytes {
            parts,
            range: range.clone(),
            is_needed_first: false,
        })
    }

    /// Returns whether anything was requested.
    pub(crate) fn is_any(&self) -> bool {
        !lock(&self.0).parts.is_empty()
    }

    /// Gives everything back that is not in use.
    pub(crate) fn forget(&self) {
        *lock(&self.0) = Parts::default();
    }
}

/// Bytes that were requested early, in place of an answer.
pub(crate) struct EarlyBytes {
    parts: Vec<(Range<Stored>, Part)>,
    range: Range<Stored>,
    /// Whether to request the bytes once more meanwhile.
    pub(crate) is_needed_first: bool,
}

impl fmt::Debug for EarlyBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EarlyBytes({:?})", self.range)
    }
}

impl EarlyBytes {
    /// The number of its parts that begin in the range: no part counts for two ranges.
    pub(crate) fn requests(&self) -> usize {
        self.parts.iter().filter(|(part, _)| self.range.contains(&part.start)).count()
    }

    /// Waits for the bytes of the range; `None` if any could not be fetched.
    pub(crate) async fn bytes(self) -> Option<Bytes> {
        let Range { start, end } = self.range;
        let mut whole = BytesMut::with_capacity((end.0 - start.0) as usize);
        let arrived = join_all(self.parts.iter().map(|(_, bytes)| bytes.clone())).await;
        for ((part, _), bytes) in self.parts.iter().zip(arrived) {
            let bytes = bytes?;
            let from = start.0.saturating_sub(part.start.0) as usize;
            let to = (end.0.min(part.end.0) - part.start.0) as usize;
            whole.extend_from_slice(bytes.get(from..to)?);
        }
        Some(whole.freeze())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use lazuli_image::Algorithm;
    use lazuli_registry::Options;
    use lazuli_testkit::registry::FakeRegistry;

    use super::*;

    /// The speed of the link is measured by them: they are most of what a start fetches.
    #[tokio::test]
    async fn early_bytes_are_counted_as_they_arrive() {
        let registry = FakeRegistry::start().unwrap();
        let content = lazuli_testkit::odd::random(1, 300_000);
        let digest = registry.put_blob("app", &content);
        assert_eq!(digest, Algorithm::Sha256.digest(&content));
        let name = format!("{}/app:1", registry.host()).parse().unwrap();
        let repository: Arc<dyn Pull> = lazuli_registry::open(&name, &Options::default()).unwrap();
        let layer = Descriptor::plain("application/octet-stream", digest, 300_000);
        let counted = Arc::new(AtomicU64::new(0));
        let count = counted.clone();
        let early = Early::default();
        let range = Stored(1000)..Stored(201_000);
        early.ask(
            &repository,
            &[layer],
            [(digest, range.clone())].into_iter(),
            &UncheckedMemory::default(),
            move |bytes| {
                count.fetch_add(bytes, Ordering::Relaxed);
            },
        );
        let parts = early.parts(&digest, &range).unwrap().parts;
        for (_, part) in parts {
            assert!(part.await.is_some());
        }
        assert_eq!(counted.load(Ordering::Relaxed), 200_000);
    }
}
