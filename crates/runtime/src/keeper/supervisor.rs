//! The keeper's event loop: messages of its peers, and deaths of workers.

use std::{
    fmt,
    fs::{DirBuilder, File, TryLockError},
    io,
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::{fs::DirBuilderExt as _, net::UnixStream},
    },
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::FlockOperation,
    net::{SocketFlags, accept_with},
};
use signal_hook::consts::{SIGINT, SIGTERM};

use super::{
    descriptors::Descriptors,
    handover::{Successor, receive_all},
    info::KeeperInfo,
    names::{GROUP, JOURNAL, LISTENER, LOCK, LOG, PREDECESSOR},
    programs::{Programs, Role},
    service::{self, Service},
    socket,
    wire::{Channel, Kind, TRIAL},
    worker::Worker,
};
use crate::path_error::{At as _, PathError};

/// Most bytes of a root directory's path. fsconfig(2) takes strings of 255 bytes, and the longest
/// one below the root is `/images/<64 digits>/bootstrap`.
const ROOT_LIMIT: usize = 255 - 82;

/// A worker has not failed that has answered what its predecessors left, and lived for so long.
const SETTLED: Duration = Duration::from_millis(100);

/// Workers in a row that may fail without a pause.
const QUICK_RESTARTS: u32 = 3;

/// The pause after that; it doubles with each further failure.
const FIRST_PAUSE: Duration = Duration::from_millis(50);

/// The longest pause: how much later than necessary readers go on when the reason is gone.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// How long a client may take to say what it wants. A client speaks at once, and meanwhile
/// no other one is heard.
const CLIENT_LIMIT: Duration = Duration::from_millis(100);

/// Quiet time after which the keeper makes itself small.
const REST: Duration = Duration::from_millis(50);

/// How long a worker may take to leave; it finishes requests of clients, readers are not affected.
const LEAVE_LIMIT: Duration = Duration::from_secs(10);

/// How a keeper ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// Nothing is mounted any more.
    Stopped,
    /// Another keeper goes on.
    Replaced,
}

/// Why there is no keeper.
#[derive(Debug, thiserror::Error)]
pub enum KeeperError {
    /// Another daemon has this root directory.
    #[error("another daemon serves {}", root.display())]
    Locked {
        /// The root directory.
        root: PathBuf,
    },
    /// Paths below the root directory would be longer than the mount API takes.
    #[error(
        "the state directory {} is too long: the kernel takes paths of {ROOT_LIMIT} bytes there",
        root.display()
    )]
    RootTooLong {
        /// The root directory.
        root: PathBuf,
    },
    /// Nothing can be kept for a worker whose keeper died.
    #[error("the worker died before it handed over what its keeper held")]
    Abandoned,
    /// The state directory, or a process.
    #[error("{}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What happened.
        source: io::Error,
    },
}

impl From<PathError> for KeeperError {
    fn from(PathError { path, source }: PathError) -> Self {
        KeeperError::Io { path, source }
    }
}

/// See the module.
pub struct Keeper {
    root: PathBuf,
    programs: Programs,
    pub(super) descriptors: Descriptors,
    service: Service,
    signals: UnixStream,
    worker: Option<Worker>,
    successor: Option<Successor>,
    /// Workers in a row that did not settle.
    failures: u32,
    restarts: u64,
    last_exit: Option<String>,
    start_at: Option<Instant>,
    stopping: bool,
    /// Whether something happened a moment ago.
    awake: bool,
}

impl Keeper {
    /// Takes the root directory for this process, and what an earlier one of this service left with
    /// systemd.
    pub fn open(root: &Path, programs: Programs) -> Result<Self, KeeperError> {
        // No other user may reach set-user-id programs of images or containers below it, nor the
        // sockets.
        let created = DirBuilder::new().recursive(true).mode(0o700).create(root);
        created.at(root)?;
        // The kernel shows mounts by their real paths.
        let root = root.canonicalize().at(root)?;
        if root.as_os_str().len() > ROOT_LIMIT {
            return Err(KeeperError::RootTooLong { root });
        }
        let mut descriptors = Descriptors::default();
        let inherited = lazuli_sys::inherit::descriptors();
        // systemd lists what came last first.
        for (name, descriptor) in inherited.at(&root)? {
            if descriptors.get(&name).is_none() {
                descriptors.insert(name, descriptor);
            }
        }
        let path = root.join("lock");
        let lock = match descriptors.remove(LOCK) {
            Some(lock) => File::from(lock),
            None => File::create(&path).at(&path)?,
        };
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(KeeperError::Locked { root }),
            Err(TryLockError::Error(source)) => return Err(KeeperError::Io { path, source }),
        }
        let mut keeper = Self::new(root, programs, descriptors)?;
        keeper.hold(LOCK, lock.into());
        let log = rustix::stdio::stderr().try_clone_to_owned();
        keeper.hold(LOG, log.at("standard error")?);
        if keeper.descriptors.get(LISTENER).is_none() {
            let socket = socket::open(&keeper.root);
            let socket = socket.at(keeper.root.join(socket::NAME))?;
            keeper.hold(LISTENER, socket);
        }
        Ok(keeper)
    }

    /// Takes a worker over whose keeper died; it waits at the other end of standard input.
    pub fn adopt(root: &Path, programs: Programs) -> Result<Self, KeeperError> {
        let connect = || {
            let channel = Channel::new(rustix::stdio::stdin().try_clone_to_owned()?)?;
            let pid = rustix::net::sockopt::socket_peercred(&channel)?.pid;
            let (descriptors, whole) = receive_all(&channel, Kind::Go)?;
            io::Result::Ok((channel, pid, descriptors, whole))
        };
        let (channel, pid, descriptors, whole) = connect().at("the connection to the worker")?;
        // Both died, then: without the lock this process cannot keep another daemon from starting,
        // and would serve beside it.
        if descriptors.get(LOCK).is_none() {
            return Err(KeeperError::Abandoned);
        }
        let mut keeper = Self::new(root.to_owned(), programs, descriptors)?;
        keeper.descriptors.iter().for_each(|(name, fd)| keeper.service.store(name, fd));
        keeper.last_exit = Some("the keeper before this one died".to_owned());
        // The worker may have died meanwhile: then it is this keeper that goes on.
        if whole && let Ok(worker) = Worker::adopt(channel, pid) {
            let info = keeper.info(Some(worker.pid)).to_json();
            if let Err(error) = worker.channel.send(Kind::Keeper, &info, None) {
                tracing::warn!(%error, "the worker is gone");
            }
            keeper.worker = Some(worker);
            keeper.service.ready();
        }
        Ok(keeper)
    }

    pub(super) fn new(
        root: PathBuf,
        programs: Programs,
        descriptors: Descriptors,
    ) -> Result<Self, KeeperError> {
        // One descriptor for every blob that is in use; the worker says so when they do not
        // suffice.
        if let Err(error) = lazuli_sys::limit::raise_descriptors() {
            tracing::warn!(%error, "cannot raise the number of descriptors to the hard limit");
        }
        let signals = || {
            let (ours, theirs) = UnixStream::pair()?;
            for signal in [SIGTERM, SIGINT] {
                signal_hook::low_level::pipe::register(signal, theirs.try_clone()?)?;
            }
            io::Result::Ok(ours)
        };
        Ok(Keeper {
            signals: signals().at("signal handlers")?,
            root,
            programs,
            descriptors,
            service: Service::find(),
            worker: None,
            successor: None,
            failures: 0,
            restarts: 0,
            last_exit: None,
            start_at: None,
            stopping: false,
            awake: true,
        })
    }

    /// Serves until nothing is left to serve: when a client or a signal says so, or another keeper
    /// goes on.
    pub fn run(mut self) -> Result<Ended, KeeperError> {
        if self.worker.is_none() {
            self.start_worker();
        }
        loop {
            let Some(ended) = self.step().at("poll")? else {
                continue;
            };
            if ended == Ended::Stopped
                && let Some(lock) = self.descriptors.get(LOCK)
            {
                // The service manager may have a copy for a while yet.
                let _ = rustix::fs::flock(lock, FlockOperation::Unlock);
            }
            return Ok(ended);
        }
    }

    fn step(&mut self) -> io::Result<Option<Ended>> {
        let rest_at = self.awake.then(|| Instant::now() + REST);
        let deadlines = [
            self.start_at,
            self.worker.as_ref().and_then(|worker| worker.leave_before),
            self.successor.as_ref().map(|successor| successor.deadline),
            rest_at,
        ];
        let wait = deadlines
            .into_iter()
            .flatten()
            .min()
            .map(|at| at.saturating_duration_since(Instant::now()));
        let wait = wait.and_then(|wait| Timespec::try_from(wait).ok());
        let listener = self.descriptors.get(LISTENER);
        let peers = [
            Some(self.signals.as_fd()),
            listener,
            self.worker.as_ref().map(|worker| worker.channel.as_fd()),
            self.successor.as_ref().map(|successor| successor.channel.as_fd()),
        ];
        let mut fds: Vec<_> =
            peers.iter().flatten().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
        let heard = rustix::io::retry_on_intr(|| poll(&mut fds, wait.as_ref()))?;
        if heard == 0 && self.start_at.is_none() {
            shrink();
        }
        let mut ready = fds.iter().map(|fd| !fd.revents().is_empty());
        let [signal, client, worker, successor] =
            peers.map(|peer| peer.is_some() && ready.next().unwrap_or(false));
        drop(fds);
        self.awake = heard > 0;
        if signal {
            self.signal()?;
        }
        if worker && let Some(ended) = self.hear_worker() {
            return Ok(Some(ended));
        }
        if successor && self.hear_successor() {
            return Ok(Some(Ended::Replaced));
        }
        if self.successor.as_ref().is_some_and(|s| s.deadline <= Instant::now()) {
            self.give_up_successor("it takes too long");
        }
        if client {
            self.accept();
        }
        let now = Instant::now();
        if self.start_at.is_some_and(|at| at <= now) {
            self.start_worker();
        }
        if let Some(worker) = &mut self.worker
            && worker.leave_before.is_some_and(|at| at <= now)
        {
            tracing::warn!(pid = worker.pid, "the worker does not leave, killing it");
            worker.leave_before = None;
            worker.kill();
        }
        let idle = self.worker.is_none() && self.successor.is_none() && self.start_at.is_none();
        if self.stopping && idle {
            return Ok(Some(Ended::Stopped));
        }
        Ok(None)
    }

    fn signal(&mut self) -> io::Result<()> {
        rustix::io::read(&self.signals, &mut [0; 64])?;
        tracing::info!("told to end");
        self.stopping = true;
        self.service.stopping();
        if let Some(worker) = &self.worker {
            worker.tell(Kind::Stop);
        }
        Ok(())
    }

    pub(super) fn hold(&mut self, name: &str, descriptor: OwnedFd) {
        if self.descriptors.get(name).is_some() {
            // It would keep both. A worker sends nothing again that it was given.
            self.service.forget(name);
        }
        self.service.store(name, descriptor.as_fd());
        self.descriptors.insert(name.to_owned(), descriptor);
    }

    pub(super) fn release(&mut self, name: &str) {
        self.descriptors.remove(name);
        self.service.forget(name);
    }

    /// Starts a worker and gives it everything. It is on trial as long as the daemon at the other
    /// end of `predecessor` may go on.
    pub(super) fn spawn(&self, predecessor: Option<&Channel>) -> io::Result<Worker> {
        let (ours, theirs) = Channel::pair()?;
        let mut command = (self.programs)(Role::Worker);
        let child = command.stdin(theirs).spawn()?;
        // It holds the other end of the connection, which may tell whether it lives.
        drop(command);
        let mut worker = Worker::new(ours, child)?;
        if let Err(error) = self.equip(&worker, predecessor) {
            worker.kill();
            return Err(io::Error::new(error.kind(), format!("{error}; {}", worker.reap())));
        }
        Ok(worker)
    }

    fn equip(&self, worker: &Worker, predecessor: Option<&Channel>) -> io::Result<()> {
        let channel = &worker.channel;
        channel.send(Kind::Keeper, &self.info(Some(worker.pid)).to_json(), None)?;
        if let Some(first) = self.descriptors.get(JOURNAL) {
            channel.send(Kind::Descriptor, JOURNAL, Some(first))?;
        }
        for (name, descriptor) in self.descriptors.iter().filter(|(name, _)| *name != JOURNAL) {
            channel.send(Kind::Descriptor, name, Some(descriptor))?;
        }
        let Some(predecessor) = predecessor else { return channel.send(Kind::Go, "", None) };
        channel.send(Kind::Descriptor, PREDECESSOR, Some(predecessor.as_fd()))?;
        channel.send(Kind::Go, TRIAL, None)
    }

    /// Goes on with a worker whose trial is over.
    pub(super) fn take(&mut self, worker: Worker) {
        self.descriptors.iter().for_each(|(name, fd)| self.service.store(name, fd));
        self.worker = Some(worker);
        self.service.ready();
    }

    fn start_worker(&mut self) {
        self.start_at = None;
        match self.spawn(None) {
            Ok(worker) => {
                tracing::info!(pid = worker.pid, "worker started");
                if self.stopping {
                    worker.tell(Kind::Stop);
                }
                self.worker = Some(worker);
            }
            Err(error) => {
                tracing::error!(%error, "cannot start a worker");
                self.restart_later(format!("cannot start: {error}"));
            }
        }
    }

    fn restart_later(&mut self, why: String) {
        self.failures += 1;
        let pause = match self.failures.checked_sub(QUICK_RESTARTS + 1) {
            None => Duration::ZERO,
            Some(doublings) => LONGEST_PAUSE.min(FIRST_PAUSE * 2_u32.pow(doublings.min(10))),
        };
        if !pause.is_zero() {
            tracing::error!(?pause, failures = self.failures, why, "workers keep ending");
            self.service.status(&format!("workers keep ending: {why}"));
        }
        self.last_exit = Some(why);
        self.start_at = Some(Instant::now() + pause);
    }

    /// Reads one message of the worker, or deals with its end.
    fn hear_worker(&mut self) -> Option<Ended> {
        let worker = self.worker.as_mut()?;
        match worker.channel.receive() {
            Ok(Some(message)) => {
                match (message.kind, message.descriptor) {
                    (Kind::Descriptor, Some(descriptor)) => self.hold(&message.text, descriptor),
                    (Kind::Release, None) => self.release(&message.text),
                    (Kind::Report, None) => worker.tell(Kind::Report),
                    (Kind::Serving, None) => self.service.ready(),
                    (Kind::Settled, None) => worker.settled = true,
                    (Kind::Stopped, None) => worker.stopped = true,
                    (kind, _) => tracing::error!(?kind, "the worker says what no worker says"),
                }
                None
            }
            Ok(None) => self.worker_ended(),
            Err(error) => {
                // Most likely a descriptor for which there was no number. Its sender lives,
                // and has it.
                tracing::error!(%error, "cannot understand the worker");
                None
            }
        }
    }

    fn worker_ended(&mut self) -> Option<Ended> {
        let mut worker = self.worker.take()?;
        let ended = worker.reap();
        if worker.stopped {
            self.service.stopping();
            return Some(Ended::Stopped);
        }
        if let Some(successor) = &mut self.successor {
            tracing::info!(pid = worker.pid, "worker left for a successor");
            if successor.hand_over(&self.descriptors).is_ok() {
                return None;
            }
            self.successor = None;
        }
        self.restarts += 1;
        tracing::error!(pid = worker.pid, ended, "the worker died; readers wait for the next one");
        if worker.settled && worker.started.elapsed() > SETTLED {
            self.failures = 0;
        }
        self.restart_later(ended);
        None
    }

    fn accept(&mut self) {
        let Some(listener) = self.descriptors.get(LISTENER) else { return };
        let accepted = accept_with(listener, SocketFlags::CLOEXEC).map_err(io::Error::from);
        let mut heard = accepted.and_then(|connection| {
            let channel = Channel::new(connection)?;
            let message = channel.receive_within(CLIENT_LIMIT)?;
            Ok((channel, message))
        });
        match &mut heard {
            Ok((channel, Some(message))) if message.kind == Kind::Report => {
                let pid = self.worker.as_ref().map(|worker| worker.pid);
                let _ = channel.send(Kind::Report, &self.info(pid).to_json(), None);
            }
            Ok((channel, Some(message))) if message.kind == Kind::Takeover => {
                let refusal = if self.successor.is_some() {
                    Some("another takeover is under way")
                } else if self.stopping {
                    Some("it is ending")
                } else if message.descriptor.is_none() && self.has_groups_of_images() {
                    Some(
                        "it has fanotify groups that the other version does not know: stop it first",
                    )
                } else if self.service.is_there() && message.text != service::address() {
                    Some("systemd runs it: use `systemctl reload`")
                } else {
                    None
                };
                if let Some(refusal) = refusal {
                    let _ = channel.send(Kind::Refused, refusal, None);
                    return;
                }
                let Ok((channel, _)) = heard else { return };
                match Successor::new(channel) {
                    Ok(successor) => self.give_way(successor),
                    Err(error) => tracing::warn!(%error, "the successor is gone"),
                }
            }
            Ok((_, Some(message))) => {
                tracing::warn!(kind = ?message.kind, "a client says what no client says");
            }
            Ok((_, None)) => {}
            Err(error) => tracing::warn!(%error, "a client failed"),
        }
    }

    /// Whether it holds what versions with one fanotify group would leave unanswered.
    fn has_groups_of_images(&self) -> bool {
        let is_one = |name: &str| name.strip_prefix(GROUP).is_some_and(|rest| !rest.is_empty());
        self.descriptors.iter().any(|(name, _)| is_one(name))
    }

    /// Lets the worker leave; a successor goes on when it has.
    fn give_way(&mut self, mut successor: Successor) {
        tracing::info!("a successor takes over");
        self.start_at = None;
        match &mut self.worker {
            Some(worker) => {
                worker.tell(Kind::Leave);
                worker.leave_before = Some(Instant::now() + LEAVE_LIMIT);
                self.successor = Some(successor);
            }
            None if successor.hand_over(&self.descriptors).is_ok() => {
                self.successor = Some(successor);
            }
            None => self.start_at = Some(Instant::now()),
        }
    }

    /// Whether the successor has taken over for good.
    fn hear_successor(&mut self) -> bool {
        let Some(successor) = &self.successor else { return false };
        if successor.is_done() {
            if self.stopping {
                successor.stop();
            }
            return true;
        }
        self.give_up_successor("it went away");
        false
    }

    fn give_up_successor(&mut self, why: &str) {
        let Some(successor) = self.successor.take() else { return };
        tracing::error!(why, "the successor failed; going on");
        successor.kill();
        if self.worker.is_none() {
            self.start_at = Some(Instant::now());
        }
    }

    fn info(&self, worker_pid: Option<u32>) -> KeeperInfo {
        let pause = self.start_at.map(|at| at.saturating_duration_since(Instant::now()));
        KeeperInfo {
            pid: std::process::id(),
            worker_pid,
            restarts: self.restarts,
            last_exit: self.last_exit.clone(),
            next_start_seconds: pause.map(|pause| pause.as_secs_f32()),
        }
    }
}

impl fmt::Debug for Keeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pid = self.worker.as_ref().map(|worker| worker.pid);
        f.debug_struct("Keeper").field("root", &self.root).field("info", &self.info(pid)).finish()
    }
}

/// What was needed to start a worker, or to hear it, is not needed while it runs.
fn shrink() {
    if let Err(error) = lazuli_sys::resident::forget_program() {
        tracing::debug!(%error, "cannot give pages back");
    }
}
