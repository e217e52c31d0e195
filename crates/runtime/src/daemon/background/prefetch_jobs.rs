//! Prefetches in progress, and those that have just ended.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard},
    time::{Duration, Instant},
};

use crate::{
    daemon::{
        DaemonError,
        api::{PrefetchRequest, PrefetchStatus},
        ordinary::pull_progress::PullProgress,
        served::image::ServedImage,
    },
    sync::lock,
};

/// How long the result of a prefetch is kept for the first client that asks. A later request starts
/// another prefetch.
const NEWS: Duration = Duration::from_secs(10);

/// Prefetches in progress, and those that ended a moment ago.
#[derive(Debug, Default)]
pub(in crate::daemon) struct PrefetchJobs(Mutex<HashMap<PrefetchRequest, Arc<Job>>>);

#[derive(Debug, Default)]
pub(in crate::daemon) struct Job(Mutex<Progress>);

#[derive(Debug, Default)]
pub(in crate::daemon) struct Progress {
    /// Its layers while they are pulled, if it has no index.
    pub(in crate::daemon) pull: PullProgress,
    /// The image, once it is known and until the prefetch ends.
    pub(in crate::daemon) image: Option<Arc<ServedImage>>,
    pub(in crate::daemon) ended: Option<(Instant, Result<PrefetchStatus, Arc<DaemonError>>)>,
}

impl Job {
    pub(in crate::daemon) fn lock(&self) -> MutexGuard<'_, Progress> {
        lock(&self.0)
    }

    fn is_old(&self) -> bool {
        self.lock().ended.as_ref().is_some_and(|(ended, _)| ended.elapsed() > NEWS)
    }
}

impl PrefetchJobs {
    /// Returns the progress of the prefetch for `request`; starts it with `begin` if there is none.
    pub(in crate::daemon) fn progress(
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
            None => Ok(match &progress.image {
                Some(image) => status(image),
                None => progress.pull.status(),
            }),
        }
    }
}

/// How much of an image is present.
pub(in crate::daemon) fn status(image: &ServedImage) -> PrefetchStatus {
    let (bytes_here, bytes_total) = image.filled();
    PrefetchStatus { bytes_here, bytes_total, done: false }
}
