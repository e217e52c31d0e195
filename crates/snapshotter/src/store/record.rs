//! The record of one snapshot.

use std::time::SystemTime;

use redb::{ReadableTable, Table};
use serde::{Deserialize, Serialize};

use super::Result;
use crate::{Image, SnapshotError, label::Labels};

/// The kind of a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Kind {
    /// Read-only.
    View,
    /// Writable; can be committed.
    Active,
    /// Immutable; can be the parent of others.
    Committed,
}

/// Room that a snapshot takes beyond its parents.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Usage {
    /// Bytes on the disk.
    pub(crate) size: u64,
    /// Files, directories and so on.
    pub(crate) inodes: u64,
}

/// One snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Snapshot {
    /// Its directory; never given to another one.
    pub(crate) number: u64,
    pub(crate) name: String,
    pub(crate) parent: Option<String>,
    pub(crate) kind: Kind,
    pub(crate) labels: Labels,
    pub(crate) created: SystemTime,
    pub(crate) updated: SystemTime,
    /// The usage of a committed snapshot.
    #[serde(default)]
    pub(crate) usage: Usage,
    /// The lazy image that is mounted in its directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) image: Option<Image>,
    /// Whether the image was proven to match the snapshot's name. False for snapshots that an
    /// earlier version committed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) proven: bool,
    /// The name that it had before it was committed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) key: Option<String>,
}

impl Snapshot {
    /// Returns whether this is a data layer of a lazy image: only those are created as committed
    /// snapshots.
    pub(crate) fn is_data(&self) -> bool {
        self.kind == Kind::Committed && self.image.is_none() && self.key.is_none()
    }
}

/// A snapshot to be.
#[derive(Clone, Debug)]
pub(crate) struct New {
    pub(crate) name: String,
    pub(crate) parent: Option<String>,
    pub(crate) kind: Kind,
    pub(crate) labels: Labels,
    pub(crate) image: Option<Image>,
}

pub(super) fn get(
    snapshots: &impl ReadableTable<&'static str, &'static [u8]>,
    name: &str,
) -> Result<Snapshot> {
    match snapshots.get(name)? {
        Some(record) => parse(name, record.value()),
        None => Err(SnapshotError::NotFound(name.to_owned())),
    }
}

pub(super) fn parse(name: &str, record: &[u8]) -> Result<Snapshot> {
    serde_json::from_slice(record)
        .map_err(|source| SnapshotError::Record { name: name.to_owned(), source })
}

pub(super) fn put(snapshots: &mut Table<'_, &str, &[u8]>, snapshot: &Snapshot) -> Result<()> {
    let record = serde_json::to_vec(snapshot)
        .map_err(|source| SnapshotError::Record { name: snapshot.name.clone(), source })?;
    snapshots.insert(&*snapshot.name, &*record)?;
    Ok(())
}

/// Returns whether containerd's metadata made this name: `NAMESPACE/NUMBER/NAME`. It counts the
/// names in each namespace, and never makes one twice. Lazuli makes the names of lazy images'
/// layers.
pub(super) fn is_numbered(name: &str) -> bool {
    let mut parts = name.splitn(3, '/');
    let [space, number, rest] = [parts.next(), parts.next(), parts.next()];
    space.is_some_and(|space| !space.is_empty())
        && number.is_some_and(|number| number.parse::<u64>().is_ok())
        && rest.is_some_and(|rest| !rest.is_empty())
}
