//! One fetch of an image's metadata at a time.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, Weak},
};

use crate::sync::lock;

/// Locks for fetches of metadata, by the image's name, and for what is made of them: a second one
/// waits for the first and finds its result. The same image under another name does not wait, since
/// its registry may be another one.
#[derive(Debug, Default)]
pub(in crate::daemon) struct FetchLocks(Mutex<HashMap<String, Weak<tokio::sync::Mutex<()>>>>);

impl FetchLocks {
    pub(in crate::daemon) async fn lock(&self, image: &str) -> tokio::sync::OwnedMutexGuard<()> {
        let lock = {
            let mut locks = lock(&self.0);
            locks.retain(|_, lock| lock.strong_count() > 0);
            let known = locks.get(image).and_then(Weak::upgrade);
            known.unwrap_or_else(|| {
                let lock = Arc::default();
                locks.insert(image.to_owned(), Arc::downgrade(&lock));
                lock
            })
        };
        lock.lock_owned().await
    }
}
