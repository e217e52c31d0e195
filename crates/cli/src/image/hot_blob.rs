//! Fetching the hot chunks of an image into a blob of their own.

use std::{collections::HashSet, path::PathBuf};

use anyhow::Result;
use lazuli_builder::{
    BuiltBlob,
    bake::{Hot, HotBlob},
};
use lazuli_image::{Blob, Chunk, ChunkRef, Codec};
use lazuli_registry::Pull;

use crate::{
    image::read_chunks::{self, REQUESTS, WINDOW},
    progress,
};

/// Fetches and checks the chunks, and writes them one behind the other into a blob in `scratch`.
pub(crate) async fn fetch(
    repository: &dyn Pull,
    blobs: &[Blob],
    hot: &Hot,
    scratch: PathBuf,
) -> Result<BuiltBlob> {
    let place = |place: &ChunkRef| {
        let blob = &blobs[usize::from(place.blob.0)];
        Some((blob, blob.chunk(place.number)?))
    };
    let found: Vec<(&Blob, &Chunk)> = hot.chunks.iter().filter_map(place).collect();
    let total = found.iter().map(|(_, chunk)| chunk.stored_share()).sum();
    let bar = progress::bytes(Some(total), "fetching");
    let codec = found.first().map_or(Codec::None, |(blob, _)| blob.codec);
    let mut writer = HotBlob::create(&scratch, codec)?;
    let mut rest = &found[..];
    while !rest.is_empty() {
        let (mut bytes, mut units) = (0, HashSet::new());
        let end = rest.iter().position(|(blob, chunk)| {
            // Chunks that are stored together are fetched once.
            bytes +=
                if units.insert((blob.id, chunk.stored)) { chunk.stored_size.into() } else { 0 };
            bytes > WINDOW
        });
        let (window, later) = rest.split_at(end.unwrap_or(rest.len()).max(1));
        let stored = read_chunks::read(repository, window, REQUESTS).await?;
        for ((blob, chunk), stored) in window.iter().zip(&stored) {
            writer.add(blob, chunk, stored)?;
            bar.inc(chunk.stored_share());
        }
        rest = later;
    }
    bar.finish_and_clear();
    Ok(writer.finish()?)
}
