//! The file system with a file for each blob, and the keeper's descriptors of it.
//!
//! It is mounted nowhere: the keeper has its root directory, and loop devices have its files. It
//! ends with the last of them. When keeper and worker are gone, every read of it fails; the next
//! daemon makes another one and puts its files behind the same loop devices.

use std::{
    fs::File,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

use rustix::mount::{FsMountFlags, MountAttrFlags, fsmount};

use super::{
    super::{
        fuse::{
            Writes,
            connection::Connection,
            create_filesystem,
            journal::{Journal, Shape, Slot},
        },
        mount::ImageMount,
    },
    disk::{Disk, Shared},
};
use crate::{
    cache::CachedBlob,
    keeper::{Descriptors, KeptDescriptor, Link},
};

/// The keeper's names for this driver's descriptors.
const CONNECTION: &str = "blobs-connection";
const JOURNAL: &str = "blobs-journal";
const ROOT: &str = "blobs-root";

/// Requests that can be under way at once, on the whole node. A loop device has 128 reads under way
/// at most, which are one or two requests each. A request is a header and some numbers, or a name
/// of at most 255 bytes. Never changed.
const SHAPE: Shape = Shape { slots: 4096, size: 512 };

/// See the module.
pub struct Session {
    shared: Arc<Shared>,
    connection: Arc<Connection>,
    _held: [KeptDescriptor; 3],
}

/// The session of an earlier worker.
#[derive(Debug)]
pub struct Left {
    connection: OwnedFd,
    journal: OwnedFd,
    root: OwnedFd,
}

impl Left {
    /// Takes the session out of `given`. An incomplete one is of a worker that had not attached
    /// anything yet, and is dropped.
    pub fn find(given: &mut Descriptors, link: &Link) -> Option<Self> {
        let [connection, journal, root] =
            [CONNECTION, JOURNAL, ROOT].map(|name| given.remove(name));
        if let (Some(connection), Some(journal), Some(root)) = (connection, journal, root) {
            return Some(Left { connection, journal, root });
        }
        [CONNECTION, JOURNAL, ROOT].iter().for_each(|name| link.release(name));
        None
    }
}

impl Session {
    /// Makes a file system. Blocks.
    ///
    /// # Panics
    /// Outside a tokio runtime: reads wait there.
    pub fn start(link: &Arc<Link>) -> io::Result<Arc<Self>> {
        let device = File::options().read(true).write(true).open("/dev/fuse")?;
        let journal = Journal::create(SHAPE)?;
        let shared = Shared::new(link);
        // The keeper has both before there is a file system, and its root before anything depends
        // on it.
        let (connection, [journal, device]) = hold(link, device, journal);
        let context =
            create_filesystem(connection.device(), "lazuli", "lazuli-blobs", Writes::Refused)?;
        let attributes = MountAttrFlags::MOUNT_ATTR_RDONLY | MountAttrFlags::MOUNT_ATTR_NODEV;
        let tree = fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes)?;
        connection.serve(&shared, Vec::new())?;
        let root = Arc::new(shared.helper.open(tree.as_fd(), ".")?);
        let held = [journal, device, link.hold(ROOT.to_owned(), root.clone())];
        shared.set_root(root);
        Ok(Arc::new(Session { shared, connection, _held: held }))
    }

    /// Continues the session of a dead worker. `blobs` are those of live mounts, with the numbers
    /// of their loop devices; requests for others are answered with errors. Blocks.
    ///
    /// # Panics
    /// Outside a tokio runtime: reads wait there.
    pub fn resume(
        link: &Arc<Link>,
        left: Left,
        blobs: Vec<Arc<CachedBlob>>,
    ) -> io::Result<(Arc<Self>, Vec<Arc<Disk>>)> {
        let (journal, slots) = Journal::open(left.journal, SHAPE)?;
        if !slots.is_empty() {
            tracing::info!(requests = slots.len(), "left by the worker before this one");
        }
        let shared = Shared::new(link);
        let root = Arc::new(left.root);
        shared.set_root(root.clone());
        let (connection, [journal, device]) = hold(link, left.connection.into(), journal);
        let held = [journal, device, link.hold(ROOT.to_owned(), root)];
        let disks: io::Result<Vec<_>> =
            blobs.into_iter().map(|blob| shared.disks.of(blob, &shared)).collect();
        let disks = disks?;
        // They are mounted: whatever was asked for is fetched.
        disks.iter().for_each(|disk| disk.mounted());
        let session = Arc::new(Session { shared, connection, _held: held });
        session.serve(slots)?;
        Ok((session, disks))
    }

    fn serve(self: &Arc<Self>, left: Vec<Slot>) -> io::Result<()> {
        self.connection.serve(&self.shared, left)
    }

    /// The disk of a blob, without a loop device as yet: see [`Disk::attach`] and [`Disk::adopt`].
    pub fn disk(&self, blob: Arc<CachedBlob>) -> io::Result<Arc<Disk>> {
        self.shared.disks.of(blob, &self.shared)
    }

    /// Returns when no helper of an earlier worker changes loop devices any more. It may have to
    /// wait for our answers. Blocks.
    pub fn wait_for_others(&self) -> io::Result<()> {
        self.shared.helper.wait_for_others()
    }

    /// Makes another process release the mount last: the kernel then waits for reads under way,
    /// which are ours to answer.
    pub fn keep(&self, erofs: ImageMount) -> io::Result<ImageMount> {
        let held = self.shared.helper.hold(erofs.as_fd())?;
        Ok(erofs.with_last(held))
    }

    /// Returns whether mounts that were [kept](Session::keep) are about to go.
    pub fn is_releasing(&self) -> bool {
        self.shared.helper.is_releasing()
    }

    /// Reads a small file in `directory`, in another process.
    pub(super) fn read(&self, directory: BorrowedFd<'_>, name: &str) -> io::Result<Vec<u8>> {
        self.shared.helper.read(directory, name)
    }

    /// Returns when everything is answered that an earlier worker left.
    pub fn caught_up(&self) -> impl Future<Output = ()> + Send + use<> {
        self.connection.caught_up()
    }

    /// Number of requests of the kernel.
    pub fn requests(&self) -> u64 {
        self.connection.requests()
    }
}

/// Makes the keeper hold the journal and the connection, in this order.
fn hold(
    link: &Arc<Link>,
    device: File,
    journal: Arc<Journal>,
) -> (Arc<Connection>, [KeptDescriptor; 2]) {
    let connection = Connection::new(device, journal.clone(), "blobs".to_owned(), None);
    let journal = link.hold(JOURNAL.to_owned(), journal);
    let device = link.hold(CONNECTION.to_owned(), connection.clone());
    (connection, [journal, device])
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session").field("requests", &self.requests()).finish_non_exhaustive()
    }
}
