//! A layer's blob that is pushed while it is made.
//!
//! Only that of a source which is one layer without a digest, a directory or a tar: what of it was
//! compressed is final as soon as it is written, since no lower layer can have the same. Blobs of
//! other images are pushed when they are whole: most of them are in the registry already, or in one
//! of its other repositories, and it can be asked for them by their digests only.

use std::{
    future::pending,
    mem,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use anyhow::Result;
use indicatif::ProgressBar;
use lazuli_builder::{Built, BuiltBlob, Progress};
use lazuli_registry::{Growing, Growth, Push, Pushed, RegistryError};
use tokio::{
    runtime::{Handle, Runtime},
    sync::watch,
    task::JoinHandle,
    time::timeout,
};

use crate::{
    interrupt::{self, Undo},
    progress,
};

/// How long a registry may take to forget an upload when somebody waits for the end of this
/// process.
const WAIT_FOR_TOTAL: Duration = Duration::from_secs(2);

/// Shows how a build reads its layers, and pushes what it makes.
pub(crate) struct Pushing<'a> {
    bar: &'a ProgressBar,
    target: Arc<dyn Push>,
    runtime: Handle,
    push: Arc<Mutex<State>>,
    _undo: Undo,
}

enum State {
    /// There was nothing to send yet, or all of it is there.
    Idle,
    Running(Running),
    /// A signal ends this process: nothing may begin again.
    GivenUp,
}

struct Running {
    file: PathBuf,
    growth: watch::Sender<Growth>,
    /// Bytes that are there.
    sent: ProgressBar,
    /// `None` while its end is waited for.
    task: Option<JoinHandle<Result<Pushed, RegistryError>>>,
}

/// The push, the blob if it is wanted, and how many of its bytes are there.
type Ending<'b> = (JoinHandle<Result<Pushed, RegistryError>>, Option<&'b BuiltBlob>, ProgressBar);

fn lock(push: &Mutex<State>) -> MutexGuard<'_, State> {
    push.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Takes back what the registry has of it, and lets nothing begin again.
fn give_up(push: &Mutex<State>, runtime: &Handle) {
    let before = mem::replace(&mut *lock(push), State::GivenUp);
    if let State::Running(Running { growth, .. }) = before {
        growth.send_replace(Growth::GivenUp);
        // The push has the other end for as long as it lives.
        let _ = runtime.block_on(async { timeout(WAIT_FOR_TOTAL, growth.closed()).await });
    }
}

impl<'a> Pushing<'a> {
    pub(crate) fn new(bar: &'a ProgressBar, target: Arc<dyn Push>, runtime: &Runtime) -> Self {
        let (push, runtime) = (Arc::new(Mutex::new(State::Idle)), runtime.handle().clone());
        let (interrupted, handle) = (push.clone(), runtime.clone());
        let undo = interrupt::undo(move || give_up(&interrupted, &handle));
        Pushing { bar, target, runtime, push, _undo: undo }
    }

    fn begin(&self, file: &Path) -> Running {
        let (growth, receiver) = watch::channel(Growth::Bytes(0));
        let blob = Growing { file: file.to_owned(), growth: receiver };
        let (target, sent) = (self.target.clone(), ProgressBar::hidden());
        let count = sent.clone();
        let push = async move { target.push_growing(blob, &|bytes| count.inc(bytes)).await };
        Running { file: file.to_owned(), growth, sent, task: Some(self.runtime.spawn(push)) }
    }

    /// Waits until the blob is there. Without an image that has it, nothing of it stays. Returns
    /// the blob, and how many bytes were sent.
    pub(crate) async fn finish<'b>(
        &self,
        built: Option<&'b Built>,
    ) -> Result<Option<(&'b BuiltBlob, u64)>> {
        let Some((task, blob, sent)) = self.end(built) else {
            self.over().await;
            return Ok(None);
        };
        if let Some(BuiltBlob { record, .. }) = blob {
            let (ahead, of) = (sent.position(), record.blob.stored_size);
            tracing::debug!(ahead, of, "pushed while reading");
            progress::show(&sent, Some(of), "storing");
        }
        let pushed = task.await;
        self.over().await;
        // Without a blob it says that it was given up.
        let Some(blob) = blob else { return Ok(None) };
        let pushed = pushed??;
        sent.finish_and_clear();
        let bytes = if let Pushed::Uploaded(bytes) = pushed { bytes } else { 0 };
        Ok(Some((blob, bytes)))
    }

    /// Says how the blob ends. What a signal needs to take it back stays until [`Self::over`].
    fn end<'b>(&self, built: Option<&'b Built>) -> Option<Ending<'b>> {
        let mut push = lock(&self.push);
        let State::Running(push) = &mut *push else { return None };
        let mut blobs = built.into_iter().flat_map(|built| &built.blobs);
        let blob = blobs.find(|blob| blob.file.as_ref() == Some(&push.file));
        let whole =
            |blob: &BuiltBlob| Growth::Whole(blob.record.blob.id, blob.record.blob.stored_size);
        push.growth.send_replace(blob.map_or(Growth::GivenUp, whole));
        Some((push.task.take()?, blob, push.sent.clone()))
    }

    /// Forgets the push. Does not return when a signal ends this process: what it gave up is no
    /// error to report.
    async fn over(&self) {
        let interrupted = match &mut *lock(&self.push) {
            State::GivenUp => true,
            push => {
                *push = State::Idle;
                false
            }
        };
        if interrupted {
            pending::<()>().await;
        }
    }
}

impl Progress for Pushing<'_> {
    fn bytes_read(&self, _layer: usize, bytes: u64) {
        self.bar.inc(bytes);
    }

    fn layer_done(&self, _layer: usize) {}

    fn lowest_grown(&self, file: &Path, bytes: u64) {
        let mut push = lock(&self.push);
        if let State::Idle = *push {
            *push = State::Running(self.begin(file));
        }
        let State::Running(push) = &*push else { return };
        push.growth.send_if_modified(|growth| match growth {
            Growth::Bytes(there) if *there < bytes => {
                *there = bytes;
                true
            }
            _ => false,
        });
    }
}
