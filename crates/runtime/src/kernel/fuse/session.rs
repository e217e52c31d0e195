//! A mount point: its connection to the kernel and the threads that answer it.

use std::{
    fs::File,
    io, mem,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
    sync::Arc,
};

use fuse_backend_rs::api::{filesystem::FileSystem, server::Server};
use lazuli_image::Digest;
use tracing::{info, warn};

use super::{
    answer::FileServer,
    connection::Connection,
    error::FuseError,
    journal::{Journal, Shape, Slot},
    mount::{detach, mount_directly, mount_with_helper, replace_directly, unmount},
    probe::resend,
};
use crate::{
    keeper::{Descriptors, KeptDescriptor, Link},
    kernel::mount::{self, Suid},
};

/// Number and size of a session's slots. A read of missing data holds its thread until the data is
/// ready, so the number limits the reads that can wait at once before other requests wait for them;
/// one that waits costs some 50 KiB. Of all requests to a read-only file system, only the kernel's
/// list of forgotten nodes is longer than a slot, and it needs no answer.
pub(super) const SHAPE: Shape = Shape { slots: 256, size: 8192 };

/// Prefix of the keeper's names for descriptors of FUSE mounts.
pub const HELD: &str = "fuse-";

/// The keeper's name for a connection.
fn connection_name(key: &str) -> String {
    format!("{HELD}{key}")
}

/// The keeper's name for the journal of a connection. The keeper gets it before the connection: a
/// connection without a journal belongs to a version that had none.
fn journal_name(key: &str) -> String {
    format!("{HELD}journal-{key}")
}

/// A mounted file system. Dropping it detaches the mount: open files stay readable until they are
/// closed.
#[derive(Debug)]
pub struct Session {
    connection: Arc<Connection>,
    mountpoint: PathBuf,
    /// The device number of the mounted file system, by which the mount is recognized.
    device: Option<u64>,
    _held: [KeptDescriptor; 2],
}

/// The mount to serve.
#[derive(Clone, Copy, Debug)]
pub struct MountTarget<'a> {
    /// Its mountpoint.
    pub mountpoint: &'a Path,
    /// Identifies the mount to the keeper.
    pub key: &'a str,
    /// The manifest of the image, which is charged for threads.
    pub image: Digest,
    /// The present state of the mount point.
    pub place: MountPoint,
}

/// The state of a mount point before mounting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MountPoint {
    /// No mount of ours.
    Free,
    /// A mount whose connection is closed: the new one replaces it.
    Dead,
}

/// The session of one mount, from an earlier worker.
#[derive(Debug)]
pub struct Left {
    pub(super) connection: OwnedFd,
    /// `None` if the worker that made the mount had no journals yet.
    pub(super) journal: Option<OwnedFd>,
}

impl Left {
    /// Takes the descriptors of the mount `key` out of `given`. `None` when its connection is
    /// closed.
    pub fn find(given: &mut Descriptors, key: &str) -> Option<Self> {
        let journal = given.remove(&journal_name(key));
        let connection = given.remove(&connection_name(key))?;
        Some(Left { connection, journal })
    }

    /// Makes the keeper release everything that belongs to the mount `key`.
    pub fn release(link: &Link, key: &str) {
        link.release(&connection_name(key));
        link.release(&journal_name(key));
    }
}

impl Session {
    /// Mounts `filesystem` and serves it. `source` is shown in the mount table. Device nodes in it
    /// do not open. Needs no privileges where `fusermount3` is installed; without them the mount is
    /// for this user only, and set-user-id bits in it have no effect.
    pub fn mount<F>(
        filesystem: F,
        target: MountTarget<'_>,
        source: &str,
        suid: Suid,
        link: &Arc<Link>,
    ) -> Result<Self, FuseError>
    where
        F: FileSystem + Send + Sync + 'static,
    {
        let mountpoint = target.mountpoint;
        let device = File::options().read(true).write(true).open("/dev/fuse");
        // The keeper gets everything before the mount exists: if this process dies before it serves
        // the mount, the next one does.
        let mut session = Self::new(device.map_err(FuseError::Device)?, create()?, target, link);
        let device = session.connection.device();
        let mounted = match target.place {
            MountPoint::Dead => replace_directly(device, mountpoint, source, suid),
            MountPoint::Free => mount_directly(device, mountpoint, source, suid),
        };
        match mounted {
            Err(FuseError::Mount { error, .. })
                if error.kind() == io::ErrorKind::PermissionDenied =>
            {
                drop(session);
                let device = mount_with_helper(mountpoint, source)?;
                session = Self::new(device, create()?, target, link);
            }
            direct => direct?,
        }
        session.device = mount::device(mountpoint).ok();
        if let Err(error) = session.serve(filesystem, Vec::new()) {
            // It is not in use yet.
            let _ = detach(mountpoint);
            return Err(error);
        }
        Ok(session)
    }

    /// Serves a mount again whose process is gone, over its connection: answers the requests that
    /// the process had read and not answered, and reads on. Needs no negotiation: the kernel's
    /// state from the old process (which requests it need not send, node numbers) follows from the
    /// image. No other process may read the connection any more.
    ///
    /// # Errors
    /// [`FuseError::Resume`] when there is no journal of what the old process had read, and the
    /// kernel (before Linux 6.9) cannot send it again. [`FuseError::Thread`] when there are too few
    /// threads: the keeper still has everything, and the next process can try. The mount is left as
    /// it is.
    pub fn resume<F>(
        filesystem: F,
        left: Left,
        target: MountTarget<'_>,
        link: &Arc<Link>,
    ) -> Result<Self, FuseError>
    where
        F: FileSystem + Send + Sync + 'static,
    {
        let mountpoint = target.mountpoint;
        let refused = |error| FuseError::Resume { mountpoint: mountpoint.to_path_buf(), error };
        let device = File::from(left.connection);
        let (journal, left) = match left.journal {
            Some(journal) => Journal::open(journal, SHAPE).map_err(refused)?,
            None => {
                // Before the keeper has the journal: a successor takes from it that nothing else is
                // missing.
                resend(device.as_fd()).map_err(refused)?;
                (Journal::create(SHAPE).map_err(refused)?, Vec::new())
            }
        };
        if !left.is_empty() {
            let requests = left.len();
            info!(mountpoint = %mountpoint.display(), requests, "left by the worker before this one");
        }
        let mut session = Self::new(device, journal, target, link);
        if let Err(error) = session.serve(filesystem, left) {
            // The keeper would close the connection.
            mem::forget(session);
            return Err(error);
        }
        session.device = mount::device(mountpoint).ok();
        Ok(session)
    }

    /// Not yet served. As long as the mount is not known, dropping this leaves it alone.
    fn new(device: File, journal: Arc<Journal>, target: MountTarget<'_>, link: &Arc<Link>) -> Self {
        let mountpoint = target.mountpoint.to_path_buf();
        let name = mountpoint.display().to_string();
        let connection = Connection::new(device, journal.clone(), name, Some(target.image));
        let journal = link.hold(journal_name(target.key), journal);
        let held = [journal, link.hold(connection_name(target.key), connection.clone())];
        Session { connection, mountpoint, device: None, _held: held }
    }

    fn serve<F>(&self, filesystem: F, left: Vec<Slot>) -> Result<(), FuseError>
    where
        F: FileSystem + Send + Sync + 'static,
    {
        let server = Arc::new(FileServer(Server::new(filesystem)));
        let failed = |error| FuseError::Thread { mountpoint: self.mountpoint.clone(), error };
        self.connection.serve(&server, left).map_err(failed)
    }

    /// Returns when everything is answered that an earlier process left.
    pub fn caught_up(&self) -> impl Future<Output = ()> + Send + use<> {
        self.connection.caught_up()
    }

    /// The mountpoint.
    pub fn mountpoint(&self) -> &Path {
        &self.mountpoint
    }

    /// Requests of the kernel since the mount.
    pub fn requests(&self) -> u64 {
        self.connection.requests()
    }

    /// Removes the mount. Errors when a process uses it. Another mount namespace may keep the
    /// connection alive, which is served on then.
    pub fn unmount(&self) -> Result<(), FuseError> {
        self.remove(unmount)
    }

    /// Takes the mount out of the tree. Processes that have files open in it keep them, and are
    /// served as long as this process lives.
    pub fn detach(&self) -> Result<(), FuseError> {
        self.remove(detach)
    }

    /// Returns when the mount is gone, whatever removed it, and all requests are answered.
    pub fn wait(&self) {
        self.connection.wait_for_end();
    }

    fn remove(&self, remove: fn(&Path) -> io::Result<()>) -> Result<(), FuseError> {
        let mountpoint = &self.mountpoint;
        // Another process may have unmounted it: a mount at this place is then not ours to unmount.
        // The device number is not reused as long as this file system lives, and we serve it.
        if self.connection.has_ended()
            || self.device.is_none()
            || mount::device(mountpoint).ok() != self.device
        {
            return Ok(());
        }
        remove(mountpoint).map_err(|error| match error.kind() {
            io::ErrorKind::ResourceBusy => FuseError::Busy { mountpoint: mountpoint.clone() },
            _ => FuseError::Unmount { mountpoint: mountpoint.clone(), error },
        })
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if let Err(error) = self.detach() {
            warn!("{error}");
        }
    }
}

fn create() -> Result<Arc<Journal>, FuseError> {
    Journal::create(SHAPE).map_err(FuseError::Journal)
}
