//! The kernel drivers of a node: which of them work, and which one a mount gets.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use tokio::sync::OnceCell;

use super::{DaemonError, DriverChoice};
use crate::{
    keeper::Link,
    kernel::{
        Probe, ext4, fanotify, loop_devices,
        mount::{Backing, Format},
    },
};

/// Whether to try the fanotify driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fanotify {
    /// A worker before this one uses it.
    Proven,
    /// Nothing is known.
    Untried,
}

/// The drivers, and the keeper that holds their descriptors.
#[derive(Debug)]
pub(super) struct Drivers {
    pub(super) probe: Probe,
    pub(super) link: Arc<Link>,
    pub(super) fanotify: Option<Arc<fanotify::Session>>,
    /// See [`Drivers::start_disks`].
    pub(super) disks: OnceCell<Result<Arc<loop_devices::Session>, String>>,
    /// Whether the driver `loop` works.
    erofs_on_disks: OnceCell<Result<(), String>>,
    /// Whether the driver `ext4` works.
    ext4_on_disks: OnceCell<Result<(), String>>,
    /// The cache's directory, where drivers are tried.
    directory: PathBuf,
}

impl Drivers {
    /// Finds out which drivers work. `direct_io` overrules what is known of this kernel's direct
    /// reads.
    pub(super) fn new(
        directory: PathBuf,
        link: Arc<Link>,
        fanotify: Fanotify,
        direct_io: Option<bool>,
    ) -> Self {
        let mut probe = match fanotify {
            Fanotify::Proven => Probe::of_successor(),
            Fanotify::Untried => Probe::run(&directory),
        };
        match direct_io {
            Some(true) => probe.direct_reads = Ok(()),
            Some(false) => {
                probe.direct_reads = Err("the configuration forbids direct reads".into())
            }
            None => {}
        }
        Drivers {
            probe,
            link,
            fanotify: None,
            disks: OnceCell::new(),
            erofs_on_disks: OnceCell::new(),
            ext4_on_disks: OnceCell::new(),
            directory,
        }
    }

    /// Starts a fanotify session, if this machine supports it. No event is answered before
    /// [`Node::answer`](super::Node::answer): missing chunks show which pages the kernel may have
    /// read from holes, so no chunk may arrive before these pages are gone.
    pub(super) fn start_fanotify(&mut self) {
        if self.probe.fanotify.is_err() {
            return;
        }
        match fanotify::Session::start(&self.link) {
            Ok(session) => self.fanotify = Some(session),
            Err(error) => self.probe.fanotify = Err(error.to_string()),
        }
    }

    /// Resolves `--driver` on this machine.
    pub(super) async fn choose(
        &self,
        wanted: DriverChoice,
    ) -> Result<(DriverChoice, String), DaemonError> {
        let (driver, works) = match wanted {
            DriverChoice::Auto => return Ok(self.default_driver()),
            DriverChoice::Fanotify => ("fanotify", self.probe.fanotify.as_ref().err()),
            DriverChoice::Loop => ("loop", self.try_loop().await.as_ref().err()),
            DriverChoice::Ext4 => ("ext4", self.try_ext4().await.as_ref().err()),
            DriverChoice::Fuse => ("fuse", self.probe.fuse.as_ref().err()),
            DriverChoice::Disks => ("disks", self.probe.fuse.as_ref().err()),
        };
        match works {
            None => Ok((wanted, "asked for".to_owned())),
            Some(reason) => Err(DaemonError::Driver { driver, reason: reason.clone() }),
        }
    }

    /// The best driver that works here, and why it is not a better one.
    pub(super) fn default_driver(&self) -> (DriverChoice, String) {
        let fanotify = match &self.probe.fanotify {
            Ok(()) => {
                let reason = "this kernel has pre-content events and file-backed EROFS mounts";
                let buffered = self.probe.direct_reads.as_ref().err();
                let buffered = buffered
                    .map_or_else(String::new, |why| format!("; reads stay buffered: {why}"));
                return (DriverChoice::Fanotify, format!("{reason}{buffered}"));
            }
            Err(reason) => format!("fanotify does not work: {reason}"),
        };
        let loops = match self.erofs_on_disks.get() {
            Some(Ok(())) => return (DriverChoice::Loop, fanotify),
            Some(Err(reason)) => format!("{fanotify}; loop does not work: {reason}"),
            None => return (DriverChoice::Fuse, fanotify),
        };
        match self.ext4_on_disks.get() {
            Some(Ok(())) => (DriverChoice::Ext4, loops),
            Some(Err(reason)) => {
                (DriverChoice::Fuse, format!("{loops}; ext4 does not work: {reason}"))
            }
            None => (DriverChoice::Fuse, loops),
        }
    }

    /// The driver for an image that `driver` refused with `error`, and why it is that one.
    pub(super) async fn instead_of(
        &self,
        driver: DriverChoice,
        error: &io::Error,
    ) -> (DriverChoice, String) {
        match driver {
            DriverChoice::Loop => {
                let next = match self.try_ext4().await {
                    Ok(()) => DriverChoice::Ext4,
                    Err(_) => DriverChoice::Fuse,
                };
                (next, format!("loop is not for this image: {error}"))
            }
            _ => (DriverChoice::Fuse, format!("ext4 cannot hold this image: {error}")),
        }
    }

    /// Finds out about the drivers that [`Drivers::default_driver`] may have to fall back to. The
    /// results are remembered.
    pub(super) async fn find_default(&self) {
        if self.probe.fanotify.is_err() && self.try_loop().await.is_err() {
            let _ = self.try_ext4().await;
        }
    }

    /// Notes that the driver of this file system works: a worker before this one used it.
    pub(super) fn proven(&self, backing: &Backing) {
        let driver = match backing.format() {
            Format::Ext4 => &self.ext4_on_disks,
            Format::Erofs => &self.erofs_on_disks,
        };
        let _ = driver.set(Ok(()));
    }

    /// Tries the driver `loop` on the first call; the error is the reason why it does not work.
    async fn try_loop(&self) -> &Result<(), String> {
        self.erofs_on_disks.get_or_init(|| self.try_on_disks(loop_devices::probe::run)).await
    }

    /// The same for the driver `ext4`.
    async fn try_ext4(&self) -> &Result<(), String> {
        self.ext4_on_disks.get_or_init(|| self.try_on_disks(ext4::probe::run)).await
    }

    async fn try_on_disks(
        &self,
        probe: fn(&loop_devices::Session, &Path) -> Result<(), String>,
    ) -> Result<(), String> {
        let session = self.start_disks().await?;
        let directory = self.directory.clone();
        let tried = tokio::task::spawn_blocking(move || probe(&session, &directory)).await;
        tried.unwrap_or_else(|error| Err(error.to_string()))
    }

    /// The session of the drivers `loop` and `ext4`, which is started on the first call; the error
    /// is the reason why there is none.
    async fn start_disks(&self) -> Result<Arc<loop_devices::Session>, String> {
        let start = async {
            let link = self.link.clone();
            let runtime = tokio::runtime::Handle::current();
            let started = tokio::task::spawn_blocking(move || {
                let _runtime = runtime.enter();
                loop_devices::Session::start(&link).map_err(|error| error.to_string())
            });
            started.await.unwrap_or_else(|error| Err(error.to_string()))
        };
        self.disks.get_or_init(|| start).await.clone()
    }
}
