//! The daemon.

use std::time::Duration;

use anyhow::Result;
use indicatif::HumanDuration;
use lazuli_runtime::daemon::{Client, DaemonStatus, Status};

use super::{Node, Row};
use crate::{Session, daemon};

/// Seconds for which a death is worth a look: a day.
const NEWS: u64 = 24 * 60 * 60;

/// Asks the daemon, which is not started for it.
pub(crate) fn status(session: &Session) -> Result<Status> {
    daemon::status(&mut Client::connect(&session.root)?)
}

pub(super) fn daemon(node: &Node<'_>) -> Option<Row> {
    const CHECK: &str = "daemon";
    let status = match &node.status {
        Ok(status) => &status.daemon,
        Err(error) => return Some(Row::lacking(CHECK, error, "systemctl enable --now lazuli")),
    };
    let own = env!("CARGO_PKG_VERSION");
    if status.version != own {
        let found = format!("version {} runs, this program is {own}", status.version);
        return Some(Row::advice(CHECK, found, "systemctl reload lazuli"));
    }
    if let Some(found) = deaths(status) {
        return Some(Row::advice(CHECK, found, "journalctl -u lazuli"));
    }
    Some(Row::fine(CHECK, format!("version {} runs", status.version)))
}

/// Describes the deaths of workers, as long as the last death is recent.
fn deaths(status: &DaemonStatus) -> Option<String> {
    let DaemonStatus { restarts, last_exit, last_exit_seconds_ago, .. } = status;
    let (exit, ago) = (last_exit.as_ref()?, (*last_exit_seconds_ago)?);
    let ago_text = HumanDuration(Duration::from_secs(ago));
    (*restarts > 0 && ago < NEWS).then(|| {
        format!("{restarts} workers died since the daemon was started, the last one {ago_text} ago: {exit}")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_death_is_spoken_of_for_a_day() {
        let status = |restarts: u64, ago: Option<u64>| {
            let json = serde_json::json!({
                "keeper_pid": 1, "worker_pid": 2, "restarts": restarts, "last_exit": "killed",
                "last_exit_seconds_ago": ago, "version": "1", "root": "/", "uptime_seconds": 3,
                "driver": "fuse", "driver_reason": "", "cache":
                { "directory": "/", "blobs": 0, "bytes_used": 0 },
            });
            deaths(&serde_json::from_value(json).unwrap())
        };
        let said = status(2, Some(7200)).unwrap();
        assert!(said.contains("2 workers") && said.contains("2 hours ago: killed"), "{said}");
        assert_eq!(status(2, Some(NEWS)), None);
        assert_eq!(status(2, None), None, "before this version counted");
        assert_eq!(status(0, Some(1)), None, "it could not be started at first");
    }
}
