//! Guards: events for reads of a blob's file.
//!
//! The kernel sends none for a complete blob. Before a chunk of such a blob is evicted, the
//! driver's [`Guard`] turns them on again.

use std::{
    collections::BTreeMap,
    fmt, io,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
};

use tokio::sync::watch;

use crate::sync::lock;

/// Makes sure that the kernel asks before it reads the blob's file, as far as the file is in use.
pub type Guard = Arc<dyn Fn() -> io::Result<()> + Send + Sync>;

/// How long events stay on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cache) enum Hold {
    /// Until every chunk is there.
    UntilComplete,
    /// Until [`Guarded::release`], even after every chunk is ready: eviction is about to start.
    UntilReleased,
}

/// See the module.
pub(super) struct Guarded {
    guards: Mutex<BTreeMap<&'static str, Guard>>,
    /// Whether there are guards, readable without their lock: guards may wait for a flush while
    /// they hold it.
    has_guards: AtomicBool,
    /// Whether every chunk is ready and on the disk, and none is about to be evicted.
    complete: watch::Sender<bool>,
    /// Whether the kernel may read the file without events, because it was complete.
    is_open: AtomicBool,
    /// When it last was, as [`Asked::now`](super::residency::Asked::now).
    since: AtomicU32,
    /// See [`Hold::UntilReleased`].
    is_held: AtomicBool,
}

impl Guarded {
    pub(super) fn new(is_complete: bool) -> Self {
        Guarded {
            guards: Mutex::default(),
            has_guards: AtomicBool::new(false),
            complete: watch::Sender::new(is_complete),
            is_open: AtomicBool::new(is_complete),
            since: AtomicU32::new(0),
            is_held: AtomicBool::new(false),
        }
    }

    /// Sets the guard of a driver.
    pub(super) fn set(&self, driver: &'static str, guard: Guard) {
        lock(&self.guards).insert(driver, guard);
        self.has_guards.store(true, Ordering::Release);
    }

    /// Returns whether the kernel reads the blob's file by itself, guarded by events.
    pub(super) fn has_guards(&self) -> bool {
        self.has_guards.load(Ordering::Acquire)
    }

    pub(super) fn is_complete(&self) -> bool {
        *self.complete.borrow()
    }

    /// Waits until the blob is complete.
    pub(super) async fn completed(&self) {
        // The sender is a part of `self`, so the channel does not close.
        let _ = self.complete.subscribe().wait_for(|complete| *complete).await;
    }

    /// Something of the blob is in doubt, or gone.
    pub(super) fn is_incomplete(&self) {
        self.complete.send_replace(false);
    }

    /// Every chunk is ready and on the disk. To be called under the lock of the file's state.
    pub(super) fn has_all(&self) {
        if !self.is_held.load(Ordering::Acquire) {
            self.is_open.store(true, Ordering::Release);
            self.complete.send_replace(true);
        }
    }

    /// Returns whether the kernel may read the file without events.
    pub(super) fn is_open(&self) -> bool {
        self.is_open.load(Ordering::Acquire)
    }

    /// When the kernel last stopped to read without asking.
    pub(super) fn since(&self) -> u32 {
        self.since.load(Ordering::Acquire)
    }

    /// Makes the kernel send events again for a file that was complete. `lock_state` locks the
    /// state of the file, and `now` is the time of [`Asked::now`](super::residency::Asked::now).
    /// Blocks.
    pub(super) fn rearm<L>(
        &self,
        hold: Hold,
        lock_state: impl Fn() -> L,
        now: impl Fn() -> u32,
    ) -> io::Result<()> {
        let holds = hold == Hold::UntilReleased;
        // Guards run one at a time: one could change the mark that another has just read.
        let guards = lock(&self.guards);
        loop {
            {
                // Under the lock, or a flush might call the blob complete in between.
                let _state = lock_state();
                self.is_held.fetch_or(holds, Ordering::AcqRel);
                let is_open = self.is_open();
                if is_open || holds {
                    self.is_incomplete();
                }
                if !is_open {
                    return Ok(());
                }
            }
            guards.values().try_for_each(|guard| guard())?;
            let _state = lock_state();
            // A flush may have completed the blob meanwhile, which removes the mark again.
            if !self.is_complete() {
                self.since.store(now(), Ordering::Release);
                self.is_open.store(false, Ordering::Release);
                return Ok(());
            }
        }
    }

    /// Ends [`Hold::UntilReleased`]. Returns whether it was in force.
    pub(super) fn release(&self) -> bool {
        self.is_held.swap(false, Ordering::AcqRel)
    }
}

impl fmt::Debug for Guarded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guarded").field("is_open", &self.is_open).finish_non_exhaustive()
    }
}
