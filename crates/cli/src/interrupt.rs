//! Clean-up on signals: removes temporary files, and cancels uploads.

use std::{
    fs,
    future::poll_fn,
    io,
    ops::{Deref, DerefMut},
    path::Path,
    process,
    sync::{
        LazyLock, Mutex, MutexGuard, Once, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    task::Poll,
    thread,
};

use rustix::process::Signal;
use tokio::signal::unix::{self, SignalKind, signal};

type Work = Box<dyn FnOnce() + Send>;

/// Work to do on a signal, by number, the newest last.
static WORK: Mutex<(u64, Vec<(u64, Work)>)> = Mutex::new((0, Vec::new()));

fn work() -> MutexGuard<'static, (u64, Vec<(u64, Work)>)> {
    WORK.lock().unwrap_or_else(PoisonError::into_inner)
}

/// As long as it lives, a signal has something to undo.
#[derive(Debug)]
pub(crate) struct Undo(u64);

impl Undo {
    fn add(work: &mut (u64, Vec<(u64, Work)>), todo: Work) -> Self {
        work.0 += 1;
        work.1.push((work.0, todo));
        Undo(work.0)
    }
}

impl Drop for Undo {
    fn drop(&mut self) {
        work().1.retain(|(number, _)| *number != self.0);
    }
}

/// Makes a signal that ends the process do this first.
pub(crate) fn undo(todo: impl FnOnce() + Send + 'static) -> Undo {
    listen();
    Undo::add(&mut work(), Box::new(todo))
}

/// A file or directory that is removed when it is dropped, or by a signal that ends the process.
#[derive(Debug)]
pub(crate) struct Temporary<T> {
    // Dropped first, so that a signal meanwhile still removes it.
    made: T,
    _undo: Undo,
}

impl<T: AsRef<Path>> Temporary<T> {
    pub(crate) fn new(make: impl FnOnce() -> io::Result<T>) -> io::Result<Self> {
        listen();
        // A signal waits until the name is known.
        let mut work = work();
        let made = make()?;
        let path = made.as_ref().to_owned();
        let undo = Undo::add(&mut work, Box::new(move || remove(&path)));
        Ok(Temporary { made, _undo: undo })
    }

    /// What was made, which a signal does not remove any more.
    pub(crate) fn into_inner(self) -> T {
        self.made
    }
}

impl<T> Deref for Temporary<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.made
    }
}

impl<T> DerefMut for Temporary<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.made
    }
}

fn remove(path: &Path) {
    let _ = fs::remove_file(path);
    // A thread that still writes may add a file meanwhile, so try twice.
    let _ = fs::remove_dir_all(path).or_else(|_| fs::remove_dir_all(path));
}

/// Whether signals are handled elsewhere.
static HELD: AtomicBool = AtomicBool::new(false);

/// While it lives, signals don't end the process: its owner handles them, and returns.
#[derive(Debug)]
pub(crate) struct HeldSignals(());

impl HeldSignals {
    pub(crate) fn new() -> Self {
        HELD.store(true, Ordering::Relaxed);
        HeldSignals(())
    }
}

impl Drop for HeldSignals {
    fn drop(&mut self) {
        HELD.store(false, Ordering::Relaxed);
    }
}

/// Returns when signals are handled.
fn listen() {
    static LISTENS: Once = Once::new();
    LISTENS.call_once(|| {
        let (listens, wait) = mpsc::channel();
        thread::spawn(|| catch(listens));
        // Without signals the sender is dropped.
        let _ = wait.recv();
    });
}

fn catch(listens: mpsc::Sender<()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let Ok(runtime) = runtime else { return };
    let Ok(number) = runtime.block_on(last(listens)) else { return };
    loop {
        let mut work = work();
        // Nothing is made any more, as that takes the lock.
        let Some((_, todo)) = work.1.pop() else { process::exit(128 + number.as_raw()) };
        drop(work);
        todo();
    }
}

/// The signal that ends this process.
async fn last(listens: mpsc::Sender<()>) -> io::Result<Signal> {
    let mut signals = Signals::new()?;
    let _ = listens.send(());
    loop {
        let number = signals.next().await;
        if !HELD.load(Ordering::Relaxed) {
            return Ok(number);
        }
    }
}

/// Bits of the signals that this process was started to ignore, as `nohup` has it. Read before
/// anything listens, which ends that.
static IGNORED: LazyLock<u64> = LazyLock::new(|| {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let bits = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    bits.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok()).unwrap_or(0)
});

/// The signals that ask this process to end, without those that it was started to ignore.
#[derive(Debug)]
pub(crate) struct Signals(Vec<(Signal, unix::Signal)>);

impl Signals {
    pub(crate) fn new() -> io::Result<Self> {
        let is_handled = |number: &Signal| *IGNORED >> (number.as_raw() - 1) & 1 == 0;
        let listen = |number: Signal| Ok((number, signal(SignalKind::from_raw(number.as_raw()))?));
        let numbers = [Signal::INT, Signal::TERM, Signal::HUP].into_iter().filter(is_handled);
        numbers.map(listen).collect::<io::Result<_>>().map(Signals)
    }

    /// Waits for the next one.
    pub(crate) async fn next(&mut self) -> Signal {
        poll_fn(|context| {
            let mut signals = self.0.iter_mut();
            let came = signals.find_map(|(number, signal)| {
                signal.poll_recv(context).is_ready().then_some(*number)
            });
            came.map_or(Poll::Pending, Poll::Ready)
        })
        .await
    }
}
