//! Prefetching: fetches data ahead of its readers.
//!
//! ```text
//! image is mounted ──▶ order: trace of this node │ trace of the registry │ hot part of the blobs
//!                               │ maker's guess, lessons and guess
//!                               └──▶ fetch_in_order: several requests in flight ──▶ cache
//! readers ──▶ escalate: chunks that most likely follow a miss ──▶ fetch_in_order
//!    └──────▶ recorder ── quiet for 5 s ──▶ traces, lessons ──▶ registry, if wished
//!                                             └──▶ whole: the rest, with low priority
//! ```
//!
//! An order is a hint: every byte is checked as always, what the image does not have is ignored,
//! and waiting readers go first.

mod content;
mod escalate;
pub(crate) mod fetch_in_order;
mod guess;
mod yield_to_readers;
#[cfg(fuzzing)]
pub(crate) use guess::fuzz;
mod learn;
mod lessons;
mod looked_up;
mod makers_guess;
mod orders;
mod recorder;
mod rest;
mod settings;
mod small_files;
mod spare_slots;
mod timed_slot;
mod traces;
mod whole;

use std::{ops::Range, path::Path, sync::Arc, time::Duration};

use futures_util::FutureExt as _;
use lazuli_image::{
    Digest, Lesson, Stored, Trace,
    oci::{Descriptor, NotedGuess},
    rafs::Bootstrap,
};
use lazuli_registry::{Pull, Repository};
use lazuli_sys::mmap::Map;
use tokio::{
    sync::{mpsc, oneshot},
    task::JoinHandle,
};

pub use self::makers_guess::{DecodedBlobs, makers_guess};
pub use self::settings::{Mode, Settings};
pub use self::traces::{ANNOTATION, ARTIFACT_TYPE, Traces, find, publish};
pub(crate) use self::whole::fast;
use self::{
    escalate::{Escalation, MissListener},
    fetch_in_order::{Blobs, Gaps, Pace, Purpose},
    learn::{RegistryTrace, ask_for_lesson},
    lessons::Lessons,
    looked_up::LookedUp,
    orders::{baked, decoded, first_of, of_guess, of_maker, of_trace},
    recorder::Recorder,
    rest::Rest,
};
use crate::{
    cache::Cache,
    source::early::{self, Early},
};

/// Prefetching for all images of the node.
#[derive(Debug)]
pub(crate) struct Prefetcher {
    settings: Settings,
    traces: Traces,
    lessons: Lessons,
    cache: Arc<Cache>,
    pace: Pace,
    escalation: Escalation,
    early: early::UncheckedMemory,
    ahead: LookedUp,
    rest: Rest,
}

/// An image to prefetch.
#[derive(Debug)]
pub(crate) struct Image {
    pub(crate) manifest: Descriptor,
    pub(crate) config: serde_json::Value,
    pub(crate) bootstrap: Arc<Bootstrap<Map>>,
    /// Stored bytes at the beginning of each blob that its maker marks as hot.
    pub(crate) hot: Vec<u64>,
    /// What its maker guesses to be read.
    pub(crate) guess: Option<NotedGuess>,
    pub(crate) blobs: Blobs,
    pub(crate) repository: Arc<dyn Repository>,
}

impl Image {
    /// Returns whether nothing has to be fetched.
    fn is_here(&self) -> bool {
        self.blobs.upgrade().is_some_and(|blobs| blobs.iter().all(|blob| blob.has_all_chunks()))
    }
}

/// Whether the node has the metadata of an image that is about to be mounted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Metadata {
    /// It has them.
    Here,
    /// They have to be fetched.
    Missing,
}

/// The knowledge of an image's starts. Empty by default.
#[derive(Debug, Default)]
pub(crate) struct Known {
    /// The trace of this node.
    trace: Option<Trace>,
    /// A request to the registry for a trace.
    asked: Option<JoinHandle<Option<Trace>>>,
    /// The lesson of this node about other versions of the image; without one, the registry is
    /// asked.
    lesson: Option<Lesson>,
    asked_lesson: Option<JoinHandle<Option<Lesson>>>,
    /// Hot bytes in flight already.
    early: Early,
}

impl Prefetcher {
    /// Opens the traces and lessons in the state directory `root`.
    pub(crate) fn new(settings: Settings, root: &Path, cache: Arc<Cache>) -> Arc<Self> {
        let (traces, lessons) = (Traces::of(root), Lessons::of(root));
        let (pace, escalation, early, ahead, rest) = Default::default();
        Arc::new(Prefetcher {
            settings,
            traces,
            lessons,
            cache,
            pace,
            escalation,
            early,
            ahead,
            rest,
        })
    }

    /// Does what [`Prefetcher::look_up`] does for an image that is about to be mounted. What it
    /// finds waits for the mount, for [`looked_up::STAY`].
    pub(crate) fn look_up_ahead(
        self: &Arc<Self>,
        repository: &Arc<dyn Repository>,
        manifest: &Digest,
        layers: &[Descriptor],
        guess: Option<NotedGuess>,
    ) {
        let Some(key) = looked_up::key(repository, manifest) else { return };
        let look = || self.find(repository, manifest, layers, guess, Metadata::Missing);
        if !self.ahead.insert(&key, look) {
            return;
        }
        let prefetcher = self.clone();
        tokio::spawn(async move {
            tokio::time::sleep(looked_up::STAY).await;
            prefetcher.ahead.take(&key);
        });
    }

    /// Looks up a trace, and requests hot bytes of `layers` while the image's metadata is fetched,
    /// if it is missing: those of the trace, or what the image's maker calls hot or guesses. Call
    /// it as soon as the image is known.
    pub(crate) fn look_up(
        self: &Arc<Self>,
        repository: &Arc<dyn Repository>,
        manifest: &Digest,
        layers: &[Descriptor],
        guess: Option<NotedGuess>,
        metadata: Metadata,
    ) -> Known {
        let ahead = looked_up::key(repository, manifest).and_then(|key| self.ahead.take(&key));
        ahead.unwrap_or_else(|| self.find(repository, manifest, layers, guess, metadata))
    }

    fn find(
        self: &Arc<Self>,
        repository: &Arc<dyn Repository>,
        manifest: &Digest,
        layers: &[Descriptor],
        guess: Option<NotedGuess>,
        metadata: Metadata,
    ) -> Known {
        let learns = self.settings.mode == Mode::Learn;
        let mut known = Known::default();
        if learns {
            known.trace = self.traces.get(manifest);
        } else if self.settings.mode != Mode::Guess {
            return known;
        }
        let place: Arc<dyn Pull> = repository.clone();
        if metadata == Metadata::Missing {
            match &known.trace {
                Some(trace) => self.ask_early(&known.early, &place, layers, trace.spans()),
                None => {
                    let spans = baked(layers, guess.as_ref());
                    self.ask_early(&known.early, &place, layers, spans.into_iter());
                }
            }
        }
        if self.settings.learns_from_others() && known.trace.is_none() {
            known.lesson =
                repository.repository_name().and_then(|name| self.lessons.of_repository(&name));
            known.asked_lesson = known.lesson.is_none().then(|| ask_for_lesson(repository));
        }
        if learns && known.trace.is_none() {
            let (prefetcher, early) = (self.clone(), known.early.clone());
            let (repository, manifest) = (repository.clone(), *manifest);
            let layers = layers.to_vec();
            known.asked = Some(tokio::spawn(async move {
                let found = traces::find(&*repository, &manifest).await;
                let image = repository.describe();
                let found = found.inspect_err(|error| tracing::info!(image, %error, "no trace"));
                let trace = found.unwrap_or_default()?;
                if metadata == Metadata::Missing && !early.is_any() {
                    prefetcher.ask_early(&early, &place, &layers, trace.spans());
                }
                Some(trace)
            }));
        }
        known
    }

    /// Requests stored bytes of blobs that are not on this node at all, if that saves waiting.
    fn ask_early(
        &self,
        early: &Early,
        repository: &Arc<dyn Pull>,
        layers: &[Descriptor],
        spans: impl Iterator<Item = (Digest, Range<Stored>)>,
    ) {
        // A near server delivers as soon after the metadata, which would have to share the link. A
        // peer is near, but the source of its data is not.
        let is_near = |place: &Arc<dyn Pull>| {
            let policy = place.request_policy();
            !policy.is_peer() && policy.health().is_some_and(|server| server.is_near())
        };
        if repository.clone().places().first().is_some_and(is_near) {
            return;
        }
        if self.cache.has_room_for_hints(early::MOST) {
            let new = spans.filter(|(blob, _)| !self.cache.has_files_of(blob));
            let cache = self.cache.clone();
            let arrived = move |bytes| cache.link_speed().arrived(bytes);
            early.ask(repository, layers, new, &self.early, arrived);
        }
    }

    /// Follows a start: fetches ahead, records the reads, and fetches the rest when it is over.
    pub(crate) fn start(self: &Arc<Self>, image: Image, known: Known) {
        let prefetcher = self.clone();
        let listen = |blobs: Arc<[_]>| (Recorder::start(&blobs), MissListener::of(&blobs));
        let wanted = image.blobs.upgrade().filter(|_| self.settings.mode != Mode::Nothing);
        let image = Arc::new(image);
        let Some((recorder, listener)) = wanted.map(listen) else {
            tokio::spawn(async move { prefetcher.bring_the_rest(&image.blobs).await });
            return;
        };
        tokio::spawn(async move {
            let gone = || image.blobs.strong_count() == 0;
            let (over, is_over) = oneshot::channel::<()>();
            let waits = || {
                let own =
                    || image.blobs.upgrade().is_some_and(|all| all.iter().any(|b| b.has_readers()));
                prefetcher.cache.is_awaited() || own()
            };
            let record = async {
                let start = recorder.record(gone, waits).await;
                drop(over);
                start
            };
            let ahead = prefetcher.fetch_ahead(&image, known, &listener, is_over);
            let (registry, start) = tokio::join!(ahead, record);
            let (touched, missed) = listener.counts();
            let name = image.repository.describe();
            tracing::info!(
                image = name,
                touched,
                missed,
                "a start is over: chunks read, and not foreseen"
            );
            let keeps = matches!(prefetcher.settings.mode, Mode::Learn | Mode::Record);
            if let Some(start) = start.filter(|_| keeps) {
                prefetcher.keep(&image, &start, registry).await;
                prefetcher.teach(&image, &start, registry).await;
            }
            prefetcher.bring_the_rest(&image.blobs).await;
        });
    }

    /// Brings the rest of an image that an earlier worker has started.
    pub(crate) fn resume(self: &Arc<Self>, blobs: Blobs) {
        let prefetcher = self.clone();
        tokio::spawn(async move { prefetcher.bring_the_rest(&blobs).await });
    }

    /// Fetches the chunks that the start most likely reads; without a trace also those that follow
    /// from its misses, which the `listener` reports, until it `is_over`. Returns what the
    /// registry said of a trace.
    async fn fetch_ahead(
        &self,
        image: &Image,
        known: Known,
        listener: &MissListener,
        is_over: oneshot::Receiver<()>,
    ) -> RegistryTrace {
        if self.settings.mode == Mode::Record {
            return RegistryTrace::Present;
        }
        let Known { trace, asked, lesson, asked_lesson, early } = known;
        let (is_asked, is_ours) = (asked.is_some(), trace.is_some());
        let bring_for = async |order, purpose| {
            let (blobs, pace) = (&image.blobs, &self.pace);
            // Readers of chunks that cannot be fetched get the error.
            drop(fetch_in_order::fetch(blobs, order, Some(&early), pace, purpose).await);
        };
        let bring = |order| bring_for(order, Purpose::Hint(&self.cache));
        let hot = |trace: Option<&Trace>| {
            let blobs = image.blobs.upgrade()?;
            Some(
                trace.map_or_else(|| of_maker(&image.hot, &blobs), |trace| of_trace(trace, &blobs)),
            )
        };
        // The hot part of the blobs is in flight already: readers find it before the registry has
        // answered.
        let baked = if trace.is_none() { hot(None) } else { None }.unwrap_or_default();
        let mut is_foreseen = !baked.is_empty();
        let guessed = match trace.is_none() && !is_foreseen {
            true => {
                image.blobs.upgrade().zip(decoded(image.guess.as_ref())).map(|(blobs, guess)| {
                    // Whatever the manifest claims.
                    first_of(&blobs, of_guess(&guess, &blobs), self.settings.foreign_bytes())
                })
            }
            false => None,
        };
        let guessed = guessed.unwrap_or_default();
        listener.foresee(&guessed);
        let guessed = bring_for(guessed, Purpose::Guess(&self.cache, Gaps::OF_REQUESTS)).shared();
        let follow = async {
            let ((), answer) = tokio::join!(bring(baked), self.answer(image, asked));
            let trace = trace.or(answer);
            if let Some(order) = trace.as_ref().and_then(|trace| hot(Some(trace))) {
                is_foreseen |= !order.is_empty();
                let most = if is_ours { u64::MAX } else { self.settings.foreign_bytes() };
                let blobs = image.blobs.upgrade();
                let first = blobs.map(|blobs| first_of(&blobs, order, most));
                bring(first.unwrap_or_default()).await;
            }
            if !is_foreseen && !image.is_here() {
                let (missed, files) = mpsc::unbounded_channel();
                let escalate = async {
                    tokio::select! {
                        () = escalate::escalate(listener, self, image, missed) => {}
                        _ = is_over => {}
                    }
                };
                let lesson = async {
                    let lesson = match (lesson, asked_lesson) {
                        (None, Some(asked)) => self.lesson_of_registry(image, asked).await,
                        (lesson, _) => lesson,
                    };
                    let places = lesson.and_then(|lesson| self.places(image, &lesson));
                    listener.foresee(places.as_deref().unwrap_or_default());
                    bring(places.unwrap_or_default()).await;
                };
                let guess = async {
                    // The node's own guess reads what the maker's brings.
                    guessed.clone().await;
                    early.forget();
                    content::fetch_guessed(self, image, listener, files).await;
                };
                tokio::join!(lesson, guess, escalate);
            }
            match is_asked && trace.is_none() {
                true => RegistryTrace::Missing,
                false => RegistryTrace::Present,
            }
        };
        let (answer, ()) = tokio::join!(follow, guessed.clone());
        early.forget();
        answer
    }

    /// The places of a lesson's hot parts in the image.
    fn places(&self, image: &Image, lesson: &Lesson) -> Option<Vec<fetch_in_order::ChunkAt>> {
        let blobs = image.blobs.upgrade()?;
        Some(lessons::places(lesson, &image.bootstrap, &blobs, self.settings.escalate_bytes))
    }

    /// The time in which so many missing bytes of an image arrive if nothing changes; `None` while
    /// no image's rest is fetched, or before that can be said.
    pub(crate) fn time_for_the_rest(&self, bytes: u64) -> Option<Duration> {
        self.rest.time_for(bytes)
    }

    async fn bring_the_rest(&self, blobs: &Blobs) {
        if self.settings.rest_bytes_per_second > 0 {
            rest::bring(self, blobs, self.settings.rest_bytes_per_second).await;
        }
    }
}
