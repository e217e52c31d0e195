//! The keeper's event loop: messages of its peers, and deaths of workers.

use std::{
    fmt, io,
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::net::UnixStream,
    },
    path::PathBuf,
    time::{Duration, Instant},
};

use lazuli_sys::path_error::At as _;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::FlockOperation,
    net::{SocketFlags, accept_with},
};

use super::{
    descriptors::Descriptors,
    error::{Ended, KeeperError},
    handover::Successor,
    history::History,
    info::KeeperInfo,
    names::{GROUP, JOURNAL, LISTENER, LOCK, PREDECESSOR},
    programs::{Programs, Role},
    restarts::Restarts,
    service::{self, Service},
    wire::{Channel, Kind, TRIAL},
    worker::Worker,
};

/// Age at which a worker counts as successful, once it has answered the requests of its
/// predecessors.
const SETTLED: Duration = Duration::from_millis(100);

/// Time limit for a client's request. Clients send it at once, and meanwhile no other client is
/// served.
const CLIENT_LIMIT: Duration = Duration::from_millis(100);

/// Quiet time after which the keeper releases memory.
const REST: Duration = Duration::from_millis(50);

/// Time limit for a worker to end; it finishes requests of clients, readers are not affected.
const LEAVE_LIMIT: Duration = Duration::from_secs(10);

/// Holds descriptors for workers, and runs one worker at a time.
pub struct Keeper {
    pub(super) root: PathBuf,
    pub(super) programs: Programs,
    pub(super) descriptors: Descriptors,
    pub(super) service: Service,
    pub(super) signals: UnixStream,
    pub(super) worker: Option<Worker>,
    pub(super) successor: Option<Successor>,
    pub(super) restarts: Restarts,
    pub(super) history: History,
    pub(super) stopping: bool,
    /// Whether something happened a moment ago.
    pub(super) awake: bool,
}

impl Keeper {
    /// Serves until nothing is left to serve: by order of a client or a signal, or after another
    /// keeper took over.
    pub fn run(mut self) -> Result<Ended, KeeperError> {
        if self.worker.is_none() {
            self.start_worker();
        }
        loop {
            let Some(ended) = self.step().at("poll")? else {
                continue;
            };
            if ended == Ended::Stopped {
                self.history.end();
                if let Some(lock) = self.descriptors.get(LOCK) {
                    // The service manager may have a copy for a while yet.
                    let _ = rustix::fs::flock(lock, FlockOperation::Unlock);
                }
            }
            return Ok(ended);
        }
    }

    fn step(&mut self) -> io::Result<Option<Ended>> {
        let rest_at = self.awake.then(|| Instant::now() + REST);
        let deadlines = [
            self.restarts.due(),
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
        if heard == 0 && self.restarts.due().is_none() {
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
        if self.restarts.due().is_some_and(|at| at <= now) {
            self.start_worker();
        }
        if let Some(worker) = &mut self.worker
            && worker.leave_before.is_some_and(|at| at <= now)
        {
            tracing::warn!(pid = worker.pid, "the worker does not leave, killing it");
            worker.leave_before = None;
            worker.kill();
        }
        let idle =
            self.worker.is_none() && self.successor.is_none() && self.restarts.due().is_none();
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
        // The command holds the other end of the connection, whose closing tells that the worker
        // died.
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

    /// Continues with a worker whose trial is over.
    pub(super) fn take(&mut self, worker: Worker) {
        self.descriptors.iter().for_each(|(name, fd)| self.service.store(name, fd));
        self.worker = Some(worker);
        self.service.ready();
    }

    fn start_worker(&mut self) {
        self.restarts.cancel();
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
        let pause = self.restarts.fail();
        if !pause.is_zero() {
            let failures = self.restarts.failures();
            tracing::error!(?pause, failures, why, "workers keep ending");
            self.service.status(&format!("workers keep ending: {why}"));
        }
        self.history.exited(why);
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
        self.history.worker_died(ended.clone());
        tracing::error!(pid = worker.pid, ended, "the worker died; readers wait for the next one");
        if worker.settled && worker.started.elapsed() > SETTLED {
            self.restarts.settle();
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

    /// Returns whether it holds groups of images, which versions with one fanotify group would
    /// leave unanswered.
    fn has_groups_of_images(&self) -> bool {
        let is_one = |name: &str| name.strip_prefix(GROUP).is_some_and(|rest| !rest.is_empty());
        self.descriptors.iter().any(|(name, _)| is_one(name))
    }

    /// Makes the worker exit for a successor, which continues afterwards.
    fn give_way(&mut self, mut successor: Successor) {
        tracing::info!("a successor takes over");
        self.restarts.cancel();
        match &mut self.worker {
            Some(worker) => {
                worker.tell(Kind::Leave);
                worker.leave_before = Some(Instant::now() + LEAVE_LIMIT);
                self.successor = Some(successor);
            }
            None if successor.hand_over(&self.descriptors).is_ok() => {
                self.successor = Some(successor);
            }
            None => self.restarts.start_now(),
        }
    }

    /// Returns whether the successor has taken over for good.
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
        tracing::error!(why, "the successor failed; this keeper continues");
        successor.kill();
        if self.worker.is_none() {
            self.restarts.start_now();
        }
    }

    pub(super) fn info(&self, worker_pid: Option<u32>) -> KeeperInfo {
        let pause = self.restarts.due().map(|at| at.saturating_duration_since(Instant::now()));
        KeeperInfo {
            pid: std::process::id(),
            worker_pid,
            restarts: self.history.restarts,
            last_exit: self.history.last_exit.clone(),
            last_exit_at: self.history.last_exit_at,
            keeper_restarts: self.history.keeper_restarts,
            takeovers: self.history.takeovers,
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

/// Releases memory that is only needed to start a worker, or to handle a message.
fn shrink() {
    if let Err(error) = lazuli_sys::resident::forget_program() {
        tracing::debug!(%error, "cannot give pages back");
    }
}
