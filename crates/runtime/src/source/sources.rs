//! The sources of one blob, which change while it is read.

use std::sync::{Arc, RwLock};

use tokio::sync::{Notify, futures::Notified};

use super::{BlobSource, tracked_source::TrackedSource};
use crate::sync::{read, write};

/// Sources of one blob that are kept, mirrors included; the oldest is forgotten first.
const MOST: usize = 32;

/// The sources of a blob, the most preferred first.
#[derive(Debug, Default)]
pub(crate) struct Sources {
    list: RwLock<Vec<Arc<TrackedSource>>>,
    replaced: Notify,
    added: Notify,
}

impl Sources {
    /// Adds a source, which is asked first from now on: the latest source most likely has
    /// credentials that still work.
    pub(crate) fn attach(&self, source: Arc<dyn BlobSource>) {
        let mut list = write(&self.list);
        list.retain(|known| !known.is(&source));
        list.insert(0, Arc::new(TrackedSource::new(source)));
        list.truncate(MOST);
        drop(list);
        self.added.notify_waiters();
    }

    /// Asks `source` no more, also for reads that wait.
    pub(crate) fn detach(&self, source: &Arc<dyn BlobSource>) {
        write(&self.list).retain(|known| !known.is(source));
        self.replaced.notify_waiters();
    }

    /// Returns when a source is attached.
    pub(crate) fn added(&self) -> Notified<'_> {
        self.added.notified()
    }

    /// Returns when a source is detached.
    pub(crate) fn replaced(&self) -> Notified<'_> {
        self.replaced.notified()
    }

    /// All of them, the most preferred first.
    pub(crate) fn list(&self) -> Vec<Arc<TrackedSource>> {
        read(&self.list).clone()
    }
}
