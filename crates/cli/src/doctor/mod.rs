//! Diagnoses the node: abilities, faults, and the commands that repair them.
//!
//! A check examines one aspect of the node and makes a row. Checks only read; those that ask
//! another process have a deadline.

pub(crate) mod containerd;
mod disk;
mod dragonfly;
mod kernel;
mod metrics;
mod mirror;
mod policy;
pub(crate) mod service;

use lazuli_runtime::daemon::Status;
use serde::Serialize;

use crate::{Session, config::Snapshotter};

/// The finding of a check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Row {
    /// The name of the check.
    pub(crate) check: &'static str,
    /// Whether the finding is good.
    pub(crate) verdict: Verdict,
    /// The finding, for people.
    pub(crate) found: String,
    /// The remedy, if the finding is bad: a command, or a change of a file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) fix: Option<String>,
}

/// How a row is to be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Verdict {
    /// Nothing is to be done.
    Fine,
    /// Containers start; something would be better otherwise.
    Advice,
    /// Images do not start lazily until it is mended.
    Lacking,
}

impl Row {
    fn fine(check: &'static str, found: impl Into<String>) -> Self {
        Row { check, verdict: Verdict::Fine, found: found.into(), fix: None }
    }

    fn advice(check: &'static str, found: impl Into<String>, fix: impl Into<String>) -> Self {
        Row { check, verdict: Verdict::Advice, found: found.into(), fix: Some(fix.into()) }
    }

    fn lacking(check: &'static str, found: impl Into<String>, fix: impl Into<String>) -> Self {
        Row { check, verdict: Verdict::Lacking, found: found.into(), fix: Some(fix.into()) }
    }
}

/// The input of checks.
pub(crate) struct Node<'a> {
    session: &'a Session,
    /// The daemon's status, or the reason why it gives none.
    status: Result<Status, String>,
    /// containerd's state, or the reason why it gives none.
    containerd: Result<containerd::Running, String>,
}

/// A check. `None` if its subject is not set up and need not be.
type Check = fn(&Node<'_>) -> Option<Row>;

/// In the order of dependencies.
const CHECKS: &[(&str, Check)] = &[
    ("daemon", service::daemon),
    ("kernel", kernel::driver),
    ("file-system", disk::file_system),
    ("disk", disk::room),
    ("containerd", containerd::connection),
    ("plugin", containerd::plugin),
    ("pods", containerd::pods),
    ("annotations", containerd::annotations),
    ("statistics", containerd::statistics),
    ("cgroups", containerd::cgroups),
    ("user-namespaces", containerd::user_namespaces),
    ("mirror", mirror::listening),
    ("hosts", mirror::hosts),
    ("certificates", mirror::certificates),
    ("metrics", metrics::serving),
    ("dragonfly", dragonfly::proxy),
    ("policy", policy::rules),
];

/// The names of all checks.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    CHECKS.iter().map(|(name, _)| *name)
}

impl<'a> Node<'a> {
    /// Asks the daemon, and containerd at `socket`.
    pub(crate) fn look(session: &'a Session, socket: &std::path::Path) -> Self {
        let status = service::status(session).map_err(|error| format!("{error:#}"));
        let ours = session.config.snapshotter.as_ref().map(|table| table.address.clone());
        let ours = ours.unwrap_or_else(|| Snapshotter::default().address);
        let containerd = containerd::Running::ask(socket, &ours);
        let containerd = containerd.map_err(|error| format!("{error:#}"));
        Node { session, status, containerd }
    }

    /// Runs the checks in `wanted`, or all if it is empty.
    pub(crate) fn examine(&self, wanted: &[String]) -> Vec<Row> {
        let is_wanted = |name: &str| wanted.is_empty() || wanted.iter().any(|one| one == name);
        let checks = CHECKS.iter().filter(|(name, _)| is_wanted(name));
        checks.filter_map(|(_, check)| check(self)).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn session(root: &std::path::Path) -> Session {
        Session { root: root.to_owned(), config: Default::default(), config_path: None, log: None }
    }

    #[test]
    fn a_node_without_daemon_and_containerd_lacks_both() {
        let root = tempfile::tempdir().unwrap();
        let session = session(root.path());
        let node = Node::look(&session, &root.path().join("containerd.sock"));
        let rows = node.examine(&[]);
        let lacking: Vec<_> = rows.iter().filter(|row| row.verdict == Verdict::Lacking).collect();
        let names: Vec<_> = lacking.iter().map(|row| row.check).collect();
        assert_eq!(names, ["daemon", "containerd"], "{rows:#?}");
        assert!(lacking.iter().all(|row| row.fix.is_some()));
        let one = node.examine(&["disk".to_owned()]);
        assert_eq!(one.iter().map(|row| row.check).collect::<Vec<_>>(), ["disk"]);
    }

    #[test]
    fn rows_have_the_names_of_their_checks() {
        let names: HashSet<_> = names().collect();
        assert_eq!(names.len(), CHECKS.len());
        let root = tempfile::tempdir().unwrap();
        let session = session(root.path());
        let node = Node::look(&session, &root.path().join("containerd.sock"));
        for (name, check) in CHECKS {
            assert!(check(&node).is_none_or(|row| row.check == *name), "{name}");
        }
    }
}
