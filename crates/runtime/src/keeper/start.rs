//! Starts a keeper: the first one of a root directory, or one for a worker whose keeper died.

use std::{
    fs::{DirBuilder, File, TryLockError},
    io,
    os::unix::{fs::DirBuilderExt as _, net::UnixStream},
    path::{Path, PathBuf},
};

use lazuli_sys::path_error::At as _;
use signal_hook::consts::{SIGINT, SIGTERM};

use super::{
    descriptors::Descriptors,
    error::{KeeperError, ROOT_LIMIT},
    handover::receive_all,
    history::{History, TOGETHER},
    names::{LISTENER, LOCK, LOG},
    programs::Programs,
    restarts::Restarts,
    service::Service,
    socket,
    supervisor::Keeper,
    wire::{Channel, Kind},
    worker::Worker,
};

impl Keeper {
    /// Locks the root directory, and takes descriptors that an earlier process of this service left
    /// with systemd.
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
        // systemd lists the latest first.
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
        keeper.history.begin();
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

    /// Takes over a worker whose keeper died; it waits at the other end of standard input.
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
        keeper.history.keeper_died();
        // If the worker died meanwhile, this keeper continues without it.
        if whole && let Ok(worker) = Worker::adopt(channel, pid) {
            let info = keeper.info(Some(worker.pid)).to_json();
            if let Err(error) = worker.channel.send(Kind::Keeper, &info, None) {
                tracing::warn!(%error, "the worker is gone");
            }
            keeper.worker = Some(worker);
            keeper.service.ready();
        } else {
            keeper.history.worker_died(TOGETHER.to_owned());
        }
        Ok(keeper)
    }

    pub(super) fn new(
        root: PathBuf,
        programs: Programs,
        descriptors: Descriptors,
    ) -> Result<Self, KeeperError> {
        // One descriptor for every blob in use; the worker reports when they don't suffice.
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
            history: History::of(&root),
            root,
            programs,
            descriptors,
            service: Service::find(),
            worker: None,
            successor: None,
            restarts: Restarts::default(),
            stopping: false,
            awake: true,
        })
    }
}
