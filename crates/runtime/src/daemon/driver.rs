//! Chooses the driver of a mount.

use std::sync::Arc;

use super::{DaemonError, DriverChoice, node::Node};
use crate::kernel::loop_devices;

impl Node {
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
                loops = self.loops().await;
                ("loop", loops.as_ref().err())
            }
            DriverChoice::Fuse => ("fuse", self.probe.fuse.as_ref().err()),
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

    /// Finds out about the drivers that [`Node::default_driver`] may have to fall back to.
    pub(super) async fn find_default(&self) {
        if self.probe.fanotify.is_err() {
            // The result is remembered.
            let _ = self.loops().await;
        }
    }

    /// The session of the driver `loop`, which is started and tested on the first call; the error
    /// is the reason why there is none.
    pub(super) async fn loops(&self) -> Result<Arc<loop_devices::Session>, String> {
        let start = async {
            let link = self.link.clone();
            let directory = self.root.join("cache");
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
