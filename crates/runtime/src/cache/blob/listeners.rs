//! Listeners for the ranges that drivers request.

use std::{
    fmt,
    ops::Range,
    sync::{
        Arc, RwLock, Weak,
        atomic::{AtomicBool, Ordering},
    },
};

use crate::sync::{read, write};

/// Is told of the chunks that a driver asks about.
pub(crate) type Listener = dyn Fn(Range<usize>) + Send + Sync;

/// The listeners of a blob, as long as they live.
#[derive(Default)]
pub(super) struct Listeners {
    all: RwLock<Vec<Weak<Listener>>>,
    /// Whether there may be listeners: without one, a read takes no lock.
    are_there: AtomicBool,
}

impl Listeners {
    pub(super) fn add(&self, listener: &Arc<Listener>) {
        write(&self.all).push(Arc::downgrade(listener));
        self.are_there.store(true, Ordering::Relaxed);
    }

    /// Notifies all listeners.
    pub(super) fn tell(&self, chunks: &Range<usize>) {
        if !self.are_there.load(Ordering::Relaxed) {
            return;
        }
        let (live, known): (Vec<_>, _) = {
            let all = read(&self.all);
            (all.iter().filter_map(Weak::upgrade).collect(), all.len())
        };
        if live.len() < known {
            let mut all = write(&self.all);
            all.retain(|listener| listener.strong_count() > 0);
            self.are_there.store(!all.is_empty(), Ordering::Relaxed);
        }
        live.iter().for_each(|listener| listener(chunks.clone()));
    }
}

impl fmt::Debug for Listeners {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Listeners").field(&read(&self.all).len()).finish()
    }
}
