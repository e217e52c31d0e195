//! A connection to the kernel's FUSE client, and the threads that answer it.

use std::{
    fs::File,
    io::{self, IoSlice},
    os::fd::{AsFd, BorrowedFd},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

use lazuli_image::Digest;
use rustix::io::Errno;
use tokio::sync::watch;
use tracing::{debug, error, warn};

use super::{
    journal::{Journal, Slot},
    threads::{Leave, MINIMUM, THREADS},
};

/// Bytes of the largest reply: 1 MiB of data, the most the kernel ever asks for, and a page for its
/// header. Pages of a buffer that no request fills take no memory.
pub(in crate::kernel) const BUFFER: usize = (1 << 20) + 4096;

/// Threads that stay when nothing is to be done: enough for a burst of look-ups on a small machine.
const IDLE_THREADS: usize = 4;

/// Answers the requests of a connection.
pub(in crate::kernel) trait Answer: Send + Sync + 'static {
    /// Answers the request in `slot` in any case, since its reader waits. `reply` is a buffer for
    /// the answer. Returns the slot, unless the answer comes later; its new holder then returns it
    /// with [`Connection::answered`].
    fn answer(
        self: &Arc<Self>,
        connection: &Arc<Connection>,
        slot: Slot,
        reply: &mut [u8],
    ) -> Option<Slot>;
}

/// See the module.
#[derive(Debug)]
pub(in crate::kernel) struct Connection {
    device: File,
    journal: Arc<Journal>,
    /// Name of the mount, for the log.
    name: String,
    /// The image that is charged for threads, if the connection belongs to one.
    image: Option<Digest>,
    requests: AtomicU64,
    /// Requests of an earlier process that are not answered yet.
    left: watch::Sender<usize>,
    threads: Mutex<Threads>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct Threads {
    total: usize,
    idle: usize,
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.device.as_fd()
    }
}

impl Connection {
    /// Over `device`, with the memory of its requests.
    pub(in crate::kernel) fn new(
        device: File,
        journal: Arc<Journal>,
        name: String,
        image: Option<Digest>,
    ) -> Arc<Self> {
        Arc::new(Connection {
            device,
            journal,
            name,
            image,
            requests: AtomicU64::new(0),
            left: watch::Sender::new(0),
            threads: Mutex::default(),
            ended: Condvar::new(),
        })
    }

    /// Starts threads: one for each request that is `left`, and one to wait for more.
    pub(in crate::kernel) fn serve<A: Answer>(
        self: &Arc<Self>,
        answers: &Arc<A>,
        left: Vec<Slot>,
    ) -> io::Result<()> {
        self.left.send_replace(left.len());
        for slot in left {
            spawn(self, answers, slot, None)?;
        }
        self.journal.take().map_or(Ok(()), |slot| spawn(self, answers, slot, None))
    }

    /// The descriptor behind it.
    pub(in crate::kernel) fn device(&self) -> &File {
        &self.device
    }

    /// Name of the mount.
    pub(in crate::kernel) fn name(&self) -> &str {
        &self.name
    }

    /// Number of requests.
    pub(in crate::kernel) fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// Returns whether all threads have ended.
    pub(in crate::kernel) fn has_ended(&self) -> bool {
        self.threads().total == 0
    }

    /// Returns when no thread answers any more.
    pub(in crate::kernel) fn wait_for_end(&self) {
        let gone = self.ended.wait_while(self.threads(), |threads| threads.total > 0);
        drop(gone.unwrap_or_else(PoisonError::into_inner));
    }

    /// Returns when everything is answered that an earlier process left.
    pub(in crate::kernel) fn caught_up(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut left = self.left.subscribe();
        async move {
            // The threads that count are as good as gone when there is no count any more.
            let _ = left.wait_for(|left| *left == 0).await;
        }
    }

    /// Empties the slot of a request that has its answer.
    pub(in crate::kernel) fn answered(&self, slot: &mut Slot) {
        slot.empty();
        if slot.take_left() {
            self.left.send_modify(|left| *left -= 1);
        }
    }

    /// Sends an answer: `struct fuse_out_header` (length, error, request number), and `body`.
    ///
    /// # Errors
    /// The kernel does not take it: the reader was killed, the request has an answer already, or
    /// the mount is going away.
    pub(in crate::kernel) fn reply(&self, request: u64, body: &[u8]) -> io::Result<()> {
        let head = head(request, 0, body.len());
        rustix::io::writev(&self.device, &[IoSlice::new(&head), IoSlice::new(body)])?;
        Ok(())
    }

    /// Answers a request with an error. Nothing waits for it any more if that is refused.
    pub(in crate::kernel) fn refuse(&self, request: u64, error: Errno) {
        let head = head(request, error.raw_os_error(), 0);
        if let Err(error) = rustix::io::write(&self.device, &head) {
            debug!("{}: request {request}: {error}", self.name);
        }
    }

    fn threads(&self) -> MutexGuard<'_, Threads> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a new thread as waiting.
    fn join(&self) {
        let mut threads = self.threads();
        threads.total += 1;
        threads.idle += 1;
    }

    /// Counts a waiting thread as gone.
    fn leave(&self) {
        let mut threads = self.threads();
        threads.total -= 1;
        threads.idle -= 1;
        if threads.total == 0 {
            self.ended.notify_all();
        }
    }

    /// Counts a waiting thread as busy. Returns the resources for another thread if no thread is
    /// left waiting. There are no more threads than slots, and an image needs leave for threads
    /// beyond [`MINIMUM`].
    fn start_request(&self) -> Option<(Slot, Option<Leave>)> {
        let mut threads = self.threads();
        threads.idle -= 1;
        if threads.idle > 0 {
            return None;
        }
        let is_few = threads.total < MINIMUM;
        drop(threads);
        let leave = match self.image.filter(|_| !is_few) {
            Some(image) => Some(THREADS.take(image)?),
            None => None,
        };
        Some((self.journal.take()?, leave))
    }

    /// Counts a busy thread as waiting and returns true; or as gone and returns false, if enough
    /// others wait. In one step: otherwise several threads could each take the others for waiting,
    /// and all would go.
    fn end_request(&self) -> bool {
        let mut threads = self.threads();
        if threads.idle < IDLE_THREADS {
            threads.idle += 1;
            return true;
        }
        // The remaining threads wait, and one of them takes the next request.
        threads.total -= 1;
        false
    }
}

/// `struct fuse_out_header`.
fn head(request: u64, error: i32, body: usize) -> [u8; 16] {
    let mut head = [0; 16];
    head[..4].copy_from_slice(&(16 + body as u32).to_ne_bytes());
    head[4..8].copy_from_slice(&(-error).to_ne_bytes());
    head[8..].copy_from_slice(&request.to_ne_bytes());
    head
}

/// Starts one more thread that answers requests: first the one in its slot, if there is one. It has
/// `leave` as long as it lives.
fn spawn<A: Answer>(
    connection: &Arc<Connection>,
    answers: &Arc<A>,
    slot: Slot,
    leave: Option<Leave>,
) -> io::Result<()> {
    connection.join();
    let (mine, answers) = (connection.clone(), answers.clone());
    let thread = thread::Builder::new().name("fuse".to_owned()).spawn(move || {
        if serve(&mine, &answers, slot) {
            mine.leave();
        }
        drop(leave);
    });
    thread.map(drop).inspect_err(|_| connection.leave())
}

/// Answers requests until the mount is gone, and is true, or until there are enough other threads.
fn serve<A: Answer>(connection: &Arc<Connection>, answers: &Arc<A>, mut slot: Slot) -> bool {
    let mut reply = vec![0; BUFFER];
    loop {
        if slot.is_empty()
            && let Err(error) = slot.read(connection.as_fd(), &mut reply)
        {
            match Errno::from_io_error(&error) {
                // Interrupted, or the process that asked was killed before the request was taken.
                Some(Errno::INTR | Errno::NOENT) => continue,
                Some(Errno::NODEV) => debug!("{} is unmounted", connection.name),
                _ => error!("{} is served no more: {error}", connection.name),
            }
            slot.empty();
            return true;
        }
        connection.requests.fetch_add(1, Ordering::Relaxed);
        if let Some((slot, leave)) = connection.start_request()
            && let Err(error) = spawn(connection, answers, slot, leave)
        {
            warn!("no more threads for {}: {error}", connection.name);
        }
        slot = match answers.answer(connection, slot, &mut reply) {
            Some(mut slot) => {
                connection.answered(&mut slot);
                slot
            }
            // Each waiting request gives its slot back by its deadline.
            None => connection.journal.wait_for_slot(),
        };
        if !connection.end_request() {
            return false;
        }
    }
}
