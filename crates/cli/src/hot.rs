//! Fetching the hot chunks of an image into a blob of their own.

use std::{ops::Range, path::PathBuf};

use anyhow::Result;
use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt, stream};
use lazuli_build::{
    BuiltBlob,
    bake::{Hot, HotBlob},
};
use lazuli_image::{Blob, Chunk, ChunkRef, Codec, Stored};
use lazuli_registry::Repository;

use crate::progress;

/// Stored bytes of the chunks that are fetched together, and most of one request unless a chunk has more.
const WINDOW: u64 = 8 << 20;

/// Stored bytes between two chunks that are rather fetched than asked about twice.
const GAP: u64 = 64 << 10;

/// Requests at the same time: enough to hide round trips, few enough for any registry.
const REQUESTS: usize = 8;

/// Fetches and checks the chunks, and writes them one behind the other into a blob in `scratch`.
pub(crate) async fn fetch(
    repository: &dyn Repository,
    blobs: &[Blob],
    hot: &Hot,
    scratch: PathBuf,
) -> Result<BuiltBlob> {
    let place = |place: &ChunkRef| {
        let blob = &blobs[usize::from(place.blob.0)];
        Some((blob, blob.chunk(place.number)?))
    };
    let chunks: Vec<(&Blob, &Chunk)> = hot.chunks.iter().filter_map(place).collect();
    let total = chunks.iter().map(|(_, chunk)| u64::from(chunk.stored_size)).sum();
    let bar = progress::bytes(Some(total), "fetching");
    let codec = chunks.first().map_or(Codec::None, |(blob, _)| blob.codec);
    let mut writer = HotBlob::create(&scratch, codec)?;
    let mut rest = &chunks[..];
    while !rest.is_empty() {
        let mut bytes = 0;
        let end = rest.iter().position(|(_, chunk)| {
            bytes += u64::from(chunk.stored_size);
            bytes > WINDOW
        });
        let (window, later) = rest.split_at(end.unwrap_or(rest.len()).max(1));
        let stored = read(repository, window).await?;
        for ((blob, chunk), stored) in window.iter().zip(&stored) {
            writer.add(blob, chunk, stored)?;
            bar.inc(stored.len() as u64);
        }
        rest = later;
    }
    bar.finish_and_clear();
    Ok(writer.finish()?)
}

/// The stored bytes of these chunks, in a few requests.
async fn read(repository: &dyn Repository, chunks: &[(&Blob, &Chunk)]) -> Result<Vec<Bytes>> {
    let mut order: Vec<usize> = (0..chunks.len()).collect();
    order.sort_unstable_by_key(|at| (chunks[*at].0.id, chunks[*at].1.stored));
    let near = |a: &usize, b: &usize| {
        let ((a_blob, a), (b_blob, b)) = (chunks[*a], chunks[*b]);
        a_blob.id == b_blob.id && b.stored.0 <= a.stored_end().0 + GAP
    };
    let mut requests: Vec<(&Blob, Range<Stored>, &[usize])> = Vec::new();
    for run in order.chunk_by(near) {
        let mut run = run;
        while let Some(first) = run.first() {
            let (blob, start) = (chunks[*first].0, chunks[*first].1.stored);
            let fits = |at: &usize| chunks[*at].1.stored_end().0 <= start.0 + WINDOW;
            let (here, later) = run.split_at(run.partition_point(fits).max(1));
            let end = here.last().map_or(start, |last| chunks[*last].1.stored_end());
            requests.push((blob, start..end, here));
            run = later;
        }
    }
    let answers = requests.iter().map(|(blob, range, members)| async move {
        let bytes = repository.read(&blob.id, range.clone(), &|_| {}).await?;
        Ok::<_, anyhow::Error>((range.start, bytes, *members))
    });
    let answers: Vec<_> = stream::iter(answers).buffered(REQUESTS).try_collect().await?;
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
