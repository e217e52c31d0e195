//! The mount at one mount point.

use std::{io, path::Path, sync::Arc};

use super::mounted::FilesystemMount;
use crate::kernel::{
    fuse::{self, FuseError},
    mount,
};

/// The mount behind one mount point.
#[derive(Debug)]
pub(in crate::daemon) enum Attachment {
    /// A bind mount of the image's EROFS mount.
    Bind(Arc<FilesystemMount>),
    /// A FUSE connection.
    Fuse(Arc<fuse::Session>),
}

impl Attachment {
    /// Pages that may show zeros, see [`stale_pages::close`](super::stale_pages::close).
    pub(in crate::daemon) fn stale_pages(&self) -> u64 {
        match self {
            Attachment::Bind(mount) => mount.stale_pages,
            Attachment::Fuse(_) => 0,
        }
    }

    /// Removes the mount; fails with [`io::ErrorKind::ResourceBusy`] while it is in use.
    pub(in crate::daemon) async fn unmount(&self, mountpoint: &Path) -> io::Result<()> {
        let Attachment::Fuse(session) = self else { return mount::unmount(mountpoint) };
        let session = session.clone();
        let unmount = tokio::task::spawn_blocking(move || session.unmount());
        unmount.await.map_err(io::Error::other)?.map_err(|error| match error {
            FuseError::Busy { .. } => io::ErrorKind::ResourceBusy.into(),
            FuseError::Unmount { error, .. } => error,
            error => io::Error::other(error),
        })
    }

    /// Takes the mount out of the tree, with whatever uses it.
    pub(in crate::daemon) async fn detach(&self, mountpoint: &Path) -> io::Result<()> {
        let Attachment::Fuse(session) = self else { return mount::detach(mountpoint) };
        let session = session.clone();
        let detach = tokio::task::spawn_blocking(move || session.detach());
        detach.await.map_err(io::Error::other)?.map_err(io::Error::other)
    }
}
