//! The node's daemon: a [keeper](crate::keeper) and its worker, which serves every image of a root
//! directory.
//!
//! ```text
//! ROOT/
//!   lock          held by the daemon
//!   helper.lock   held by the worker's helper, if it has one
//!   history.json  how often its processes died or were replaced
//!   keeper.sock   where a successor of the keeper asks for everything
//!   daemon.sock   control socket, one JSON object per line
//!   cache/        see [`crate::cache`]
//!   images/       see [`crate::image`]
//!   indexes/      what is known of unconverted layers
//!   mounts/       what is mounted where
//!   filesystems/  EROFS file systems that live, mounted or not
//!   traces/       what starts of images read
//!   logins/       pull secrets of mounts
//!   layers/       layers that podman has found, and their mounts
//!   snapshots/    what the snapshot service keeps, if containerd is served
//!   mirror/       certificates of the mirror, and what it answers while a registry is away
//!   verdicts/     which images may run, by the policy in force
//!   bundle/       images that the node was delivered with; the daemon only reads it
//! ```
//!
//! The modules, from a request to its answer:
//!
//! ```text
//! control      the control socket; `api` has its messages
//! images       requests from other parts of the worker: snapshots, pulls
//! admission    from a name to an image that may run
//! mounts       making, ending and taking over mounts
//! served       images while they are mounted: their blobs and routes
//! filesystems  their EROFS file systems and FUSE connections in the kernel
//! ordinary     images that clients do not unpack
//! layer_store  where podman finds layers of these
//! background   prefetch on request, scrub, and what removed images leave
//! status       `lazuli status`, measurements, failed reads
//! ```

mod admission;
mod api;
mod background;
mod control;
mod drivers;
mod error;
mod filesystems;
mod images;
mod layer_store;
mod lifecycle;
mod mounts;
mod node;
mod ordinary;
mod record;
mod served;
mod shutdown;
mod status;

use std::{
    io,
    net::SocketAddr,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use lazuli_sys::{mountinfo, path_error::At as _};
use tokio::{
    net::{TcpListener, UnixListener},
    signal::unix::{SignalKind, signal},
    sync::{mpsc::UnboundedReceiver, watch},
};

pub use api::{
    CacheStatus, DaemonStatus, DriverChoice, FailedReadStatus, MirrorStatus, MountRequest,
    MountStatus, Mounted, PrefetchRequest, PrefetchStatus, Request, Response, ScrubBlob, ScrubPlan,
    ScrubStep, ScrubbedChunk, ServerStatus, SnapshotStatus, SnapshotsStatus, Status, UnusedBlob,
};
use background::leftovers;
pub use control::client::{Client, ClientError};
use control::{server, socket};
use drivers::Fanotify;
pub use error::DaemonError;
use filesystems::stale_pages::Gap;
pub use images::Images;
use layer_store::serve::Leftover;
pub use layer_store::state::LayerStoreSettings;
use mounts::adopt;
use node::Node;
pub use ordinary::{
    bundle::{BUNDLE_DIRECTORY, index_bundled_layer},
    layers::CoveredLayers,
    state::IndexSettings,
};
use served::refresh_routes;
pub use shutdown::Stop;
#[cfg(fuzzing)]
pub use status::container::fuzz as container_groups;
use status::failed_reads;
pub use status::{
    measurements::Measurements,
    occupied::Occupied,
    parts::{Explain, MirrorActivity},
};

use crate::{
    cache::KeepFree,
    image::StoredImage,
    keeper::{
        Given, Link, Order,
        names::{CONTROL, GROUP, MIRROR, SNAPSHOTS},
    },
    kernel::{
        Probe,
        fanotify::{Handover, Journal, Session, Unanswered, most_unanswered},
        fuse,
    },
};

/// The operator's settings; `None` is the default.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// Stored bytes that are fetched around a miss.
    pub amplify: Option<u64>,
    /// How long a blocked reader waits for sources that fail before it gets EIO.
    pub deadline: Option<Duration>,
    /// Bytes on the disk that the cache may take.
    pub max_bytes: Option<u64>,
    /// Whether the fanotify driver may read blobs directly; `None` goes by the kernel's release.
    pub direct_io: Option<bool>,
    /// Space that blobs without an image leave free on the disk.
    pub keep_free: Option<KeepFree>,
    /// How registries are reached, with their mirrors.
    pub registry: lazuli_registry::Options,
    /// The path of the Unix socket for containerd's requests, if they are served.
    pub snapshots: Option<PathBuf>,
    /// The address of the node's mirror, if it has one.
    pub mirror: Option<SocketAddr>,
    /// Where podman finds layers, if they are served.
    pub layers: Option<LayerStoreSettings>,
    /// What to fetch ahead of readers.
    pub prefetch: crate::prefetch::Settings,
    /// How to handle indexes that the node makes of ordinary images.
    pub index: IndexSettings,
    /// Images that are fetched whole when the daemon starts.
    pub images: Vec<String>,
    /// The policy file, see [`lazuli_policy::Gate`].
    pub policy: Option<PathBuf>,
}

/// Time limit for clients' requests in progress when another worker takes over.
const QUIESCE: Duration = Duration::from_secs(5);

/// The journal of the previous worker, and its unanswered events.
type Left = (Journal, Vec<Unanswered>);

/// The worker: everything but holding descriptors.
#[derive(Debug)]
pub struct Worker {
    node: Arc<Node>,
    listener: UnixListener,
    snapshots: Option<UnixListener>,
    mirror: Option<TcpListener>,
    link: Arc<Link>,
    orders: UnboundedReceiver<Order>,
}

/// How a worker ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// Nothing is mounted any more.
    Stopped,
    /// Another worker has taken over. The process must exit at once, without any clean-up.
    Left,
}

impl Worker {
    /// Meets the keeper, which waits at standard input. To be called before the process opens
    /// anything.
    pub fn enter() -> io::Result<(Arc<Link>, Given<Left>)> {
        Link::enter(|journal| Journal::open(journal, most_unanswered()))
    }

    /// Finds earlier mounts again, and answers all readers that wait.
    ///
    /// # Errors
    /// The process has to exit then, and the keeper starts another one.
    pub async fn open(
        root: &Path,
        settings: &Settings,
        link: Arc<Link>,
        given: Given<Left>,
    ) -> Result<Self, DaemonError> {
        let root = root.canonicalize().at(root)?;
        let Given { journal, mut descriptors, orders } = given;
        let group = descriptors.remove(GROUP);
        let groups = descriptors.remove_all(GROUP);
        let (gap, fanotify) = match group {
            Some(_) => (Gap::None, Fanotify::Proven),
            None => (Gap::Unheard, Fanotify::Untried),
        };
        let mut node = Node::open(&root, settings, link.clone(), fanotify)?;
        let mut left = Vec::new();
        if let Some(group) = group {
            let resume = || {
                let (journal, unanswered) = match journal {
                    Some(left) => left,
                    // The keeper got no further. Everything that was read will be denied.
                    None => (Journal::create()?, Vec::new()),
                };
                io::Result::Ok(Session::resume(
                    &link,
                    Handover { group, groups, journal, unanswered },
                )?)
            };
            let (session, unanswered) = resume().at(root.join("cache"))?;
            node.drivers.fanotify = Some(session);
            left = unanswered;
        } else {
            node.drivers.start_fanotify();
        }
        let control = descriptors.remove(CONTROL);
        let snapshots = descriptors.remove(SNAPSHOTS);
        let mirror = descriptors.remove(MIRROR);
        let layers = Leftover::find(&mut descriptors, &link);
        let node = Arc::new(node);
        // Marks, connections and mounts go when `stop` takes them away, and never because something
        // went out of scope: not when a part of this fails, and not in a panic.
        std::mem::forget(node.clone());
        let adoption = node.adopt(descriptors, gap).await?;
        node.drivers.find_default().await;
        let wrong = node.refuse_wrong().await;
        node.answer(adoption, left).await?;
        node.cache.start_evicting();
        for image in node.images.all().await {
            if image.is_first_start() {
                node.prefetcher.resume(image.weak_blobs());
            }
        }
        settings.images.iter().for_each(|image| node.preload(image.clone()));
        tokio::spawn(leftovers::clear(Arc::downgrade(&node)));
        if let Some(reads) = node.cache.failed_reads() {
            tokio::spawn(failed_reads::log(Arc::downgrade(&node), reads));
        }
        tokio::spawn(ordinary::restore_layer::keep_checking(Arc::downgrade(&node), wrong));
        tokio::spawn(ordinary::whole_file::keep_checking(Arc::downgrade(&node)));
        tokio::spawn(ordinary::index_unpacked::keep_indexing(Arc::downgrade(&node)));
        tokio::spawn(refresh_routes::keep_current(Arc::downgrade(&node)));
        node.serve_layers(layers).await;
        let path = root.join("daemon.sock");
        let listener = listen(&root, control, &link).at(&path)?;
        let snapshots = listen_for_containerd(settings.snapshots.as_deref(), snapshots, &link);
        let mirror = listen_for_pulls(settings.mirror, mirror, &link);
        link.serving();
        tracing::info!(root = %root.display(), version = env!("CARGO_PKG_VERSION"), "serving");
        Ok(Worker { node, listener, snapshots, mirror, link, orders })
    }

    /// The images that this worker serves, for other parts of its process.
    pub fn images(&self) -> Images {
        Images(self.node.clone())
    }

    /// Returns the socket for containerd's requests, once; see [`Settings::snapshots`].
    pub fn snapshots(&mut self) -> Option<UnixListener> {
        self.snapshots.take()
    }

    /// Returns the socket for clients of the mirror, once; see [`Settings::mirror`].
    pub fn mirror(&mut self) -> Option<TcpListener> {
        self.mirror.take()
    }

    /// Serves until a client, a signal or the keeper stops it. Signals act like `stop --force`:
    /// every mount is detached first, because a reader without a daemon would see holes.
    pub async fn serve(self) -> io::Result<Ended> {
        let (stop, _) = watch::channel(false);
        let mut terminate = signal(SignalKind::terminate())?;
        let Worker { node, listener, link, mut orders, snapshots: _, mirror: _ } = self;
        let mut server = tokio::spawn(server::serve(node.clone(), listener, stop));
        let why = tokio::select! {
            result = &mut server => {
                link.stopped();
                return result.map_err(io::Error::other)?.map(|()| Ended::Stopped);
            }
            _ = terminate.recv() => "SIGTERM",
            order = orders.recv() => match order {
                Some(Order::Leave) => {
                    tracing::info!("leaving for a successor");
                    node.lifecycle.quiesce(QUIESCE).await;
                    return Ok(Ended::Left);
                }
                Some(Order::Stop) | None => "the keeper",
            },
        };
        tracing::info!(why, "ending");
        node.stop(Stop::Forced).await.map_err(io::Error::other)?;
        link.stopped();
        Ok(Ended::Stopped)
    }
}

/// The control socket: the one where clients wait, or a new one.
fn listen(root: &Path, control: Option<OwnedFd>, link: &Arc<Link>) -> io::Result<UnixListener> {
    let listener = match control {
        Some(control) => control.into(),
        None => socket::listen(root)?,
    };
    hold_open(CONTROL, listener, link)
}

/// The socket of the snapshot service, if there is to be one. Without it readers are served all the
/// same.
fn listen_for_containerd(
    address: Option<&Path>,
    given: Option<OwnedFd>,
    link: &Arc<Link>,
) -> Option<UnixListener> {
    let Some(address) = address else {
        if given.is_some() {
            link.release(SNAPSHOTS);
        }
        return None;
    };
    let given = given.map(Into::into).filter(|given| socket::is_at(given, address));
    let listening = given
        .map_or_else(|| socket::listen_at(address), Ok)
        .and_then(|listener| hold_open(SNAPSHOTS, listener, link));
    let failed = |error: &io::Error| {
        tracing::error!(address = %address.display(), %error, "containerd is not served");
    };
    listening.inspect_err(failed).ok()
}

/// The mirror's socket, if a mirror is configured: systemd's, the previous worker's, or a new one.
/// Without it, clients pull from the registry.
fn listen_for_pulls(
    address: Option<SocketAddr>,
    given: Option<OwnedFd>,
    link: &Arc<Link>,
) -> Option<TcpListener> {
    let given = given.map(std::net::TcpListener::from);
    let is_there = |listener: &std::net::TcpListener| listener.local_addr().ok() == address;
    let given = match given {
        Some(given) if is_there(&given) => Some(given),
        Some(_) => {
            link.release(MIRROR);
            None
        }
        None => None,
    };
    let address = address?;
    let listening = given.map_or_else(|| socket::listen_on(address), Ok);
    let held = listening.and_then(|listener| {
        listener.set_nonblocking(true)?;
        std::mem::forget(link.hold(MIRROR.to_owned(), Arc::new(listener.try_clone()?)));
        TcpListener::from_std(listener)
    });
    let failed = |error: &io::Error| {
        tracing::error!(%address, %error, "there is no mirror: pulls go to registries");
    };
    held.inspect_err(failed).ok()
}

/// Keeps a socket for good: clients wait there also while no worker lives.
fn hold_open(
    name: &str,
    listener: std::os::unix::net::UnixListener,
    link: &Arc<Link>,
) -> io::Result<UnixListener> {
    listener.set_nonblocking(true)?;
    std::mem::forget(link.hold(name.to_owned(), Arc::new(listener.try_clone()?)));
    UnixListener::from_std(listener)
}

/// The permitted effect of a takeover on readers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readers {
    /// None: it is refused if a mount cannot be taken over.
    Keep,
    /// Their mounts may end, and reads fail.
    End,
}

/// Checks whether this program could serve `root`: whether it can read the records there, and which
/// drivers work. To keep `readers`, it must also be able to take over every mount. Changes nothing.
pub fn check(root: &Path, readers: Readers) -> Result<(), DaemonError> {
    let images = root.join("images");
    let records = record::recorded_mounts(root)?;
    for record in &records {
        StoredImage::open(&images.join(record.manifest_digest.hex()))?;
    }
    let mounts = mountinfo::list().at(root)?;
    let mountpoints = adopt::without_journal(&records, &mounts);
    if readers == Readers::Keep && !mountpoints.is_empty() && !fuse::can_resend().unwrap_or(false) {
        return Err(DaemonError::WouldEnd { mountpoints });
    }
    let cache = root.join("cache");
    std::fs::create_dir_all(&cache).at(&cache)?;
    let probe = Probe::run(&cache);
    match (&probe.fanotify, &probe.fuse) {
        (Err(fanotify), Err(fuse)) => {
            let reason = format!("fanotify: {fanotify}; fuse: {fuse}");
            Err(DaemonError::Driver { driver: "auto", reason })
        }
        _ => Ok(()),
    }
}
