//! Files of an image as the guess reads them: through the cache, checked as for any reader, but not
//! as one.

use std::{os::unix::fs::FileExt as _, sync::Arc};

use async_trait::async_trait;
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use lazuli_image::{Decoded, erofs::Nid, rafs::Bootstrap};
use lazuli_sys::mmap::Map;
use tokio::sync::{Mutex, mpsc};

use super::{
    Image, Prefetcher,
    escalate::MissListener,
    fetch_in_order::{self, Blobs, ChunkAt, Gaps, Purpose},
    guess::{self, Content, Piece, extents},
    lessons,
};

/// Fetches what a start most likely reads, guessed from the image alone, and from the files in
/// which it has `missed` something. Tells the listener for misses which chunks to expect.
pub(super) async fn fetch_guessed(
    prefetcher: &Prefetcher,
    image: &Image,
    listener: &MissListener,
    missed: mpsc::UnboundedReceiver<Vec<u8>>,
) {
    let (pace, cache) = (&prefetcher.pace, &prefetcher.cache);
    let (found_by_guess, mut found) = mpsc::unbounded_channel();
    let (bootstrap, blobs) = (image.bootstrap.clone(), image.blobs.clone());
    let missed = Mutex::new(missed);
    let content = Files { bootstrap, blobs, prefetcher, found: found_by_guess, listener, missed };
    let guess = async move {
        let wanted = |pieces: Vec<Piece>| {
            content.send(pieces.iter().flat_map(|piece| content.places(piece)).collect());
        };
        guess::guess(&image.config, &image.bootstrap, &content, wanted).await;
    };
    let fetch = async {
        let mut fetching = FuturesUnordered::new();
        loop {
            tokio::select! {
                places = found.recv() => match places {
                    Some(places) => fetching.push(fetch_in_order::fetch(
                        &image.blobs,
                        places,
                        None,
                        pace,
                        Purpose::Guess(cache, Gaps::OF_REQUESTS),
                    )),
                    None => break,
                },
                // Readers of chunks that cannot be fetched get the error.
                Some(_) = fetching.next() => {}
            }
        }
        while fetching.next().await.is_some() {}
    };
    tokio::join!(guess, fetch);
}

struct Files<'a> {
    bootstrap: Arc<Bootstrap<Map>>,
    blobs: Blobs,
    prefetcher: &'a Prefetcher,
    found: mpsc::UnboundedSender<Vec<ChunkAt>>,
    listener: &'a MissListener,
    missed: Mutex<mpsc::UnboundedReceiver<Vec<u8>>>,
}

impl Files<'_> {
    /// Has these fetched. The fetching task outlives the finding one.
    fn send(&self, places: Vec<ChunkAt>) {
        self.listener.foresee(&places);
        let _ = self.found.send(places);
    }

    /// Returns what starts of other images read after this program.
    fn of_program(&self, program: Nid) -> Option<Vec<ChunkAt>> {
        let settings = &self.prefetcher.settings;
        let blobs = self.blobs.upgrade().filter(|_| settings.learns_from_others())?;
        let (first, _) = self.bootstrap.chunks(program).ok()?.next()?.ok()?;
        let blob = blobs.get(usize::from(first.blob.0))?;
        let digest = blob.chunk(blob.position(first.number)?).digest;
        let lesson = self.prefetcher.lessons.of_program(&digest)?;
        Some(lessons::places(&lesson, &self.bootstrap, &blobs, settings.escalate_bytes))
    }

    fn places(&self, piece: &Piece) -> Vec<ChunkAt> {
        let Some(blobs) = self.blobs.upgrade() else { return Vec::new() };
        let chunks = |(blob, range): (usize, std::ops::Range<Decoded>)| {
            blobs[blob].positions(&range).map(move |chunk| (blob, chunk))
        };
        extents(&self.bootstrap, piece).into_iter().flat_map(chunks).collect()
    }
}

#[async_trait]
impl Content for Files<'_> {
    async fn read(&self, piece: &Piece) -> Option<Vec<u8>> {
        let blobs = self.blobs.upgrade()?;
        let mut bytes = Vec::new();
        for (blob, range) in extents(&self.bootstrap, piece) {
            let blob = blobs[blob].clone();
            blob.prefetch_range(&range).await.ok()?;
            let start = bytes.len();
            bytes.resize(start + (range.end.0 - range.start.0) as usize, 0);
            blob.file().read_exact_at(&mut bytes[start..], range.start.0).ok()?;
        }
        Some(bytes)
    }

    async fn missed(&self) -> Option<Vec<u8>> {
        self.missed.lock().await.recv().await
    }

    fn note_program(&self, program: Nid) {
        if let Some(places) = self.of_program(program) {
            self.send(places);
        }
    }
}
