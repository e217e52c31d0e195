//! Fetching the chunks of an image, many in one request.
//!
//! The daemon's cache decodes for readers, chunk by chunk as answers arrive, and keeps the result.
//! Commands read an image once, in a known order, and keep nothing: they decode whole windows. Both
//! plan requests with [`Planner`], decode with [`Decoder`] and check with [`Chunk::verified`].

use std::{
    collections::{HashMap, hash_map::Entry},
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, Error, Result};
use bytes::Bytes;
use futures_util::{FutureExt, StreamExt, TryStreamExt, stream};
use lazuli_builder::unpack::ChunkSource;
use lazuli_image::{
    Blob, Chunk, ChunkRef, Digest, Stored,
    codec::Decoder,
    plan::{Planner, stored_range},
    units::units,
};
use lazuli_registry::Pull;
use lazuli_runtime::image::StoredImage;
use tokio::{runtime::Runtime, sync::mpsc, task::spawn_blocking, time::sleep};

/// Stored bytes of the chunks that are fetched together, and most of one request unless a chunk has
/// more.
pub(crate) const WINDOW: u64 = Planner::COMMAND.max_request;

/// Concurrent requests: enough to hide round trips, few enough for any registry.
pub(crate) const REQUESTS: usize = 8;

/// Number of retries after a transient failure. The waits between them add up to 6 s, as for
/// pushes.
const RETRIES: u32 = 5;
const FIRST_WAIT: Duration = Duration::from_millis(200);

/// Reads the stored bytes of these chunks, in a few concurrent requests.
pub(crate) async fn read(
    repository: &dyn Pull,
    chunks: &[(&Blob, &Chunk)],
    at_once: usize,
) -> Result<Vec<Bytes>> {
    let mut order: Vec<usize> = (0..chunks.len()).collect();
    order.sort_unstable_by_key(|at| place(chunks[*at]));
    let mut requests: Vec<(&Blob, Range<Stored>, &[usize])> = Vec::new();
    for of_blob in order.chunk_by(|a, b| chunks[*a].0.id == chunks[*b].0.id) {
        let chunk = |at: &usize| chunks[*at].1;
        for request in Planner::COMMAND.requests(of_blob.iter().map(chunk)) {
            let members = &of_blob[request];
            let range = stored_range(members.iter().map(chunk));
            requests.push((chunks[members[0]].0, range, members));
        }
    }
    let answer = |(blob, range, members): (_, Range<Stored>, _)| {
        async move {
            let Range { start, .. } = range;
            Ok::<_, Error>((start, range_of(repository, blob, range).await?, members))
        }
        .boxed()
    };
    let answers: Vec<_> = requests.into_iter().map(answer).collect();
    let answers: Vec<_> = stream::iter(answers).buffered(at_once).try_collect().await?;
    let mut stored = vec![Bytes::new(); chunks.len()];
    for (start, bytes, members) in answers {
        for at in members {
            let chunk = chunks[*at].1;
            let from = (chunk.stored.0 - start.0) as usize;
            stored[*at] = bytes.slice(from..from + chunk.stored_size as usize);
        }
    }
    Ok(stored)
}

/// In this order no chunk's stored bytes end before those of an earlier one, and of a unit none
/// ends before an earlier one.
fn place((blob, chunk): (&Blob, &Chunk)) -> (Digest, Stored, u32, u32) {
    (blob.id, chunk.stored, chunk.stored_size, chunk.unit_size())
}

async fn range_of(repository: &dyn Pull, blob: &Blob, range: Range<Stored>) -> Result<Bytes> {
    let mut failures = 0;
    loop {
        match repository.read(&blob.id, blob.stored_size, range.clone(), &|_| {}).await {
            Err(error) if error.is_transient() && failures < RETRIES => {
                tracing::debug!(%error, failures, "asking again");
                sleep(error.retry_after().unwrap_or(FIRST_WAIT * 2u32.pow(failures))).await;
                failures += 1;
            }
            read => return Ok(read?),
        }
    }
}

/// Extracts a chunk from its [decoded](Decoder::unit) unit, and compares it with its digest.
pub(crate) fn verify<'a>(chunk: &Chunk, unit: &'a [u8]) -> Result<&'a [u8]> {
    chunk.verified(unit).with_context(|| format!("chunk {} at {}", chunk.number, chunk.stored))
}

/// Decodes and verifies chunks that have these stored bytes.
pub(crate) fn decode(found: &[(&Blob, &Chunk)], stored: &[Bytes]) -> Result<Vec<Vec<u8>>> {
    let (mut decoder, mut buffer) = (Decoder::new(), Vec::new());
    let mut decoded = vec![Vec::new(); found.len()];
    let mut order: Vec<usize> = (0..found.len()).collect();
    order.sort_unstable_by_key(|at| place(found[*at]));
    let blobs = order.chunk_by(|a, b| found[*a].0.id == found[*b].0.id);
    for unit in blobs.flat_map(|of_blob| units(of_blob, |at| found[**at].1)) {
        let furthest = *unit.furthest();
        let (blob, chunk) = found[*furthest];
        let context = || format!("blob {}: chunk {} at {}", blob.id, chunk.number, chunk.stored);
        let bytes = decoder.unit(&blob.unit(chunk), &stored[*furthest], &mut buffer);
        let bytes = bytes.with_context(context)?;
        for at in unit.into_chunks() {
            let bytes = verify(found[*at].1, bytes).with_context(|| format!("blob {}", blob.id))?;
            decoded[*at] = bytes.to_vec();
        }
    }
    Ok(decoded)
}

/// Decoded bytes of the chunks that are fetched together; with [`WINDOW`] and [`AHEAD`] this bounds
/// memory.
const DECODED: u64 = 16 << 20;

/// Places for chunks in a window, which may repeat.
const PLACES: usize = 1 << 16;

/// Windows that are in flight or not used yet.
const AHEAD: usize = 2;

/// The chunks of an image in order, fetched ahead of their use, decoded and checked.
pub(crate) struct FetchedChunks<'a> {
    windows: mpsc::Receiver<Result<Window>>,
    window: Window,
    next: usize,
    fetched: Arc<AtomicU64>,
    used: &'a dyn Fn(u64),
}

/// Chunks that are fetched together.
#[derive(Default)]
struct Window {
    /// Each once.
    chunks: Vec<ChunkRef>,
    /// The same, decoded.
    decoded: Vec<Vec<u8>>,
    /// In which order they are wanted.
    order: Vec<usize>,
}

impl<'a> FetchedChunks<'a> {
    /// Begins to fetch `wanted`. `used` is called with decoded bytes as they are used.
    pub(crate) fn fetch(
        repository: Arc<dyn Pull>,
        image: &StoredImage,
        wanted: &[ChunkRef],
        used: &'a dyn Fn(u64),
        runtime: &Runtime,
    ) -> Self {
        let planned = plan(image.bootstrap.blobs(), wanted);
        let fetched = Arc::new(AtomicU64::new(0));
        let bootstrap = image.bootstrap.clone();
        let count = fetched.clone();
        let fill = move |mut window: Window| {
            let (repository, bootstrap) = (repository.clone(), bootstrap.clone());
            let count = count.clone();
            // As a task of its own, which continues while earlier windows wait to be used.
            let filled = tokio::spawn(async move {
                let found = places(bootstrap.blobs(), &window.chunks);
                let stored = read(&*repository, &found, REQUESTS / AHEAD).await?;
                let bytes = found.iter().map(|(_, chunk)| chunk.stored_share()).sum();
                count.fetch_add(bytes, Ordering::Relaxed);
                let bootstrap = bootstrap.clone();
                spawn_blocking(move || {
                    let found = places(bootstrap.blobs(), &window.chunks);
                    let from = || format!("from {}", repository.describe());
                    window.decoded = decode(&found, &stored).with_context(from)?;
                    Ok(window)
                })
                .await?
            });
            async move { filled.await? }
        };
        let (sender, windows) = mpsc::channel(1);
        runtime.spawn(async move {
            let mut filled = stream::iter(planned).map(fill).buffered(AHEAD);
            while let Some(window) = filled.next().await {
                if sender.send(window).await.is_err() {
                    break;
                }
            }
        });
        FetchedChunks { windows, window: Window::default(), next: 0, fetched, used }
    }

    /// Stored bytes of all chunks fetched so far.
    pub(crate) fn fetched(&self) -> u64 {
        self.fetched.load(Ordering::Relaxed)
    }
}

impl ChunkSource for FetchedChunks<'_> {
    type Error = Error;

    fn next(&mut self) -> Result<&[u8]> {
        if self.next == self.window.order.len() {
            let window = self.windows.blocking_recv();
            self.window = window.context("more chunks were used than were asked for")??;
            self.next = 0;
        }
        let chunk = &self.window.decoded[self.window.order[self.next]];
        self.next += 1;
        (self.used)(chunk.len() as u64);
        Ok(chunk)
    }
}

/// Returns the places of the chunks of a checked image.
fn places<'a>(blobs: &'a [Blob], chunks: &[ChunkRef]) -> Vec<(&'a Blob, &'a Chunk)> {
    let place = |chunk: &ChunkRef| {
        let blob = &blobs[usize::from(chunk.blob.0)];
        Some((blob, blob.chunk(chunk.number)?))
    };
    chunks.iter().filter_map(place).collect()
}

/// Splits the wanted chunks into windows.
fn plan(blobs: &[Blob], wanted: &[ChunkRef]) -> Vec<Window> {
    let mut windows = Vec::new();
    let mut window = Window::default();
    let mut known = HashMap::new();
    // A unit is fetched and decoded once per window, up to its last wanted chunk.
    let mut units: HashMap<_, (u64, u64)> = HashMap::new();
    let (mut stored, mut decoded) = (0, 0);
    for chunk in wanted {
        let size = |(_, it): (_, &Chunk)| {
            let unit = (chunk.blob, it.stored);
            (unit, u64::from(it.stored_size), u64::from(it.unit_size()))
        };
        let place = places(blobs, &[*chunk]).pop().map(size);
        let beyond = |units: &HashMap<_, (u64, u64)>| {
            place.map_or((0, 0), |(unit, stored, decoded)| {
                let (known, known_decoded) = units.get(&unit).copied().unwrap_or_default();
                (stored.saturating_sub(known), decoded.saturating_sub(known_decoded))
            })
        };
        let (more, larger) = beyond(&units);
        let fits = stored + more <= WINDOW && decoded + larger <= DECODED;
        let fits = (fits || known.contains_key(chunk)) && window.order.len() < PLACES;
        if !fits && !window.order.is_empty() {
            windows.push(std::mem::take(&mut window));
            known.clear();
            units.clear();
            (stored, decoded) = (0, 0);
        }
        if let Entry::Vacant(new) = known.entry(*chunk) {
            new.insert(window.chunks.len());
            window.chunks.push(*chunk);
            let (more, larger) = beyond(&units);
            stored += more;
            decoded += larger;
            if let Some((unit, reach, decoded)) = place {
                let known = units.entry(unit).or_default();
                *known = (known.0.max(reach), known.1.max(decoded));
            }
        }
        window.order.push(known[chunk]);
    }
    windows.extend((!window.order.is_empty()).then_some(window));
    windows
}

#[cfg(test)]
mod tests {
    use lazuli_image::{Algorithm, BlobIndex, Codec, Decoded, chunk::Part};

    use super::*;

    fn blob(chunks: u32, stored_size: u32, decoded_size: u32) -> Blob {
        let chunk = |number| Chunk {
            number,
            digest: Algorithm::Blake3.digest(&[]),
            stored: Stored(u64::from(number) * u64::from(stored_size)),
            stored_size,
            decoded: Decoded(u64::from(number) * u64::from(decoded_size)),
            decoded_size,
            part: None,
        };
        Blob {
            id: Algorithm::Sha256.digest(&[]),
            codec: Codec::Zstd,
            points: lazuli_image::Points::default(),
            stored_size: 0,
            decoded_size: 0,
            chunks: (0..chunks).map(chunk).collect(),
        }
    }

    fn windows(blob: Blob, numbers: impl IntoIterator<Item = u32>) -> Vec<(usize, usize)> {
        let chunk = |number| ChunkRef { blob: BlobIndex(0), number };
        let wanted: Vec<_> = numbers.into_iter().map(chunk).collect();
        let planned = plan(&[blob], &wanted);
        let order = planned.iter().flat_map(|it| it.order.iter().map(|at| it.chunks[*at]));
        assert!(order.eq(wanted.iter().copied()));
        planned.iter().map(|window| (window.chunks.len(), window.order.len())).collect()
    }

    #[test]
    fn windows_are_bounded() {
        assert_eq!(windows(blob(9, 1 << 20, 1 << 20), []), []);
        assert_eq!(windows(blob(9, 1 << 20, 1 << 20), 0..9), [(8, 8), (1, 1)]);
        assert_eq!(windows(blob(20, 10, 1 << 20), 0..20), [(16, 16), (4, 4)]);
        // A chunk bigger than a window has a window of its own.
        assert_eq!(windows(blob(2, 16 << 20, 16 << 20), [0, 1, 1, 0]), [(1, 1), (1, 2), (1, 1)]);
        // Zeros without end are one chunk.
        assert_eq!(
            windows(blob(1, 50, 1 << 20), std::iter::repeat_n(0, PLACES + 1)),
            [(1, PLACES), (1, 1)]
        );
    }

    /// Chunks of one byte, `together` of which are compressed as one MiB.
    fn batched(chunks: u32, together: u32) -> Blob {
        let mut blob = blob(chunks, 1 << 20, 1);
        for chunk in blob.chunks.iter_mut() {
            chunk.stored = Stored(u64::from(chunk.number / together) << 20);
            chunk.part = Some(Part { offset: chunk.number % together, size: 1 << 20 });
        }
        blob
    }

    #[test]
    fn batches_count_once_and_in_full() {
        assert_eq!(windows(batched(9, 1), 0..9), [(8, 8), (1, 1)]);
        assert_eq!(windows(batched(24, 3), 0..24), [(24, 24)]);
        assert_eq!(windows(batched(27, 3), 0..27), [(24, 24), (3, 3)]);
    }
}
