//! The node's daemon: one process serves every image of a root directory.
//!
//! ```text
//! ROOT/
//!   lock          held by the daemon
//!   daemon.sock   control socket, one JSON object per line
//!   cache/        see [`crate::cache`]
//!   images/       see [`crate::image`]
//!   erofs/        the EROFS mount of each image that the fanotify driver serves
//!   mounts/       what is mounted where
//! ```

mod api;
mod client;
mod error;
mod holders;
mod node;
mod record;
mod served;
mod server;
mod socket;

use std::{
    fs::{self, File, TryLockError},
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::{
    net::UnixListener,
    signal::unix::{SignalKind, signal},
    sync::watch,
};

pub use api::{
    CacheStatus, DaemonStatus, DriverChoice, MountRequest, MountStatus, Mounted, Request, Response,
    Status,
};
pub use client::{Client, ClientError};
pub use error::DaemonError;
use node::Node;

/// What the operator may set; `None` is the default.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// Stored bytes that are fetched around a miss.
    pub amplify: Option<u64>,
    /// How long a blocked reader waits for sources that fail before it gets EIO.
    pub deadline: Option<Duration>,
}

/// A daemon that has its root directory to itself.
#[derive(Debug)]
pub struct Daemon {
    node: Arc<Node>,
    listener: UnixListener,
    _lock: File,
}

impl Daemon {
    /// Takes the root directory, finds earlier mounts again, and listens.
    pub async fn open(root: &Path, settings: &Settings) -> Result<Self, DaemonError> {
        let io = |path: PathBuf| move |source| DaemonError::Io { path, source };
        fs::create_dir_all(root).map_err(io(root.to_owned()))?;
        let lock = lock(root).await?;
        let node = Arc::new(Node::open(root, settings)?);
        node.adopt().await?;
        let listen = || {
            let listener = socket::listen(root)?;
            listener.set_nonblocking(true)?;
            UnixListener::from_std(listener)
        };
        let listener = listen().map_err(io(root.join("daemon.sock")))?;
        tracing::info!(root = %root.display(), version = env!("CARGO_PKG_VERSION"), "listening");
        Ok(Daemon { node, listener, _lock: lock })
    }

    /// Serves until a client or a signal asks to stop. A signal stops as `stop --force` does: every
    /// mount is detached first, because a reader without a daemon would see holes.
    pub async fn serve(self) -> io::Result<()> {
        let (stop, _) = watch::channel(false);
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let Daemon { node, listener, _lock } = self;
        let signal = tokio::select! {
            result = server::serve(node.clone(), listener, &stop) => return result,
            _ = terminate.recv() => "SIGTERM",
            _ = interrupt.recv() => "SIGINT",
        };
        tracing::info!(signal, "ending");
        node.stop(true).await.map_err(io::Error::other)
    }
}

/// How long to wait for a daemon that is just ending.
const LOCK_PATIENCE: Duration = Duration::from_secs(2);

async fn lock(root: &Path) -> Result<File, DaemonError> {
    let path = root.join("lock");
    let started = Instant::now();
    let attempt = || File::create(&path).map(|lock| (lock.try_lock(), lock));
    loop {
        match attempt() {
            Ok((Ok(()), lock)) => return Ok(lock),
            Ok((Err(TryLockError::WouldBlock), _)) => {}
            Ok((Err(TryLockError::Error(source)), _)) | Err(source) => {
                return Err(DaemonError::Io { path, source });
            }
        }
        if started.elapsed() > LOCK_PATIENCE {
            return Err(DaemonError::Locked { root: root.to_owned() });
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
