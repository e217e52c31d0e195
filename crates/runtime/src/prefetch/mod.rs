//! Prefetching: fetches what readers are going to ask for.
//!
//! ```text
//! image is mounted ──▶ order: trace of this node │ trace of the registry │ hot part of the blobs │ lessons and guess
//!                               └──▶ ahead: windows in that order, several in flight ──▶ cache
//! readers ──▶ escalate: what most likely follows, in a start that nothing foresaw ──▶ ahead
//!    └──────▶ recorder ── quiet for 5 s ──▶ traces, lessons ──▶ registry, if wished
//!                                             └──▶ whole: the rest, politely
//! ```
//!
//! An order is a hint: every byte is checked as always, what the image does not have is ignored,
//! and waiting readers go first.

pub(crate) mod ahead;
mod content;
mod courtesy;
mod escalate;
mod guess;
#[cfg(fuzzing)]
pub(crate) use guess::fuzz;
mod lessons;
mod recorder;
mod small_files;
mod traces;
mod turn;
mod whole;

use std::{ops::Range, path::Path, sync::Arc, time::Duration};

use lazuli_image::{Digest, Lesson, Stored, Trace, oci::Descriptor, rafs::Bootstrap};
use lazuli_registry::{Manifest, Pull, Repository};
use lazuli_sys::mmap::Map;
use serde::Deserialize;
use tokio::{sync::oneshot, task::JoinHandle, time::timeout};

pub use self::traces::{ANNOTATION, ARTIFACT_TYPE, Traces, find, publish};
pub(crate) use self::whole::fast;
use self::{
    ahead::{Blobs, Pace, Purpose},
    escalate::{Escalation, Heard},
    lessons::Lessons,
    recorder::{Recorded, Recorder},
    turn::Turn,
};
use crate::{
    cache::{Cache, CachedBlob},
    source::early::{self, Early},
};

/// What is fetched when an image is mounted, ahead of its readers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Ahead {
    /// Nothing, and nothing is recorded.
    Nothing,
    /// Nothing, but what is touched is recorded: for trials, which are to see all that a start
    /// reads.
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
    /// Stored bytes that the misses of one start without a trace may bring beside what they ask
    /// for.
    pub escalate_bytes: u64,
}

impl Settings {
    /// Whether starts of other images say what to fetch for this one.
    fn learns_from_others(&self) -> bool {
        self.ahead == Ahead::Learn && self.escalate_bytes > 0
    }

    /// Stored bytes that a trace may bring that came from the registry: a client that may push
    /// there has written it.
    fn foreign_bytes(&self) -> u64 {
        match self.escalate_bytes {
            0 => Settings::default().escalate_bytes,
            bytes => bytes,
        }
    }
}

impl Default for Settings {
    fn default() -> Self {
        // An eighth of 1 Gbit/s.
        Settings {
            ahead: Ahead::default(),
            publish: false,
            rest_bytes_per_second: 16 << 20,
            escalate_bytes: 256 << 20,
        }
    }
}

/// How long a registry may take to answer whether it has a trace, from when the image's metadata is
/// here. A guess is better than one that comes late.
const ANSWER: Duration = Duration::from_secs(1);

/// The node's.
#[derive(Debug)]
pub(crate) struct Prefetcher {
    settings: Settings,
    traces: Traces,
    lessons: Lessons,
    cache: Arc<Cache>,
    pace: Pace,
    escalation: Escalation,
    early: early::Room,
    /// Images get their rests piece by piece, one piece at a time.
    turn: Turn,
}

/// An image to prefetch.
#[derive(Debug)]
pub(crate) struct Image {
    pub(crate) manifest: Descriptor,
    pub(crate) config: serde_json::Value,
    pub(crate) bootstrap: Arc<Bootstrap<Map>>,
    /// Stored bytes at the beginning of each blob that a start most likely reads, as its maker
    /// says.
    pub(crate) hot: Vec<u64>,
    pub(crate) blobs: Blobs,
    pub(crate) repository: Arc<dyn Repository>,
}

/// What is known of the starts of an image. Nothing by default.
#[derive(Debug, Default)]
pub(crate) struct Known {
    /// What this node has seen.
    trace: Option<Trace>,
    /// The registry is asked.
    asked: Option<JoinHandle<Option<Trace>>>,
    /// What this node has seen of other versions of the image, or else what the registry is asked
    /// for.
    lesson: Option<Lesson>,
    asked_lesson: Option<JoinHandle<Option<Lesson>>>,
    /// What is under way already.
    early: Early,
}

impl Prefetcher {
    /// With what is kept in the state directory `root`.
    pub(crate) fn new(settings: Settings, root: &Path, cache: Arc<Cache>) -> Arc<Self> {
        let (traces, lessons) = (Traces::of(root), Lessons::of(root));
        let (pace, escalation, early, turn) = Default::default();
        Arc::new(Prefetcher { settings, traces, lessons, cache, pace, escalation, early, turn })
    }

    /// Looks for a trace, and asks for what is hot while the image's metadata is fetched, if it is.
    /// To be called as soon as it is known which image it is.
    pub(crate) fn look_up(
        self: &Arc<Self>,
        repository: &Arc<dyn Repository>,
        manifest: &Manifest,
        has_metadata: bool,
    ) -> Known {
        let learns = self.settings.ahead == Ahead::Learn;
        let mut known = Known::default();
        if learns {
            known.trace = self.traces.get(&manifest.digest);
        } else if self.settings.ahead != Ahead::Guess {
            return known;
        }
        if !has_metadata {
            match &known.trace {
                Some(trace) => self.ask_early(&known.early, repository, manifest, trace.spans()),
                None => self.ask_early(&known.early, repository, manifest, baked(manifest)),
            }
        }
        if self.settings.learns_from_others() && known.trace.is_none() {
            known.lesson =
                repository.repository_name().and_then(|name| self.lessons.of_repository(&name));
            known.asked_lesson = known.lesson.is_none().then(|| ask_for_lesson(repository));
        }
        if learns && known.trace.is_none() {
            let (prefetcher, early) = (self.clone(), known.early.clone());
            let (repository, manifest) = (repository.clone(), manifest.clone());
            known.asked = Some(tokio::spawn(async move {
                let found = traces::find(&*repository, &manifest.digest).await;
                let image = repository.describe();
                let found = found.inspect_err(|error| tracing::info!(image, %error, "no trace"));
                let trace = found.unwrap_or_default()?;
                if !has_metadata && !early.is_any() {
                    prefetcher.ask_early(&early, &repository, &manifest, trace.spans());
                }
                Some(trace)
            }));
        }
        known
    }

    /// Asks for stored bytes of blobs that this node has nothing of, if that saves waiting.
    fn ask_early(
        &self,
        early: &Early,
        repository: &Arc<dyn Repository>,
        manifest: &Manifest,
        spans: impl Iterator<Item = (Digest, Range<Stored>)>,
    ) {
        // From a near server they come as soon when the metadata are here, which would share the
        // link with them. A peer is near, but what it fetches is not.
        let is_near = |place: &Arc<dyn Pull>| {
            let policy = place.request_policy();
            !policy.is_peer() && policy.health().is_some_and(|server| server.is_near())
        };
        if repository.clone().places().first().is_some_and(is_near) {
            return;
        }
        if self.cache.has_room_for_hints(early::MOST) {
            let new = spans.filter(|(blob, _)| !self.cache.has_files_of(blob));
            early.ask(repository, &manifest.parsed, new, &self.early);
        }
    }

    /// Begins a start: fetches ahead, records what is touched, and brings the rest when it is over.
    pub(crate) fn start(self: &Arc<Self>, image: Image, known: Known) {
        let prefetcher = self.clone();
        let listen = |blobs: Arc<[_]>| (Recorder::start(&blobs), Heard::of(&blobs));
        let wanted = image.blobs.upgrade().filter(|_| self.settings.ahead != Ahead::Nothing);
        let image = Arc::new(image);
        let Some((recorder, heard)) = wanted.map(listen) else {
            tokio::spawn(async move { prefetcher.bring_the_rest(&image).await });
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
            let ahead = prefetcher.fetch_ahead(&image, known, &heard, is_over);
            let (is_news, start) = tokio::join!(ahead, record);
            let (touched, missed) = heard.counts();
            let name = image.repository.describe();
            tracing::info!(
                image = name,
                touched,
                missed,
                "a start is over: chunks read, and not foreseen"
            );
            let keeps = matches!(prefetcher.settings.ahead, Ahead::Learn | Ahead::Record);
            if let Some(start) = start.filter(|_| keeps) {
                prefetcher.keep(&image, &start, is_news).await;
                prefetcher.teach(&image, &start, is_news).await;
            }
            prefetcher.bring_the_rest(&image).await;
        });
    }

    /// The same for an image that an earlier worker has started.
    pub(crate) fn resume(self: &Arc<Self>, image: Image) {
        let prefetcher = self.clone();
        tokio::spawn(async move { prefetcher.bring_the_rest(&image).await });
    }

    /// Fetches what the start will most likely read; without a trace also what follows from what is
    /// `heard` of its misses, until it `is_over`. Returns whether a trace of it would be news for
    /// the registry.
    async fn fetch_ahead(
        &self,
        image: &Image,
        known: Known,
        heard: &Heard,
        is_over: oneshot::Receiver<()>,
    ) -> bool {
        if self.settings.ahead == Ahead::Record {
            return false;
        }
        let Known { trace, asked, lesson, asked_lesson, early } = known;
        let (is_asked, is_ours) = (asked.is_some(), trace.is_some());
        let hint = Purpose::Hint(&self.cache);
        let bring = async |order| {
            // Readers that need what cannot be had get the reason.
            drop(ahead::fetch(&image.blobs, order, Some(&early), &self.pace, hint).await);
        };
        let hot = |trace: Option<&Trace>| {
            let blobs = image.blobs.upgrade()?;
            Some(
                trace.map_or_else(|| of_maker(&image.hot, &blobs), |trace| of_trace(trace, &blobs)),
            )
        };
        // What the image's maker calls hot is on its way already: readers find it there before the
        // registry has answered.
        let baked = if trace.is_none() { hot(None) } else { None }.unwrap_or_default();
        let mut is_foreseen = !baked.is_empty();
        let ((), answer) = tokio::join!(bring(baked), self.answer(image, asked));
        let trace = trace.or(answer);
        if let Some(order) = trace.as_ref().and_then(|trace| hot(Some(trace))) {
            is_foreseen |= !order.is_empty();
            let most = if is_ours { u64::MAX } else { self.settings.foreign_bytes() };
            bring(self.first_of(image, order, most)).await;
        }
        early.forget();
        if !is_foreseen {
            let escalate = async {
                tokio::select! {
                    () = escalate::escalate(heard, self, image) => {}
                    _ = is_over => {}
                }
            };
            let lesson = async {
                let lesson = match (lesson, asked_lesson) {
                    (None, Some(asked)) => self.lesson_of_registry(image, asked).await,
                    (lesson, _) => lesson,
                };
                let places = lesson.and_then(|lesson| self.places(image, &lesson));
                heard.foresee(places.as_deref().unwrap_or_default());
                bring(places.unwrap_or_default()).await;
            };
            let guess = content::fetch_guessed(self, image, heard);
            tokio::join!(lesson, guess, escalate);
        }
        is_asked && trace.is_none()
    }

    /// The trace that the registry has, if it says so in time. It is kept.
    async fn answer(
        &self,
        image: &Image,
        asked: Option<JoinHandle<Option<Trace>>>,
    ) -> Option<Trace> {
        let answer = asked?;
        let abort = answer.abort_handle();
        let trace = timeout(ANSWER, answer).await.ok().and_then(Result::ok).flatten();
        abort.abort();
        if let Err(error) = self.traces.put(&image.manifest.digest, trace.as_ref()?) {
            tracing::warn!(%error, "cannot keep a trace");
        }
        trace
    }

    /// The lesson that the registry has, if it says so in time. It is kept.
    async fn lesson_of_registry(
        &self,
        image: &Image,
        answer: JoinHandle<Option<Lesson>>,
    ) -> Option<Lesson> {
        let abort = answer.abort_handle();
        let lesson = timeout(ANSWER, answer).await.ok().and_then(Result::ok).flatten();
        abort.abort();
        let kept = self.lessons.put(&image.repository.repository_name()?, lesson.as_ref()?);
        if let Err(error) = kept {
            tracing::warn!(%error, "cannot keep a lesson");
        }
        lesson
    }

    /// Where the image has what is hot in a lesson.
    fn places(&self, image: &Image, lesson: &Lesson) -> Option<Vec<ahead::ChunkAt>> {
        let blobs = image.blobs.upgrade()?;
        Some(lessons::places(lesson, &image.bootstrap, &blobs, self.settings.escalate_bytes))
    }

    /// As many of the first chunks of `order` as have `most` stored bytes.
    fn first_of(
        &self,
        image: &Image,
        order: Vec<ahead::ChunkAt>,
        most: u64,
    ) -> Vec<ahead::ChunkAt> {
        let Some(blobs) = image.blobs.upgrade() else { return Vec::new() };
        let mut left = most;
        let mut fits = |(blob, chunk): &ahead::ChunkAt| {
            let rest = left.checked_sub(blobs[*blob].chunk(*chunk).stored_share());
            left = rest.unwrap_or(0);
            rest.is_some()
        };
        order.into_iter().take_while(|place| fits(place)).collect()
    }

    /// Keeps what a start teaches about other images, and tells other nodes if it `is_news`.
    async fn teach(&self, image: &Arc<Image>, start: &Recorded, is_news: bool) {
        let Some(repository) = image.repository.repository_name() else { return };
        let is_known = self.lessons.of_repository(&repository).is_some();
        // What was here before was read, too, and was not seen.
        if !self.settings.learns_from_others() || is_known && !start.saw_everything() {
            return;
        }
        let (read, trace) = (image.clone(), start.trace.clone());
        let walk = move || lessons::of_start(&read, &trace);
        let Ok((lesson, programs)) = tokio::task::spawn_blocking(walk).await else { return };
        let is_open = image.repository.serves_anonymously();
        if let Err(error) = self.lessons.add(&repository, &lesson, &programs, is_open) {
            tracing::warn!(repository, %error, "cannot keep a lesson");
        }
        if self.settings.publish && is_news && start.saw_everything() {
            match lessons::publish(&image.repository, &lesson).await {
                Ok(artifact) => tracing::info!(repository, %artifact, "published a lesson"),
                Err(error) => tracing::warn!(repository, %error, "cannot publish a lesson"),
            }
        }
    }

    /// Keeps what was recorded.
    async fn keep(&self, image: &Image, start: &Recorded, is_news: bool) {
        let manifest = &image.manifest;
        let stored = |blob: &Digest, number: u32| {
            let blob = image.bootstrap.blobs().iter().find(|known| known.id == *blob)?;
            let chunk = blob.chunk(number)?;
            Some(chunk.stored..chunk.stored_end())
        };
        let saw = |blob: &Digest| start.saw(blob);
        let kept = self.traces.add(&manifest.digest, &start.trace, saw, stored);
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

/// Asks a registry what other nodes have learnt of a repository.
fn ask_for_lesson(repository: &Arc<dyn Repository>) -> JoinHandle<Option<Lesson>> {
    let repository = repository.clone();
    tokio::spawn(async move {
        let found = lessons::find(&*repository).await;
        let name = repository.describe();
        found.inspect_err(|error| tracing::info!(repository = name, %error, "no lesson")).ok()?
    })
}

/// The chunks that a trace calls hot, as far as the image has them.
fn of_trace(trace: &Trace, blobs: &[Arc<CachedBlob>]) -> Vec<ahead::ChunkAt> {
    let place = |(id, number): (Digest, u32)| {
        let blob = blobs.iter().position(|blob| blob.id() == id)?;
        Some((blob, blobs[blob].position(number)?))
    };
    trace.hot().filter_map(place).collect()
}

/// The chunks that the image's maker calls hot.
fn of_maker(hot: &[u64], blobs: &[Arc<CachedBlob>]) -> Vec<ahead::ChunkAt> {
    let of_blob = |(position, (hot, blob)): (usize, (&u64, &Arc<CachedBlob>))| {
        blob.stored_within(*hot).map(move |chunk| (position, chunk))
    };
    hot.iter().zip(blobs).enumerate().flat_map(of_blob).collect()
}

/// What the image's maker calls hot.
fn baked(manifest: &Manifest) -> impl Iterator<Item = (Digest, Range<Stored>)> {
    let hot = |layer: &Descriptor| Some((layer.digest, Stored(0)..Stored(layer.hot_bytes()?)));
    manifest.parsed.layers.iter().filter_map(hot)
}
