//! The kernel drivers of a node: which of them work, and which one a mount gets.

use std::{path::PathBuf, sync::Arc};

use tokio::sync::OnceCell;

use super::{DaemonError, DriverChoice};
use crate::{
    keeper::Link,
    kernel::{Probe, fanotify, loop_devices},
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
    /// See [`Drivers::start_loops`].
    pub(super) loops: OnceCell<Result<Arc<loop_devices::Session>, String>>,
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
        Drivers { probe, link, fanotify: None, loops: OnceCell::new(), directory }
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
        let loops;
        let (driver, works) = match wanted {
            DriverChoice::Auto => return Ok(self.default_driver()),
            DriverChoice::Fanotify => ("fanotify", self.probe.fanotify.as_ref().err()),
            DriverChoice::Loop => {
                loops = self.start_loops().await;
                ("loop", loops.as_ref().err())
            }
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
        match self.loops.get() {
            Some(Ok(_)) => (DriverChoice::Loop, fanotify),
            Some(Err(reason)) => {
                (DriverChoice::Fuse, format!("{fanotify}; loop does not work: {reason}"))
            }
            None => (DriverChoice::Fuse, fanotify),
        }
    }

    /// Finds out about the drivers that [`Drivers::default_driver`] may have to fall back to.
    pub(super) async fn find_default(&self) {
        if self.probe.fanotify.is_err() {
            // The result is remembered.
            let _ = self.start_loops().await;
        }
    }

    /// The session of the driver `loop`, which is started and tested on the first call; the error
    /// is the reason why there is none.
    pub(super) async fn start_loops(&self) -> Result<Arc<loop_devices::Session>, String> {
        let start = async {
            let link = self.link.clone();
            let directory = self.directory.clone();
            let runtime = tokio::runtime::Handle::current();
            let tried = tokio::task::spawn_blocking(move || {
                let _runtime = runtime.enter();
                let session =
                    loop_devices::Session::start(&link).map_err(|error| error.to_string())?;
                loop_devices::probe::run(&session, &directory)?;
                Ok(session)
            });
            tried.await.unwrap_or_else(|error| Err(error.to_string()))
        };
        self.loops.get_or_init(|| start).await.clone()
    }
}
