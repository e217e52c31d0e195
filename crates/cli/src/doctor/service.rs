//! The daemon.

use anyhow::Result;
use lazuli_runtime::daemon::{Client, Status};

use super::{Node, Row};
use crate::{Session, daemon};

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
    if let Some(exit) = status.last_exit.as_ref().filter(|_| status.restarts > 0) {
        let found = format!("{} workers died; the last one: {exit}", status.restarts);
        return Some(Row::advice(CHECK, found, "journalctl -u lazuli"));
    }
    Some(Row::fine(CHECK, format!("version {} runs", status.version)))
}
