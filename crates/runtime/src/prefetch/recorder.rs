//! Records the chunks that readers touch during a start.

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard},
    time::{Duration, Instant},
};

use lazuli_image::{Digest, Trace, trace::MAX_TOUCHES};
use tokio::{sync::Notify, time::timeout};

use crate::{
    cache::{CachedBlob, Listener, ReadyMap},
    sync::lock,
};

/// A container that touched nothing new for this time has started: 5 s is well above the longest
/// pause observed during a start, and well below the life of any container worth tuning for.
pub(crate) const QUIET: Duration = Duration::from_secs(5);

/// Maximum length of a start: later reads are normal work.
const LONGEST: Duration = Duration::from_secs(120);

/// Records one start, from the first touch on.
pub(crate) struct Recorder {
    log: Arc<Log>,
    /// Kept alive for the blobs, which notify them.
    _listeners: Vec<Arc<Listener>>,
    blobs: Vec<Digest>,
    /// Whether the kernel reports reads of the blob: it doesn't for a complete one.
    asked: Vec<bool>,
}

#[derive(Default)]
struct Log {
    touched: Mutex<Touched>,
    begun: Notify,
}

#[derive(Default)]
struct Touched {
    first: Option<Instant>,
    last: Option<Instant>,
    /// Position of the blob, chunk number, milliseconds since the first.
    chunks: Vec<(u8, u32, u32)>,
}

impl Recorder {
    /// Records drivers' requests for these blobs from now on.
    pub(crate) fn start(blobs: &[Arc<CachedBlob>]) -> Self {
        let log = Arc::new(Log::default());
        let listener = |(blob, position): (&Arc<CachedBlob>, u8)| {
            let (log, numbers) = (log.clone(), Arc::downgrade(blob));
            let seen = ReadyMap::new(blob.stats().chunks_total as usize, &[]);
            let listener: Arc<Listener> = Arc::new(move |chunks| {
                for at in chunks {
                    if seen.set(at)
                        && let Some(blob) = numbers.upgrade()
                    {
                        log.add(position, blob.chunk(at).number);
                    }
                }
            });
            blob.tell(&listener);
            listener
        };
        Recorder {
            _listeners: blobs.iter().zip(0..).map(listener).collect(),
            log,
            blobs: blobs.iter().map(|blob| blob.id()).collect(),
            asked: blobs.iter().map(|blob| !blob.is_complete()).collect(),
        }
    }

    /// Waits until the start is over, or `gone` reports that no reader is left. The start lasts
    /// while a reader of any image waits for data, according to `waits`. Returns the touched
    /// chunks, if the kernel reported any.
    pub(crate) async fn record(
        self,
        gone: impl Fn() -> bool,
        waits: impl Fn() -> bool,
    ) -> Option<Recorded> {
        /// Interval for checking whether the image is gone.
        const STEP: Duration = Duration::from_millis(200);
        loop {
            let first = {
                let mut touched = self.log.lock();
                if waits() {
                    touched.last = touched.last.map(|_| Instant::now());
                }
                let quiet = touched.last.is_some_and(|last| last.elapsed() > QUIET);
                let long = touched.first.is_some_and(|first| first.elapsed() > LONGEST);
                if quiet || long {
                    break;
                }
                touched.first
            };
            if gone() {
                break;
            }
            if first.is_some() {
                tokio::time::sleep(STEP).await;
            } else {
                // It may be hours until a container is started.
                let _ = timeout(5 * STEP, self.log.begun.notified()).await;
            }
        }
        let chunks = std::mem::take(&mut self.log.lock().chunks);
        let any = !chunks.is_empty() && self.asked.contains(&true);
        any.then(|| Recorded { trace: Trace::of_start(self.blobs, chunks), asked: self.asked })
    }
}

/// One start.
#[derive(Debug)]
pub(crate) struct Recorded {
    pub(crate) trace: Trace,
    /// For each blob of the trace, whether its reads were visible.
    asked: Vec<bool>,
}

impl Recorded {
    /// Returns whether touches of a blob were visible.
    pub(crate) fn saw(&self, blob: &Digest) -> bool {
        let mut rows = self.trace.blobs().iter().zip(&self.asked);
        rows.any(|(known, asked)| known == blob && *asked)
    }

    /// Returns whether touches of all blobs were visible.
    pub(crate) fn saw_everything(&self) -> bool {
        self.asked.iter().all(|asked| *asked)
    }
}

impl Log {
    fn add(&self, blob: u8, number: u32) {
        let now = Instant::now();
        let mut touched = self.lock();
        if touched.chunks.len() >= MAX_TOUCHES {
            return;
        }
        let first = *touched.first.get_or_insert(now);
        touched.last = Some(now);
        let at = now.saturating_duration_since(first).as_millis();
        touched.chunks.push((blob, number, u32::try_from(at).unwrap_or(u32::MAX)));
        if touched.chunks.len() == 1 {
            self.begun.notify_one();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Touched> {
        lock(&self.touched)
    }
}

impl fmt::Debug for Recorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let chunks = self.log.lock().chunks.len();
        f.debug_struct("Recorder").field("chunks", &chunks).finish_non_exhaustive()
    }
}
