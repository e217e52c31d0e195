//! Gets traces and lessons from registries, keeps them on this node, and publishes them.

use std::{sync::Arc, time::Duration};

use lazuli_image::{Digest, Lesson, Trace};
use lazuli_registry::Repository;
use tokio::{task::JoinHandle, time::timeout};

use super::{
    Image, Prefetcher,
    lessons::{self, Visibility},
    recorder::Recorded,
    traces,
};

/// Time limit for the registry to answer whether it has a trace, from when the image's metadata is
/// present. A guess is better than a late trace.
const ANSWER: Duration = Duration::from_secs(1);

/// Whether a registry has a trace of an image, as far as it was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RegistryTrace {
    Missing,
    /// It has one, or was not asked.
    Present,
}

impl Prefetcher {
    /// Returns the registry's trace if it arrives in time, and keeps it.
    pub(super) async fn answer(
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

    /// Returns the registry's lesson if it arrives in time, and keeps it.
    pub(super) async fn lesson_of_registry(
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

    /// Keeps the lesson of a start for other images, and publishes it if the registry lacks the
    /// start's trace.
    pub(super) async fn teach(
        &self,
        image: &Arc<Image>,
        start: &Recorded,
        registry: RegistryTrace,
    ) {
        let Some(repository) = image.repository.repository_name() else { return };
        let is_known = self.lessons.of_repository(&repository).is_some();
        // Reads of chunks present before were not seen.
        if !self.settings.learns_from_others() || is_known && !start.saw_everything() {
            return;
        }
        let (read, trace) = (image.clone(), start.trace.clone());
        let walk = move || lessons::of_start(&read, &trace);
        let Ok((lesson, programs)) = tokio::task::spawn_blocking(walk).await else { return };
        let visibility = match image.repository.serves_anonymously() {
            true => Visibility::Public,
            false => Visibility::Private,
        };
        if let Err(error) = self.lessons.add(&repository, &lesson, &programs, visibility) {
            tracing::warn!(repository, %error, "cannot keep a lesson");
        }
        if self.settings.publish && registry == RegistryTrace::Missing && start.saw_everything() {
            match lessons::publish(&*image.repository, &lesson).await {
                Ok(artifact) => tracing::info!(repository, %artifact, "published a lesson"),
                Err(error) => tracing::warn!(repository, %error, "cannot publish a lesson"),
            }
        }
    }

    /// Keeps the trace of a start.
    pub(super) async fn keep(&self, image: &Image, start: &Recorded, registry: RegistryTrace) {
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
        // A trace without the chunks that were present before would mislead others.
        if self.settings.publish && registry == RegistryTrace::Missing && start.saw_everything() {
            let name = image.repository.describe();
            match traces::publish(&*image.repository, manifest, &trace).await {
                Ok(artifact) => tracing::info!(image = name, %artifact, "published its trace"),
                Err(error) => tracing::warn!(image = name, %error, "cannot publish its trace"),
            }
        }
    }
}

/// Asks the registry for the lesson of a repository, learnt by other nodes.
pub(super) fn ask_for_lesson(repository: &Arc<dyn Repository>) -> JoinHandle<Option<Lesson>> {
    let repository = repository.clone();
    tokio::spawn(async move {
        let found = lessons::find(&*repository).await;
        let name = repository.describe();
        found.inspect_err(|error| tracing::info!(repository = name, %error, "no lesson")).ok()?
    })
}
