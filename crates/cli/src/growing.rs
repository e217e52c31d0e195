//! A layer's blob that is pushed while it is made.
//!
//! Only that of a source which is one layer without a digest, a directory or a tar: what of it was compressed is final as soon as it is
//! written, since no lower layer can have the same. Blobs of other images are pushed when they are whole: most of them are in the registry
//! already, or in one of its other repositories, and it can be asked for them by their digests only.

use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use anyhow::Result;
use indicatif::ProgressBar;
use lazuli_build::{Built, BuiltBlob, Progress};
use lazuli_registry::{Growing, Growth, Pushed, RegistryError, Repository};
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

/// How long a registry may take to forget an upload when somebody waits for the end of this process.
const PATIENCE: Duration = Duration::from_secs(2);

/// Shows how a build reads its layers, and pushes what it makes.
pub(crate) struct Pushing<'a> {
    bar: &'a ProgressBar,
    target: Arc<dyn Repository>,
    runtime: Handle,
    /// Begins with the first bytes.
    push: Arc<Mutex<Option<Push>>>,
    _undo: Undo,
}

struct Push {
    file: PathBuf,
    growth: watch::Sender<Growth>,
    /// Bytes that are there.
    sent: ProgressBar,
    task: JoinHandle<Result<Pushed, RegistryError>>,
}

impl Push {
    /// Takes back what the registry has of it.
    async fn give_up(self) {
        drop(self.growth);
        // It says that nobody makes the rest.
        let _ = self.task.await;
    }
}

fn lock(push: &Mutex<Option<Push>>) -> MutexGuard<'_, Option<Push>> {
    push.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<'a> Pushing<'a> {
    pub(crate) fn new(
        bar: &'a ProgressBar,
        target: Arc<dyn Repository>,
        runtime: &Runtime,
    ) -> Self {
        let (push, runtime) = (Arc::<Mutex<Option<Push>>>::default(), runtime.handle().clone());
        let (interrupted, handle) = (push.clone(), runtime.clone());
        let undo = interrupt::undo(move || {
            if let Some(push) = lock(&interrupted).take() {
                let _ = handle.block_on(async { timeout(PATIENCE, push.give_up()).await });
            }
        });
        Pushing { bar, target, runtime, push, _undo: undo }
    }

    fn begin(&self, file: &Path) -> Push {
        let (growth, receiver) = watch::channel(Growth::Bytes(0));
        let blob = Growing { file: file.to_owned(), growth: receiver };
        let (target, sent) = (self.target.clone(), ProgressBar::hidden());
        let count = sent.clone();
        let push = async move { target.push_growing(blob, &|bytes| count.inc(bytes)).await };
        Push { file: file.to_owned(), growth, sent, task: self.runtime.spawn(push) }
    }

    /// Waits until the blob is there. Without an image that has it, nothing of it stays. Returns the blob, and how many bytes were sent.
    pub(crate) async fn finish<'b>(
        &self,
        built: Option<&'b Built>,
    ) -> Result<Option<(&'b BuiltBlob, u64)>> {
        let Some(push) = lock(&self.push).take() else { return Ok(None) };
        let mut blobs = built.into_iter().flat_map(|built| &built.blobs);
        let Some(blob) = blobs.find(|blob| blob.file.as_ref() == Some(&push.file)) else {
            push.give_up().await;
            return Ok(None);
        };
        let Push { growth, sent, task, .. } = push;
        let record = &blob.record.blob;
        growth.send_replace(Growth::Whole(record.id, record.stored_size));
        tracing::debug!(ahead = sent.position(), of = record.stored_size, "pushed while reading");
        progress::show(&sent, Some(record.stored_size), "storing");
        let pushed = task.await??;
        sent.finish_and_clear();
        let bytes = if let Pushed::Uploaded(bytes) = pushed { bytes } else { 0 };
        Ok(Some((blob, bytes)))
    }
}

impl Progress for Pushing<'_> {
    fn bytes_read(&self, _layer: usize, bytes: u64) {
        self.bar.inc(bytes);
    }

    fn layer_done(&self, _layer: usize) {}

    fn lowest_grown(&self, file: &Path, bytes: u64) {
        let mut push = lock(&self.push);
        let push = push.get_or_insert_with(|| self.begin(file));
        push.growth.send_if_modified(|growth| match growth {
            Growth::Bytes(there) if *there < bytes => {
                *there = bytes;
                true
            }
            _ => false,
        });
    }
}
