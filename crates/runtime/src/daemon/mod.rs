//! The node's daemon: one process serves every image of a root directory.
//!
//! ```text
//! ROOT/
//!   lock          held by the daemon
//!   daemon.sock   control socket, one JSON object per line
//!   cache/        see [`crate::cache`]
//!   images/       see [`crate::image`]
//!   mounts/       what is mounted where
//! ```

mod api;
mod client;
mod error;
mod holders;
mod lingering;
mod node;
mod record;
mod served;
mod server;
mod socket;

use std::{
    fs::{DirBuilder, File, TryLockError},
    io,
    os::unix::fs::DirBuilderExt,
    path::Path,
    sync::Arc,
    time::Duration,
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

/// Most bytes of a root directory's path. fsconfig(2) takes strings of 255 bytes, and the longest one below the
/// root is `/images/<64 digits>/bootstrap`.
const ROOT_LIMIT: usize = 255 - 82;

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
        let io = |path: &Path| {
            let path = path.to_owned();
            move |source| DaemonError::Io { path, source }
        };
        // Nobody else may reach set-user-id programs of images or containers below it, nor the socket.
        let created = DirBuilder::new().recursive(true).mode(0o700).create(root);
        created.map_err(io(root))?;
        // The kernel shows mounts by their real paths.
        let root = root.canonicalize().map_err(io(root))?;
        if root.as_os_str().len() > ROOT_LIMIT {
            return Err(DaemonError::RootTooLong { root, limit: ROOT_LIMIT });
        }
        let lock = root.join("lock");
        let file = File::create(&lock).map_err(io(&lock))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(DaemonError::Locked { root }),
            Err(TryLockError::Error(error)) => return Err(io(&lock)(error)),
        }
        let node = Arc::new(Node::open(&root, settings)?);
        node.adopt().await?;
        let listen = || {
            let listener = socket::listen(&root)?;
            listener.set_nonblocking(true)?;
            UnixListener::from_std(listener)
        };
        let listener = listen().map_err(io(&root.join("daemon.sock")))?;
        tracing::info!(root = %root.display(), version = env!("CARGO_PKG_VERSION"), "listening");
        Ok(Daemon { node, listener, _lock: file })
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
