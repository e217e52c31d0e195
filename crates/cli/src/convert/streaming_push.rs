//! Pushes a layer's blob while it is built.
//!
//! It is used for sources of one layer without a digest, a directory or a tar: there, compressed
//! data is final as soon as it is written, since no lower layer can have the same chunks. Blobs of
//! other images are pushed when they are complete: the registry often has them already, in this
//! repository or another, and can be asked for them by digest only.

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

/// Longest wait for the registry to cancel an upload when a signal ends this process.
const CANCEL_LIMIT: Duration = Duration::from_secs(2);

/// Shows a build's progress, and pushes the blob that it writes.
pub(crate) struct StreamingPush<'a> {
    bar: &'a ProgressBar,
    target: Arc<dyn Push>,
    runtime: Handle,
    push: Arc<Mutex<PushState>>,
    _undo: Undo,
}

enum PushState {
    /// Nothing is being sent: not yet, or no longer.
    Idle,
    Running(Running),
    /// A signal ends this process, so no push may begin.
    GivenUp,
}

struct Running {
    file: PathBuf,
    growth: watch::Sender<Growth>,
    /// Counts bytes that the registry has.
    sent: ProgressBar,
    /// `None` while `finish` awaits it.
    task: Option<JoinHandle<Result<Pushed, RegistryError>>>,
}

/// The push's task, the finished blob if wanted, and the bytes sent so far.
type Ending<'b> = (JoinHandle<Result<Pushed, RegistryError>>, Option<&'b BuiltBlob>, ProgressBar);

fn lock(push: &Mutex<PushState>) -> MutexGuard<'_, PushState> {
    push.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Cancels the upload, and prevents another one.
fn give_up(push: &Mutex<PushState>, runtime: &Handle) {
    let before = mem::replace(&mut *lock(push), PushState::GivenUp);
    if let PushState::Running(Running { growth, .. }) = before {
        growth.send_replace(Growth::GivenUp);
        // The push holds the receiver as long as it runs.
        let _ = runtime.block_on(async { timeout(CANCEL_LIMIT, growth.closed()).await });
    }
}

impl<'a> StreamingPush<'a> {
    pub(crate) fn new(bar: &'a ProgressBar, target: Arc<dyn Push>, runtime: &Runtime) -> Self {
        let (push, runtime) = (Arc::new(Mutex::new(PushState::Idle)), runtime.handle().clone());
        let (interrupted, handle) = (push.clone(), runtime.clone());
        let undo = interrupt::undo(move || give_up(&interrupted, &handle));
        StreamingPush { bar, target, runtime, push, _undo: undo }
    }

    fn begin(&self, file: &Path) -> Running {
        let (growth, receiver) = watch::channel(Growth::Bytes(0));
        let blob = Growing { file: file.to_owned(), growth: receiver };
        let (target, sent) = (self.target.clone(), ProgressBar::hidden());
        let count = sent.clone();
        let push = async move { target.push_growing(blob, &|bytes| count.inc(bytes)).await };
        Running { file: file.to_owned(), growth, sent, task: Some(self.runtime.spawn(push)) }
    }

    /// Waits until the registry has the blob; cancels the upload if `built` doesn't contain it.
    /// Returns the blob and the bytes that were sent.
    pub(crate) async fn finish<'b>(
        &self,
        built: Option<&'b Built>,
    ) -> Result<Option<(&'b BuiltBlob, u64)>> {
        let Some((task, blob, sent)) = self.end(built) else {
            self.close().await;
            return Ok(None);
        };
        if let Some(BuiltBlob { record, .. }) = blob {
            let (ahead, of) = (sent.position(), record.blob.stored_size);
            tracing::debug!(ahead, of, "pushed while reading");
            progress::show(&sent, Some(of), "storing");
        }
        let pushed = task.await;
        self.close().await;
        // Without a blob its result is the cancellation.
        let Some(blob) = blob else { return Ok(None) };
        let pushed = pushed??;
        sent.finish_and_clear();
        let bytes = if let Pushed::Uploaded(bytes) = pushed { bytes } else { 0 };
        Ok(Some((blob, bytes)))
    }

    /// Tells the push the blob's final size and digest. A signal can cancel the upload until
    /// [`Self::close`].
    fn end<'b>(&self, built: Option<&'b Built>) -> Option<Ending<'b>> {
        let mut push = lock(&self.push);
        let PushState::Running(push) = &mut *push else { return None };
        let mut blobs = built.into_iter().flat_map(|built| &built.blobs);
        let blob = blobs.find(|blob| blob.file.as_ref() == Some(&push.file));
        let whole =
            |blob: &BuiltBlob| Growth::Whole(blob.record.blob.id, blob.record.blob.stored_size);
        push.growth.send_replace(blob.map_or(Growth::GivenUp, whole));
        Some((push.task.take()?, blob, push.sent.clone()))
    }

    /// Ends the push. Never returns while a signal ends this process: a cancelled upload is no
    /// error to report.
    async fn close(&self) {
        let interrupted = match &mut *lock(&self.push) {
            PushState::GivenUp => true,
            push => {
                *push = PushState::Idle;
                false
            }
        };
        if interrupted {
            pending::<()>().await;
        }
    }
}

impl Progress for StreamingPush<'_> {
    fn bytes_read(&self, _layer: usize, bytes: u64) {
        self.bar.inc(bytes);
    }

    fn layer_done(&self, _layer: usize) {}

    fn lowest_grown(&self, file: &Path, bytes: u64) {
        let mut push = lock(&self.push);
        if let PushState::Idle = *push {
            *push = PushState::Running(self.begin(file));
        }
        let PushState::Running(push) = &*push else { return };
        push.growth.send_if_modified(|growth| match growth {
            Growth::Bytes(there) if *there < bytes => {
                *there = bytes;
                true
            }
            _ => false,
        });
    }
}
