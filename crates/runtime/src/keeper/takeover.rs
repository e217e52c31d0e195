//! Replaces a keeper while readers continue.
//!
//! ```text
//! successor                     old keeper                 old worker
//!   check ──────────── Takeover ──▶  ──────── Leave ───────▶ exits
//!         ◀── Descriptor…, End ───
//!   new worker, on trial: serves
//!         ─────────────── Done ──▶ exits
//! ```
//!
//! Until `Done`, the old keeper starts a worker of its own again as soon as the successor goes
//! away.

use std::{
    io,
    os::fd::AsFd as _,
    path::{Path, PathBuf},
    process::ExitStatus,
    time::{Duration, Instant},
};

use lazuli_sys::path_error::At as _;

use super::{
    descriptors::Descriptors,
    error::KeeperError,
    handover::{HANDOVER_LIMIT, Refusal, receive_all},
    info::KeeperInfo,
    names::{LOCK, LOG},
    programs::{Programs, Role},
    service, socket,
    supervisor::Keeper,
    wire::{Channel, Kind, Message, unexpected},
    worker::Worker,
};

/// Time limit for the new worker to serve: it reads the metadata of everything that is mounted.
const TRIAL_LIMIT: Duration = Duration::from_secs(30);

/// Why a takeover failed. The old daemon continues.
#[derive(Debug, thiserror::Error)]
pub enum TakeoverError {
    /// No daemon to take over.
    #[error("no daemon runs on {}", root.display())]
    NotRunning {
        /// The root directory.
        root: PathBuf,
    },
    /// This program could not serve here.
    #[error(
        "the new program failed its check ({0}); the old one still serves, and its log says why"
    )]
    Check(ExitStatus),
    /// The new worker did not get to serve.
    #[error("the new worker did not serve ({0}); the old one still serves, and its log says why")]
    Trial(String),
    /// The old keeper did not hand over.
    #[error("the running daemon did not hand over: {0}")]
    Failed(#[source] io::Error),
    /// The old keeper refuses.
    #[error("the running daemon does not hand over: {0}")]
    Refused(String),
    /// The new keeper could not be made.
    #[error(transparent)]
    Keeper(#[from] KeeperError),
}

impl Keeper {
    /// Takes the daemon of `root` over with this program. Returns when it serves.
    pub fn succeed(root: &Path, programs: Programs) -> Result<Self, TakeoverError> {
        let root = root.canonicalize().at(root).map_err(KeeperError::from)?;
        // Check that there is a daemon to take over. Reconnect later: the old keeper hangs up on
        // silent clients, and the check may take longer than that.
        drop(dial(&root)?);
        let check = programs(Role::Check).status().at(&root).map_err(KeeperError::from)?;
        if !check.success() {
            return Err(TakeoverError::Check(check));
        }
        let old = dial(&root)?;
        let descriptors = take_over(&old)?;
        // This process and its workers write where the old ones did.
        if let Some(log) = descriptors.get(LOG) {
            rustix::stdio::dup2_stderr(log).at(&root).map_err(KeeperError::from)?;
        }
        let mut keeper = Keeper::new(root, programs, descriptors)?;
        keeper.history.takeovers += 1;
        match keeper.try_worker(&old) {
            Ok(worker) => {
                // A dead old keeper is no reason to fail: nothing else would serve.
                if let Err(error) = old.send(Kind::Done, "", None) {
                    tracing::warn!(%error, "the old keeper is gone");
                }
                worker.tell(Kind::Confirmed);
                keeper.history.save();
                keeper.take(worker);
                Ok(keeper)
            }
            Err(_) if is_gone(&old) => {
                keeper.history.save();
                Ok(keeper)
            }
            Err(error) => Err(error),
        }
    }

    /// A worker that serves, on trial; when it does not it is gone when this returns.
    fn try_worker(&mut self, old: &Channel) -> Result<Worker, TakeoverError> {
        let spawned = self.spawn(Some(old));
        let mut worker = spawned.map_err(|error| TakeoverError::Trial(error.to_string()))?;
        match self.attend_trial(&mut worker) {
            Ok(()) => Ok(worker),
            Err(error) => {
                worker.kill();
                let ended = worker.reap();
                tracing::error!(%error, ended, "the new worker did not get to serve");
                Err(TakeoverError::Trial(ended))
            }
        }
    }

    fn attend_trial(&mut self, worker: &mut Worker) -> io::Result<()> {
        let deadline = Instant::now() + TRIAL_LIMIT;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match worker.channel.receive_within(left)? {
                Some(Message { kind: Kind::Descriptor, text, descriptor: Some(descriptor) }) => {
                    self.hold(&text, descriptor);
                }
                Some(Message { kind: Kind::Release, text, .. }) => self.release(&text),
                Some(Message { kind: Kind::Report, .. }) => worker.tell(Kind::Report),
                Some(Message { kind: Kind::Settled, .. }) => worker.settled = true,
                Some(Message { kind: Kind::Serving, .. }) => return Ok(()),
                Some(message) => return Err(unexpected(&message)),
                None => return Err(io::ErrorKind::UnexpectedEof.into()),
            }
        }
    }
}

/// Returns whether the other side is gone. It sends nothing else.
fn is_gone(channel: &Channel) -> bool {
    match channel.receive_within(Duration::ZERO) {
        Err(error) => error.kind() != io::ErrorKind::TimedOut,
        Ok(message) => message.is_none(),
    }
}

/// Asks the keeper of `root` how its worker is; it answers also when the worker does not.
pub fn report(root: &Path) -> Result<KeeperInfo, TakeoverError> {
    let keeper = dial(root)?;
    let ask = || {
        keeper.send(Kind::Report, "", None)?;
        match keeper.receive_within(HANDOVER_LIMIT)? {
            Some(message) => KeeperInfo::from_json(&message.text),
            None => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    };
    ask().map_err(TakeoverError::Failed)
}

fn dial(root: &Path) -> Result<Channel, TakeoverError> {
    socket::dial(root).and_then(Channel::new).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
            TakeoverError::NotRunning { root: root.to_owned() }
        }
        _ => TakeoverError::Failed(error),
    })
}

fn take_over(old: &Channel) -> Result<Descriptors, TakeoverError> {
    let ask = || {
        // Any descriptor shows that this version knows groups of images.
        old.send(Kind::Takeover, &service::address(), Some(old.as_fd()))?;
        receive_all(old, Kind::End)
    };
    match ask() {
        Ok((descriptors, true)) => Ok(descriptors),
        // The old keeper died while it handed over. Its worker was gone before that: nothing else
        // can go on.
        Ok((descriptors, false)) if descriptors.get(LOCK).is_some() => Ok(descriptors),
        Ok(_) => Err(TakeoverError::Failed(io::ErrorKind::UnexpectedEof.into())),
        Err(error) => match error.downcast::<Refusal>() {
            Ok(Refusal(reason)) => Err(TakeoverError::Refused(reason)),
            Err(error) => Err(TakeoverError::Failed(error)),
        },
    }
}
