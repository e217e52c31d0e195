//! Files of an image as the guess reads them: through the cache, checked as for any reader, but not as one.

use std::{os::unix::fs::FileExt as _, sync::Arc};

use async_trait::async_trait;
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use lazuli_image::{Decoded, rafs::Bootstrap};
use lazuli_sys::mmap::Map;
use tokio::sync::mpsc;

use super::{
    Image,
    ahead::{self, Blobs, ChunkAt, Pace, Purpose},
    escalate::Heard,
    guess::{self, Content, Piece},
};
use crate::cache::Cache;

/// Fetches what a start most likely reads, from the image alone. Whoever hears of misses is told what is going to be asked for.
pub(super) async fn fetch_guessed(image: &Image, pace: &Pace, cache: &Cache, heard: &Heard) {
    let content = Files { bootstrap: image.bootstrap.clone(), blobs: image.blobs.clone() };
    let (sender, mut found) = mpsc::unbounded_channel();
    let guess = async {
        let wanted = |pieces: Vec<Piece>| {
            let places = pieces.iter().flat_map(|piece| content.places(piece)).collect::<Vec<_>>();
            heard.foresee(&places);
            // Whoever fetches outlives whoever finds.
            let _ = sender.send(places);
        };
        guess::guess(&image.config, &image.bootstrap, &content, wanted).await;
        drop(sender);
    };
    let fetch = async {
        let mut fetching = FuturesUnordered::new();
        loop {
            tokio::select! {
                places = found.recv() => match places {
                    Some(places) => fetching.push(ahead::fetch(&image.blobs, places, None, pace, Purpose::Hint(cache))),
                    None => break,
                },
                // Readers who need what cannot be had will be told why.
                Some(_) = fetching.next() => {}
            }
        }
        while fetching.next().await.is_some() {}
    };
    tokio::join!(guess, fetch);
}

struct Files {
    bootstrap: Arc<Bootstrap<Map>>,
    blobs: Blobs,
}

impl Files {
    /// Where the bytes of a piece are: position of the blob, place in it.
    fn extents(&self, piece: &Piece) -> Vec<(usize, std::ops::Range<Decoded>)> {
        let mut extents = Vec::new();
        let mut at = piece.range.start;
        while at < piece.range.end {
            // A damaged image is found out elsewhere.
            let Ok(Some(extent)) = self.bootstrap.extent(piece.file, at) else { break };
            let len = extent.len.min(piece.range.end - at);
            let end = Decoded(extent.start.0 + len);
            extents.push((usize::from(extent.blob.0), extent.start..end));
            at += len;
        }
        extents
    }

    fn places(&self, piece: &Piece) -> Vec<ChunkAt> {
        let Some(blobs) = self.blobs.upgrade() else { return Vec::new() };
        let chunks = |(blob, range): (usize, std::ops::Range<Decoded>)| {
            blobs[blob].positions(&range).map(move |chunk| (blob, chunk))
        };
        self.extents(piece).into_iter().flat_map(chunks).collect()
    }
}

#[async_trait]
impl Content for Files {
    async fn read(&self, piece: &Piece) -> Option<Vec<u8>> {
        let blobs = self.blobs.upgrade()?;
        let mut bytes = Vec::new();
        for (blob, range) in self.extents(piece) {
            let blob = blobs[blob].clone();
            blob.bring_range(&range).await.ok()?;
            let start = bytes.len();
            bytes.resize(start + (range.end.0 - range.start.0) as usize, 0);
            blob.file().read_exact_at(&mut bytes[start..], range.start.0).ok()?;
        }
        Some(bytes)
    }
}
