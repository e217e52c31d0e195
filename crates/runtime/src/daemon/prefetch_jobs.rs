//! Prefetches under way, and those that ended a moment ago.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard},
    time::{Duration, Instant},
};

use super::{
    DaemonError,
    api::{PrefetchRequest, PrefetchStatus},
    served_image::ServedImage,
};
use crate::sync::lock;

/// How long the end of a prefetch is kept for the first client that asks. A client that asks after
/// that wants another one.
const NEWS: Duration = Duration::from_secs(10);

/// The prefetches that go on, and those that ended a moment ago.
#[derive(Debug, Default)]
pub(super) struct PrefetchJobs(Mutex<HashMap<PrefetchRequest, Arc<Job>>>);

#[derive(Debug, Default)]
pub(super) struct Job(Mutex<Progress>);

#[derive(Debug, Default)]
pub(super) struct Progress {
    /// What is fetched, as soon as that is known and until it ends.
    pub(super) image: Option<Arc<ServedImage>>,
    pub(super) ended: Option<(Instant, Result<PrefetchStatus, Arc<DaemonError>>)>,
}

impl Job {
    pub(super) fn lock(&self) -> MutexGuard<'_, Progress> {
        lock(&self.0)
    }

    fn is_old(&self) -> bool {
        self.lock().ended.as_ref().is_some_and(|(ended, _)| ended.elapsed() > NEWS)
    }
}

impl PrefetchJobs {
    /// Tells how far the prefetch for `request` is, after it was begun with `begin` if there was
    /// none.
    pub(super) fn progress(
        &self,
        request: &PrefetchRequest,
        begin: impl FnOnce() -> Arc<Job>,
    ) -> Result<PrefetchStatus, DaemonError> {
        let mut jobs = lock(&self.0);
        jobs.retain(|_, job| !job.is_old());
        let job = jobs.entry(request.clone()).or_insert_with(begin).clone();
        let progress = job.lock();
        if progress.ended.is_some() {
            jobs.remove(request);
        }
        match &progress.ended {
            Some((_, Ok(status))) => Ok(*status),
            Some((_, Err(error))) => Err(DaemonError::Shared(error.clone())),
            None => Ok(progress.image.as_ref().map(|image| status(image)).unwrap_or_default()),
        }
    }
}

/// How much of an image is here.
pub(super) fn status(image: &ServedImage) -> PrefetchStatus {
    let (bytes_here, bytes_total) = image.filled();
    PrefetchStatus { bytes_here, bytes_total, done: false }
}
