//! Jobs, on disk.
//!
//! ```text
//! DIRECTORY/lock      held by the process that works here
//! DIRECTORY/jobs/     one file for each tag, named by the hash of its name
//! DIRECTORY/failed/   those that were given up, with their last error
//! DIRECTORY/tmp/      files that are being written, and scratch directories of children
//! ```
//!
//! A job's file is on the disk before its event is acknowledged, and is removed when the job is
//! done. A job that is repeated because that was not noted finds nothing to do.

mod files;

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use anyhow::Result;
use lazuli_registry::Reference;
use tokio::{
    sync::Notify,
    time::{Instant, sleep_until},
};

use self::files::{Files, Job, key};

/// Maximum number of jobs.
const LIMIT: usize = 10_000;

/// Attempts before a job is given up.
const TRIES: u32 = 20;

/// Pause after the first failure, doubled by each further one.
const PAUSE: Duration = Duration::from_secs(1);

/// Longest pause. With it a job is given up after some two hours.
const LONGEST_PAUSE: Duration = Duration::from_secs(600);

/// The queue of one directory. Methods block on the disk, except [`Queue::next`].
#[derive(Debug)]
pub(crate) struct Queue {
    files: Files,
    jobs: Mutex<Jobs>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct Jobs {
    /// By the names of their files.
    known: HashMap<String, Entry>,
    /// Counts jobs, to begin them in the order of their events.
    counter: u64,
}

#[derive(Debug)]
struct Entry {
    job: Job,
    number: u64,
    due: Instant,
    stage: Stage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Waiting,
    Running,
    /// Reported again while it is running: it may have read what is no longer there.
    Again,
}

/// A job that is being worked on.
#[derive(Debug)]
pub(crate) struct Taken {
    key: String,
    pub(crate) image: Reference,
    /// Attempts that failed.
    pub(crate) tries: u32,
}

/// Why a job was not taken. The registry sends the event again.
#[derive(Debug)]
pub(crate) enum Refused {
    Full,
    Disk(anyhow::Error),
}

impl Queue {
    /// Opens the queue that an earlier process left, or makes one.
    ///
    /// # Errors
    /// Another process works there, or the directory cannot be used.
    pub(crate) fn open(directory: &Path) -> Result<Self> {
        let files = Files::open(directory)?;
        let mut jobs = Jobs::default();
        for (key, job) in files.load()? {
            jobs.insert(key, job);
        }
        Ok(Queue { files, jobs: Mutex::new(jobs), changed: Notify::new() })
    }

    /// The directory for files that nobody needs after a crash.
    pub(crate) fn scratch(&self) -> PathBuf {
        self.files.scratch()
    }

    fn lock(&self) -> MutexGuard<'_, Jobs> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of jobs.
    pub(crate) fn len(&self) -> usize {
        self.lock().known.len()
    }

    /// The number of jobs that are worked on or could be: those that failed wait for a while.
    pub(crate) fn due(&self) -> usize {
        let now = Instant::now();
        let jobs = self.lock();
        jobs.known.values().filter(|it| it.stage != Stage::Waiting || it.due <= now).count()
    }

    /// Adds a job, unless it waits already. It is on the disk then.
    ///
    /// # Errors
    /// There are too many jobs, or the disk does not take it.
    pub(crate) fn add(&self, image: &Reference) -> Result<(), Refused> {
        let key = key(image);
        let job = Job::new(image);
        let mut jobs = self.lock();
        let is_full = jobs.known.len() >= LIMIT;
        match jobs.known.get_mut(&key) {
            Some(entry) => {
                // What failed may have been another image under this tag.
                let is_new = entry.job.image != job.image || entry.job.tries > 0;
                if is_new {
                    self.files.write(&key, &job).map_err(Refused::Disk)?;
                    (entry.job, entry.due) = (job, Instant::now());
                }
                if entry.stage != Stage::Waiting {
                    entry.stage = Stage::Again;
                }
            }
            None if is_full => return Err(Refused::Full),
            None => {
                self.files.write(&key, &job).map_err(Refused::Disk)?;
                self.files.forget_failure(&key);
                jobs.insert(key, job);
            }
        }
        drop(jobs);
        self.changed.notify_waiters();
        Ok(())
    }

    /// Waits for the next job that is due.
    pub(crate) async fn next(&self) -> Taken {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            let due = match self.lock().take() {
                Ok(taken) => return taken,
                Err(due) => due,
            };
            match due {
                Some(due) => tokio::select! {
                    () = changed => {}
                    () = sleep_until(due) => {}
                },
                None => changed.await,
            }
        }
    }

    /// Removes a job that is done, or begins it anew if it was reported again.
    pub(crate) fn done(&self, taken: &Taken) {
        let mut jobs = self.lock();
        if !self.begin_anew(&mut jobs, taken) {
            jobs.known.remove(&taken.key);
            self.files.remove(&taken.key);
        }
    }

    /// Repeats a job after a pause, or gives it up.
    pub(crate) fn failed(&self, taken: &Taken, error: String) {
        let mut jobs = self.lock();
        if self.begin_anew(&mut jobs, taken) {
            return;
        }
        let Some(entry) = jobs.known.get_mut(&taken.key) else { return };
        entry.job.tries += 1;
        entry.job.error = Some(error);
        let (job, image) = (entry.job.clone(), &taken.image);
        let (tries, error) = (job.tries, job.error.as_deref().unwrap_or_default());
        let written = if tries < TRIES {
            let pause = pause(tries);
            (entry.stage, entry.due) = (Stage::Waiting, Instant::now() + pause);
            tracing::warn!(%image, error, tries, ?pause, "failed, and is tried again");
            self.files.write(&taken.key, &job)
        } else {
            tracing::error!(%image, error, tries, "failed, and is given up");
            jobs.known.remove(&taken.key);
            self.files.give_up(&taken.key, &job)
        };
        if let Err(error) = written {
            tracing::error!(%image, error = format!("{error:#}"), "the failure is not recorded");
        }
        drop(jobs);
        self.changed.notify_waiters();
    }

    /// Returns whether the job was reported again: what was done is perhaps not what is there now.
    fn begin_anew(&self, jobs: &mut Jobs, taken: &Taken) -> bool {
        let Some(entry) = jobs.known.get_mut(&taken.key) else { return true };
        if entry.stage != Stage::Again {
            return false;
        }
        (entry.stage, entry.due, entry.job.tries) = (Stage::Waiting, Instant::now(), 0);
        self.changed.notify_waiters();
        true
    }
}

impl Jobs {
    fn insert(&mut self, key: String, job: Job) {
        self.counter += 1;
        let (number, due) = (self.counter, Instant::now());
        self.known.insert(key, Entry { job, number, due, stage: Stage::Waiting });
    }

    /// Takes the next job, or returns when one is due, if any waits.
    fn take(&mut self) -> Result<Taken, Option<Instant>> {
        let waiting = self.known.iter_mut().filter(|(_, entry)| entry.stage == Stage::Waiting);
        let next = waiting.min_by_key(|(_, entry)| (entry.due, entry.number));
        let Some((key, entry)) = next else { return Err(None) };
        if entry.due > Instant::now() {
            return Err(Some(entry.due));
        }
        entry.stage = Stage::Running;
        // It was parsed when it was added or read.
        let image = entry.job.image.parse().map_err(|_| None)?;
        Ok(Taken { key: key.clone(), image, tries: entry.job.tries })
    }
}

/// The pause after this many failures.
fn pause(tries: u32) -> Duration {
    let doubled = 2u32.saturating_pow(tries.saturating_sub(1));
    PAUSE.saturating_mul(doubled).min(LONGEST_PAUSE)
}

#[cfg(test)]
mod tests;
