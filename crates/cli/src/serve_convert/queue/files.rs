//! The files of a queue.

use std::{
    fs::{self, DirBuilder, File},
    io::{self, Write as _},
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
    time::SystemTime,
};

use anyhow::{Context as _, Result};
use lazuli_image::Algorithm;
use lazuli_registry::Reference;
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use crate::path_context::PathContext as _;

/// Maximum number of jobs that were given up and whose files are kept.
const FAILED: usize = 1000;

/// The content of a job's file.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Job {
    /// `registry.example/team/app:1@sha256:…`, or without a tag what was deleted.
    pub(super) image: String,
    /// Attempts that failed.
    pub(super) tries: u32,
    /// The error of the last one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) error: Option<String>,
}

impl Job {
    pub(super) fn new(image: &Reference) -> Self {
        Job { image: image.to_string(), tries: 0, error: None }
    }
}

/// The name of a job's file, without its ending: there is one for a tag, whatever it names.
pub(super) fn key(image: &Reference) -> String {
    let name = image.to_string();
    let name = match (image.tag(), name.split_once('@')) {
        (Some(_), Some((tagged, _))) => tagged,
        _ => &name,
    };
    Algorithm::Sha256.digest(name.as_bytes()).hex()
}

/// The directory of a queue.
#[derive(Debug)]
pub(super) struct Files {
    directory: PathBuf,
    _lock: File,
}

impl Files {
    /// Makes the directory, if need be, and removes what a process left that was killed.
    ///
    /// # Errors
    /// Another process works there, or the directory cannot be used.
    pub(super) fn open(directory: &Path) -> Result<Self> {
        for name in ["jobs", "failed", "tmp"] {
            let path = directory.join(name);
            let made = DirBuilder::new().recursive(true).mode(0o700).create(&path);
            made.cannot("create", &path)?;
        }
        let path = directory.join("lock");
        let lock = File::create(&path).cannot("create", &path)?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive)
            .with_context(|| format!("another process works in {}", directory.display()))?;
        let files = Files { directory: directory.to_owned(), _lock: lock };
        files.clean_up()?;
        Ok(files)
    }

    pub(super) fn scratch(&self) -> PathBuf {
        self.directory.join("tmp")
    }

    fn clean_up(&self) -> Result<()> {
        let path = self.scratch();
        for entry in fs::read_dir(&path).cannot("read", &path)? {
            let path = entry?.path();
            let is_directory = path.symlink_metadata().is_ok_and(|found| found.is_dir());
            let removed =
                if is_directory { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
            // The children of that process may be cleaning up at this moment.
            if let Err(error) = removed
                && error.kind() != io::ErrorKind::NotFound
            {
                return Err(error).cannot("remove", &path);
            }
        }
        Ok(())
    }

    /// Reads all jobs, the oldest first. Files that are none are moved to those that failed.
    pub(super) fn load(&self) -> Result<Vec<(String, Job)>> {
        let path = self.directory.join("jobs");
        let mut found = Vec::new();
        for entry in fs::read_dir(&path).cannot("read", &path)? {
            let entry = entry?;
            let time = entry.metadata().and_then(|file| file.modified());
            found.push((time.unwrap_or(SystemTime::UNIX_EPOCH), entry.path()));
        }
        found.sort();
        let mut jobs = Vec::new();
        for (_, path) in found {
            match read(&path) {
                Ok(job) => jobs.push(job),
                Err(error) => {
                    let error = format!("{error:#}");
                    tracing::error!(file = %path.display(), error, "not a job");
                    let name = path.file_name().unwrap_or_default();
                    let to = self.directory.join("failed").join(name);
                    fs::rename(&path, &to).cannot("move", &path)?;
                }
            }
        }
        Ok(jobs)
    }

    /// Writes a job's file, which is on the disk afterwards.
    pub(super) fn write(&self, key: &str, job: &Job) -> Result<()> {
        self.write_to("jobs", key, job)
    }

    /// Removes the file of a job. If that fails, the job is repeated after a restart.
    pub(super) fn remove(&self, key: &str) {
        let path = self.path("jobs", key);
        if let Err(error) = fs::remove_file(&path) {
            tracing::error!(path = %path.display(), %error, "cannot remove a job that is done");
        }
    }

    /// Moves a job to those that failed.
    pub(super) fn give_up(&self, key: &str, job: &Job) -> Result<()> {
        let written = self.forget_old_failures().and_then(|()| self.write_to("failed", key, job));
        self.remove(key);
        written
    }

    /// Forgets that a job failed.
    pub(super) fn forget_failure(&self, key: &str) {
        let _ = fs::remove_file(self.path("failed", key));
    }

    fn forget_old_failures(&self) -> Result<()> {
        let mut files = Vec::new();
        for entry in fs::read_dir(self.directory.join("failed"))? {
            let entry = entry?;
            files.push((entry.metadata()?.modified()?, entry.path()));
        }
        files.sort();
        let excess = (files.len() + 1).saturating_sub(FAILED);
        for (_, path) in files.iter().take(excess) {
            fs::remove_file(path)?;
        }
        Ok(())
    }

    fn path(&self, directory: &str, key: &str) -> PathBuf {
        self.directory.join(directory).join(format!("{key}.json"))
    }

    fn write_to(&self, directory: &str, key: &str, job: &Job) -> Result<()> {
        let path = self.path(directory, key);
        let write = || {
            let mut file = tempfile::NamedTempFile::new_in(self.scratch())?;
            file.write_all(&serde_json::to_vec(job)?)?;
            file.as_file().sync_all()?;
            file.persist(&path)?;
            File::open(self.directory.join(directory))?.sync_all()
        };
        write().cannot("write", &path)
    }
}

/// Reads a job's file.
fn read(path: &Path) -> Result<(String, Job)> {
    let job: Job = serde_json::from_slice(&fs::read(path)?)?;
    let key = key(&job.image.parse()?);
    Ok((key, job))
}
