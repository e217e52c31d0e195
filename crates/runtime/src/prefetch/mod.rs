//! Fetching what readers are going to ask for.
//!
//! ```text
//! image is mounted ──▶ order: trace of this node │ trace of the registry │ hot part of the blobs │ guess
//!                               └──▶ ahead: windows in that order, several under way ──▶ cache
//! readers ──▶ recorder ── quiet for 5 s ──▶ traces ──▶ registry, if wished
//!                                             └──▶ whole: the rest, politely
//! ```
//!
//! An order is a hint: every byte is checked as always, what the image does not have is ignored, and readers who
//! wait go first.

pub(crate) mod ahead;
mod content;
mod guess;
mod recorder;
mod traces;
mod whole;

use std::{sync::Arc, time::Duration};

use lazuli_image::{Digest, Trace, oci::Descriptor, rafs::Bootstrap};
use lazuli_registry::Repository;
use lazuli_sys::mmap::Map;
use serde::Deserialize;
use tokio::{sync::Semaphore, task::JoinHandle, time::timeout};

pub use self::traces::{ANNOTATION, ARTIFACT_TYPE, Traces, find, publish};
pub(crate) use self::whole::fast;
use self::{
    ahead::{Blobs, Manner, Pace},
    recorder::{Recorded, Recorder},
};
use crate::cache::{Cache, CachedBlob};

/// What is fetched when an image is mounted, before anybody asks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Ahead {
    /// Nothing, and nothing is recorded.
    Nothing,
    /// Nothing, but what is touched is recorded: for trials, which are to see all that a start reads.
    Record,
    /// What a start most likely reads, from the image alone; nothing is recorded.
    Guess,
    /// What earlier starts read; without a trace of one, as [`Ahead::Guess`].
    #[default]
    Learn,
}

/// What the operator may set.
#[derive(Clone, Debug)]
pub struct Settings {
    /// What is fetched for a start.
    pub ahead: Ahead,
    /// Whether traces are put beside their images for other nodes.
    pub publish: bool,
    /// Stored bytes per second at which the rest of an image arrives after its start; 0 for never.
    pub rest_bytes_per_second: u64,
}

impl Default for Settings {
    fn default() -> Self {
        // An eighth of 1 Gbit/s.
        Settings { ahead: Ahead::default(), publish: false, rest_bytes_per_second: 16 << 20 }
    }
}

/// How long a registry may take to answer whether it has a trace, from when the image's metadata is here. A guess is better than
/// one that comes late.
const ANSWER: Duration = Duration::from_secs(1);

/// The node's.
#[derive(Debug)]
pub(crate) struct Prefetcher {
    settings: Settings,
    traces: Traces,
    cache: Arc<Cache>,
    pace: Pace,
    /// One image at a time gets its rest.
    turn: Semaphore,
}

/// An image to prefetch.
#[derive(Debug)]
pub(crate) struct Image {
    pub(crate) manifest: Descriptor,
    pub(crate) config: serde_json::Value,
    pub(crate) bootstrap: Arc<Bootstrap<Map>>,
    /// Stored bytes at the beginning of each blob that a start most likely reads, as its maker says.
    pub(crate) hot: Vec<u64>,
    pub(crate) blobs: Blobs,
    pub(crate) repository: Arc<dyn Repository>,
}

/// What is known of the starts of an image.
#[derive(Debug)]
pub(crate) enum Known {
    /// This node has seen some.
    Here(Trace),
    /// The registry is asked.
    Asked(JoinHandle<Option<Trace>>),
    /// Nobody is asked.
    Nothing,
}

impl Prefetcher {
    pub(crate) fn new(settings: Settings, traces: Traces, cache: Arc<Cache>) -> Arc<Self> {
        let turn = Semaphore::new(1);
        Arc::new(Prefetcher { settings, traces, cache, pace: Pace::default(), turn })
    }

    /// Looks for a trace. To be called as soon as it is known which image it is, so that the answer of the registry comes with
    /// the image's metadata.
    pub(crate) fn look_up(&self, repository: &Arc<dyn Repository>, manifest: Digest) -> Known {
        if self.settings.ahead != Ahead::Learn {
            return Known::Nothing;
        }
        if let Some(trace) = self.traces.get(&manifest) {
            return Known::Here(trace);
        }
        let repository = repository.clone();
        Known::Asked(tokio::spawn(async move {
            let found = traces::find(&*repository, &manifest).await;
            let image = repository.describe();
            found.inspect_err(|error| tracing::info!(image, %error, "no trace")).unwrap_or_default()
        }))
    }

    /// Begins a start: fetches ahead, records what is touched, and brings the rest when it is over.
    pub(crate) fn start(self: &Arc<Self>, image: Image, known: Known) {
        let recorder = image.blobs.upgrade().map(|blobs| Recorder::start(&blobs));
        let records = matches!(self.settings.ahead, Ahead::Learn | Ahead::Record);
        let Some(recorder) = recorder.filter(|_| records) else {
            let prefetcher = self.clone();
            tokio::spawn(async move {
                prefetcher.fetch_ahead(&image, known).await;
                prefetcher.bring_the_rest(&image).await;
            });
            return;
        };
        let prefetcher = self.clone();
        tokio::spawn(async move {
            let gone = || image.blobs.strong_count() == 0;
            let record = recorder.record(gone, || prefetcher.cache.is_awaited());
            let (is_news, start) = tokio::join!(prefetcher.fetch_ahead(&image, known), record);
            if let Some(start) = start {
                prefetcher.keep(&image, start, is_news).await;
            }
            prefetcher.bring_the_rest(&image).await;
        });
    }

    /// The same for an image that an earlier worker has started.
    pub(crate) fn resume(self: &Arc<Self>, image: Image) {
        let prefetcher = self.clone();
        tokio::spawn(async move { prefetcher.bring_the_rest(&image).await });
    }

    /// Fetches what the start will most likely read. Returns whether a trace of it would be news for the registry.
    async fn fetch_ahead(&self, image: &Image, known: Known) -> bool {
        let (trace, is_news) = match known {
            Known::Here(trace) => (Some(trace), false),
            Known::Asked(answer) => {
                let abort = answer.abort_handle();
                let found = timeout(ANSWER, answer).await.ok().and_then(Result::ok).flatten();
                abort.abort();
                if let Some(trace) = &found
                    && let Err(error) = self.traces.put(&image.manifest.digest, trace)
                {
                    tracing::warn!(%error, "cannot keep a trace");
                }
                let is_news = found.is_none();
                (found, is_news)
            }
            Known::Nothing => (None, false),
        };
        if matches!(self.settings.ahead, Ahead::Nothing | Ahead::Record) {
            return false;
        }
        let order = image.blobs.upgrade().map(|blobs| match trace {
            Some(trace) => of_trace(&trace, &blobs),
            None => of_maker(&image.hot, &blobs),
        });
        let hint = Manner::Hint(&self.cache);
        match order {
            Some(order) if order.is_empty() => {
                content::fetch_guessed(image, &self.pace, &self.cache).await
            }
            // Readers who need what cannot be had will be told why.
            Some(order) => drop(ahead::fetch(&image.blobs, order, &self.pace, hint).await),
            None => {}
        }
        is_news
    }

    /// Keeps what was recorded.
    async fn keep(&self, image: &Image, start: Recorded, is_news: bool) {
        let manifest = &image.manifest;
        let kept = self.traces.add(&manifest.digest, &start.trace, |blob| start.saw(blob));
        let trace = match kept {
            Ok(trace) => trace,
            Err(error) => {
                tracing::warn!(image = %manifest.digest, %error, "cannot keep a trace");
                return;
            }
        };
        // A trace without what was here before would mislead others.
        if self.settings.publish && is_news && start.saw_everything() {
            let name = image.repository.describe();
            match traces::publish(&image.repository, manifest, &trace).await {
                Ok(artifact) => tracing::info!(image = name, %artifact, "published its trace"),
                Err(error) => tracing::warn!(image = name, %error, "cannot publish its trace"),
            }
        }
    }

    async fn bring_the_rest(&self, image: &Image) {
        if self.settings.rest_bytes_per_second > 0 {
            whole::polite(self, &image.blobs, self.settings.rest_bytes_per_second).await;
        }
    }
}

/// The chunks that a trace calls hot, as far as the image has them.
fn of_trace(trace: &Trace, blobs: &[Arc<CachedBlob>]) -> Vec<ahead::Place> {
    let place = |(id, number): (Digest, u32)| {
        let blob = blobs.iter().position(|blob| blob.id() == id)?;
        Some((blob, blobs[blob].position(number)?))
    };
    trace.hot().filter_map(place).collect()
}

/// The chunks that the image's maker calls hot.
fn of_maker(hot: &[u64], blobs: &[Arc<CachedBlob>]) -> Vec<ahead::Place> {
    let of_blob = |(position, (hot, blob)): (usize, (&u64, &Arc<CachedBlob>))| {
        blob.stored_within(*hot).map(move |chunk| (position, chunk))
    };
    hot.iter().zip(blobs).enumerate().flat_map(of_blob).collect()
}
