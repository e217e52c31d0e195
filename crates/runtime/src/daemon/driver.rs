//! Which driver a mount gets.

use super::{DaemonError, DriverChoice, node::Node};

impl Node {
    /// What `--driver` means here.
    pub(super) fn choose(
        &self,
        wanted: DriverChoice,
    ) -> Result<(DriverChoice, String), DaemonError> {
        let (driver, works) = match wanted {
            DriverChoice::Auto => return Ok(self.default_driver()),
            DriverChoice::Fanotify => ("fanotify", &self.probe.fanotify),
            DriverChoice::Fuse => ("fuse", &self.probe.fuse),
        };
        match works {
            Ok(()) => Ok((wanted, "asked for".to_owned())),
            Err(reason) => Err(DaemonError::Driver { driver, reason: reason.clone() }),
        }
    }

    pub(super) fn default_driver(&self) -> (DriverChoice, String) {
        match &self.probe.fanotify {
            Ok(()) => {
                let reason = "this kernel has pre-content events and file-backed EROFS mounts";
                let buffered = self.probe.direct_reads.as_ref().err();
                let buffered = buffered
                    .map_or_else(String::new, |why| format!("; reads stay buffered: {why}"));
                (DriverChoice::Fanotify, format!("{reason}{buffered}"))
            }
            Err(reason) => (DriverChoice::Fuse, format!("fanotify does not work: {reason}")),
        }
    }
}
