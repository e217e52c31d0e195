//! Causes of failures, few enough to have a counter each.

use lazuli_registry::ServerKind;

use crate::{error::ReadError, source::SourceError};

/// Why a reader got an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadFailure {
    /// No source delivered within the deadline.
    Timeout,
    /// Every source refused for good.
    Refused,
    /// There is no source.
    NoSource,
    /// Every source that delivered had wrong bytes.
    WrongBytes,
    /// The disk of the cache is full.
    DiskFull,
    /// The cache could not be written.
    Disk,
    /// The image doesn't describe the range.
    Image,
    /// The content was not what was stated, or the daemon gave it up.
    Withdrawn,
    /// A fault of Lazuli.
    Internal,
}

impl ReadFailure {
    /// Every cause, in the order of its numbers.
    pub const ALL: [Self; 9] = [
        Self::Timeout,
        Self::Refused,
        Self::NoSource,
        Self::WrongBytes,
        Self::DiskFull,
        Self::Disk,
        Self::Image,
        Self::Withdrawn,
        Self::Internal,
    ];

    /// The cause of an error.
    pub fn of(error: &ReadError) -> Self {
        match error {
            ReadError::Source { source: SourceError::TimedOut { .. }, .. } => Self::Timeout,
            ReadError::Source { source: SourceError::NoSource, .. } => Self::NoSource,
            ReadError::Source { .. } => Self::Refused,
            ReadError::Corrupt { .. } => Self::WrongBytes,
            ReadError::NoSpace { .. } => Self::DiskFull,
            ReadError::Cache { .. } => Self::Disk,
            ReadError::OutOfRange { .. } | ReadError::NoChunk { .. } => Self::Image,
            ReadError::CutOff { .. } => Self::Withdrawn,
            ReadError::Interrupted { .. } => Self::Internal,
        }
    }

    /// Its name as a label.
    pub fn name(self) -> &'static str {
        match self {
            Self::Timeout => "timeout",
            Self::Refused => "refused",
            Self::NoSource => "no_source",
            Self::WrongBytes => "wrong_bytes",
            Self::DiskFull => "disk_full",
            Self::Disk => "disk",
            Self::Image => "image",
            Self::Withdrawn => "withdrawn",
            Self::Internal => "internal",
        }
    }
}

/// Why an image was not mounted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StartFailure {
    /// No registry delivered its metadata.
    Registry,
    /// The policy does not let it run, or cannot be asked.
    Policy,
    /// It cannot be used.
    Image,
    /// The kernel, the disk or the mount point.
    Node,
    /// The client that asked is gone, or the daemon ends.
    GivenUp,
}

impl StartFailure {
    /// Every cause, in the order of its numbers.
    pub const ALL: [Self; 5] =
        [Self::Registry, Self::Policy, Self::Image, Self::Node, Self::GivenUp];

    /// Its name as a label.
    pub fn name(self) -> &'static str {
        match self {
            Self::Registry => "registry",
            Self::Policy => "policy",
            Self::Image => "image",
            Self::Node => "node",
            Self::GivenUp => "given_up",
        }
    }
}

/// The driver of a mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Driver {
    /// EROFS over files that are filled on fanotify events.
    Fanotify,
    /// EROFS over loop devices.
    Loop,
    /// ext4 over loop devices.
    Ext4,
    /// FUSE.
    Fuse,
    /// FUSE files that are disks.
    Disks,
}

impl Driver {
    /// Every driver, in the order of its numbers.
    pub const ALL: [Self; 5] = [Self::Fanotify, Self::Loop, Self::Ext4, Self::Fuse, Self::Disks];

    /// Its name as a label.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fanotify => "fanotify",
            Self::Loop => "loop",
            Self::Ext4 => "ext4",
            Self::Fuse => "fuse",
            Self::Disks => "disks",
        }
    }
}

/// The source of fetched bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The registry.
    Registry,
    /// A mirror of it.
    Mirror,
    /// Another node, through the peer-to-peer daemon.
    Peer,
    /// A directory on this node, or memory.
    Local,
    /// The disk of the cache, to which the right ones had been written.
    Cache,
}

impl Origin {
    /// Every origin, in the order of its numbers.
    pub const ALL: [Self; 5] = [Self::Registry, Self::Mirror, Self::Peer, Self::Local, Self::Cache];

    /// Its name as a label.
    pub fn name(self) -> &'static str {
        match self {
            Self::Registry => "registry",
            Self::Mirror => "mirror",
            Self::Peer => "peer",
            Self::Local => "local",
            Self::Cache => "cache",
        }
    }
}

impl From<Option<ServerKind>> for Origin {
    fn from(kind: Option<ServerKind>) -> Self {
        match kind {
            Some(ServerKind::Registry) => Self::Registry,
            Some(ServerKind::Mirror) => Self::Mirror,
            Some(ServerKind::Peer) => Self::Peer,
            None => Self::Local,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, time::Duration};

    use lazuli_image::{Digest, Stored};

    use super::*;

    #[test]
    fn causes_are_numbered_in_the_order_of_their_lists() {
        assert!(ReadFailure::ALL.iter().enumerate().all(|(at, cause)| *cause as usize == at));
        assert!(StartFailure::ALL.iter().enumerate().all(|(at, cause)| *cause as usize == at));
        assert!(Driver::ALL.iter().enumerate().all(|(at, driver)| *driver as usize == at));
        assert!(Origin::ALL.iter().enumerate().all(|(at, origin)| *origin as usize == at));
    }

    #[test]
    fn a_deadline_is_told_from_a_refusal() {
        let blob = Digest::sha256([0; 32]);
        let of = |source| {
            ReadFailure::of(&ReadError::Source { blob, range: Stored(0)..Stored(1), source })
        };
        let waited = Duration::ZERO;
        let last = Some(Arc::new(SourceError::NoSource));
        assert_eq!(of(SourceError::TimedOut { waited, last }), ReadFailure::Timeout);
        assert_eq!(of(SourceError::NoSource), ReadFailure::NoSource);
        assert_eq!(of(SourceError::Everywhere { failures: Vec::new() }), ReadFailure::Refused);
    }
}
