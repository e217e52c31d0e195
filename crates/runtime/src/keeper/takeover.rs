//! One keeper after another, while readers go on.
//!
//! ```text
//! successor                     old keeper                 old worker
//!   check ──────────── Takeover ──▶  ──────── Leave ───────▶ exits
//!         ◀── Descriptor…, End ───
//!   new worker, on trial: serves
//!         ─────────────── Done ──▶ exits
//! ```
//!
//! Until `Done`, the old keeper starts a worker of its own again as soon as the successor goes away.

use std::{
    io,
    path::{Path, PathBuf},
    process::ExitStatus,
    time::Duration,
};

use super::{
    descriptors::Descriptors,
    link::KeeperInfo,
    socket,
    supervisor::{Keeper, KeeperError, LOG, Programs, Role, unexpected},
    wire::{Channel, Kind, Message},
    worker::Worker,
};

/// How long the old keeper may take to end its worker, clients' requests included.
const HANDOVER_LIMIT: Duration = Duration::from_secs(20);

/// How long the new worker may take to serve: it reads the metadata of everything that is mounted.
const TRIAL_LIMIT: Duration = Duration::from_secs(30);

/// Why nothing was taken over. The old daemon goes on.
#[derive(Debug, thiserror::Error)]
pub enum TakeoverError {
    /// There is nothing to take over.
    #[error("no daemon runs on {}", root.display())]
    NotRunning {
        /// The root directory.
        root: PathBuf,
    },
    /// This program could not serve here.
    #[error("the new program failed its check ({0}), the old one goes on; its log says why")]
    Check(ExitStatus),
    /// The new worker did not get to serve.
    #[error("the new worker did not serve ({0}), the old one goes on; its log says why")]
    Trial(String),
    /// The old keeper did not hand over.
    #[error("the running daemon did not hand over: {0}")]
    Refused(#[source] io::Error),
    /// The new keeper could not be made.
    #[error(transparent)]
    Keeper(#[from] KeeperError),
}

/// The old keeper's side.
pub(super) struct Successor {
    pub(super) channel: Channel,
}

impl Successor {
    pub(super) fn new(channel: Channel) -> Self {
        Successor { channel }
    }

    /// Sends everything. No worker may be left.
    pub(super) fn hand_over(&mut self, descriptors: &Descriptors) -> io::Result<()> {
        descriptors.send(&self.channel)?;
        self.channel.send(Kind::End, "", None)
    }

    /// Whether it has said that it goes on alone; to be asked when there is something to read.
    pub(super) fn is_done(&self) -> bool {
        matches!(self.channel.receive(), Ok(Some(Message { kind: Kind::Done, .. })))
    }
}

impl Keeper {
    /// Takes the daemon of `root` over with this program. Returns when it serves.
    pub fn succeed(root: &Path, programs: Programs) -> Result<Self, TakeoverError> {
        let failed =
            |path: &Path, error: io::Error| TakeoverError::Keeper(KeeperError::io(path)(error));
        let root = root.canonicalize().map_err(|error| failed(root, error))?;
        let old = dial(&root)?;
        let check = programs(Role::Check).status().map_err(|error| failed(&root, error))?;
        if !check.success() {
            return Err(TakeoverError::Check(check));
        }
        let descriptors = take_over(&old).map_err(TakeoverError::Refused)?;
        // This process and its workers write where the old ones did.
        if let Some(log) = descriptors.get(LOG) {
            rustix::stdio::dup2_stderr(log).map_err(|error| failed(&root, error.into()))?;
        }
        let mut keeper = Keeper::new(root, programs, descriptors)?;
        let worker = keeper.try_worker()?;
        old.send(Kind::Done, "", None).map_err(TakeoverError::Refused)?;
        worker.tell(Kind::Confirmed);
        keeper.take(worker);
        Ok(keeper)
    }

    /// A worker that serves, on trial; when it does not it is gone when this returns.
    fn try_worker(&mut self) -> Result<Worker, TakeoverError> {
        let spawned = self.spawn(true);
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
        loop {
            match worker.channel.receive_within(TRIAL_LIMIT)? {
                Some(Message { kind: Kind::Descriptor, text, descriptor: Some(descriptor) }) => {
                    self.hold(&text, descriptor);
                }
                Some(Message { kind: Kind::Release, text, .. }) => {
                    self.descriptors.remove(&text);
                }
                Some(Message { kind: Kind::Settled, .. }) => worker.settled = true,
                Some(Message { kind: Kind::Serving, .. }) => return Ok(()),
                Some(message) => return Err(unexpected(&message)),
                None => return Err(io::ErrorKind::UnexpectedEof.into()),
            }
        }
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
    ask().map_err(TakeoverError::Refused)
}

fn dial(root: &Path) -> Result<Channel, TakeoverError> {
    socket::dial(root).map(Channel::new).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
            TakeoverError::NotRunning { root: root.to_owned() }
        }
        _ => TakeoverError::Refused(error),
    })
}

fn take_over(old: &Channel) -> io::Result<Descriptors> {
    old.send(Kind::Takeover, "", None)?;
    let mut descriptors = Descriptors::default();
    loop {
        match old.receive_within(HANDOVER_LIMIT)? {
            Some(Message { kind: Kind::Descriptor, text, descriptor: Some(descriptor) }) => {
                descriptors.insert(text, descriptor);
            }
            Some(Message { kind: Kind::End, .. }) => return Ok(descriptors),
            Some(message) => return Err(unexpected(&message)),
            None => return Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}
