//! A per-key mutex. Waiters share a failure instead of retrying it in turn.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError, Weak},
    time::Instant,
};

use tokio::sync::{Mutex as Queue, OwnedMutexGuard};

use crate::{Image, SnapshotError};

/// Queues by key. A queue exists as long as a task is in it.
#[derive(Debug, Default)]
pub(crate) struct KeyedLocks(Mutex<HashMap<String, Weak<Queue<Option<Failure>>>>>);

/// The failure of the last holder.
#[derive(Debug)]
struct Failure {
    image: Image,
    why: String,
    when: Instant,
}

/// Holds the lock for a key. The next waiter gets it when this is dropped.
#[derive(Debug)]
pub(crate) struct KeyedGuard {
    queue: OwnedMutexGuard<Option<Failure>>,
    arrived: Instant,
}

impl KeyedLocks {
    /// Waits for the lock of `name`, first come, first served.
    pub(crate) async fn take(&self, name: &str) -> KeyedGuard {
        let arrived = Instant::now();
        let queue = {
            let mut queues = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            let queue = queues.get(name).and_then(Weak::upgrade);
            queue.unwrap_or_else(|| {
                queues.retain(|_, queue| queue.strong_count() > 0);
                let queue = Arc::default();
                queues.insert(name.to_owned(), Arc::downgrade(&queue));
                queue
            })
        };
        KeyedGuard { queue: queue.lock_owned().await, arrived }
    }
}

impl KeyedGuard {
    /// Runs `work` for an image, unless an attempt for the same image failed while the caller
    /// waited for the lock: waiters must not wait for a dead registry one after another.
    pub(crate) async fn attempt<T, E: Into<Box<dyn std::error::Error + Send + Sync>>>(
        &mut self,
        image: &Image,
        work: impl Future<Output = Result<T, E>>,
    ) -> Result<T, SnapshotError> {
        let reference = || image.reference.clone();
        if let Some(last) = &*self.queue
            && last.when > self.arrived
            && last.image == *image
        {
            let source = last.why.clone().into();
            return Err(SnapshotError::Image { reference: reference(), source });
        }
        work.await.map_err(|error| {
            let source = error.into();
            let (image, why, when) = (image.clone(), source.to_string(), Instant::now());
            *self.queue = Some(Failure { image, why, when });
            SnapshotError::Image { reference: reference(), source }
        })
    }
}
