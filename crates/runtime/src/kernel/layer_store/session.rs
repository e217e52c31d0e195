//! The mount of the layer store, and the keeper's descriptors of it.

use std::{
    fs::{DirBuilder, File},
    io,
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::fs::DirBuilderExt as _,
    },
    path::Path,
    sync::Arc,
};

use fuse_backend_rs::api::server::Server;
use rustix::{
    fs::CWD,
    mount::{FsMountFlags, MountAttrFlags, MoveMountFlags, fsmount, move_mount},
};

use super::{Layers, filesystem::LayerFilesystem, names::Numbers};
use crate::{
    keeper::{Descriptors, KeptDescriptor, Link},
    kernel::fuse::{
        FileServer, Writes,
        connection::Connection,
        create_filesystem,
        journal::{Journal, Shape, Slot},
    },
};

/// The file system's type in the mount table.
pub const KIND: &str = "fuse.lazuli-layers";

const SUBTYPE: &str = "lazuli-layers";

/// The keeper's names for this file system's descriptors.
const CONNECTION: &str = "layers-connection";
const JOURNAL: &str = "layers-journal";

/// Requests that can be under way at once; clients send a few at a time. A request is a header and
/// a name. Never changed.
const SHAPE: Shape = Shape { slots: 64, size: 512 };

/// A mounted layer store.
#[derive(Debug)]
pub struct Session {
    connection: Arc<Connection>,
    _held: [KeptDescriptor; 2],
}

/// The session of an earlier worker.
#[derive(Debug)]
pub struct Left {
    connection: OwnedFd,
    journal: OwnedFd,
}

impl Left {
    /// Takes the session out of `given`; `None` if its connection is closed.
    pub fn find(given: &mut Descriptors, link: &Link) -> Option<Self> {
        let [connection, journal] = [CONNECTION, JOURNAL].map(|name| given.remove(name));
        if let (Some(connection), Some(journal)) = (connection, journal) {
            return Some(Left { connection, journal });
        }
        Self::release(link);
        None
    }

    /// Makes the keeper release everything that belongs to a session.
    pub fn release(link: &Link) {
        [CONNECTION, JOURNAL].iter().for_each(|name| link.release(name));
    }
}

impl Session {
    /// Mounts a layer store at `directory`, which is made if it is missing. `source` is shown in
    /// the mount table. Blocks.
    pub fn mount<L: Layers>(
        layers: Arc<L>,
        directory: &Path,
        source: &str,
        link: &Arc<Link>,
    ) -> io::Result<Self> {
        DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        let device = File::options().read(true).write(true).open("/dev/fuse")?;
        // The keeper has both before there is a mount.
        let session = Self::new(device, Journal::create(SHAPE)?, link);
        let device = session.connection.device();
        let context = create_filesystem(device, source, SUBTYPE, Writes::Asked)?;
        let attributes = MountAttrFlags::MOUNT_ATTR_NODEV
            | MountAttrFlags::MOUNT_ATTR_NOSUID
            | MountAttrFlags::MOUNT_ATTR_NOEXEC;
        let tree = fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes)?;
        session.serve(layers, Vec::new())?;
        move_mount(tree, c"", CWD, directory, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?;
        Ok(session)
    }

    /// Continues the session of a dead worker.
    pub fn resume<L: Layers>(layers: Arc<L>, left: Left, link: &Arc<Link>) -> io::Result<Self> {
        let (journal, slots) = Journal::open(left.journal, SHAPE)?;
        let session = Self::new(left.connection.into(), journal, link);
        session.serve(layers, slots)?;
        Ok(session)
    }

    fn new(device: File, journal: Arc<Journal>, link: &Arc<Link>) -> Self {
        let connection = Connection::new(device, journal.clone(), "layers".to_owned(), None);
        let journal = link.hold(JOURNAL.to_owned(), journal);
        let held = [journal, link.hold(CONNECTION.to_owned(), connection.clone())];
        Session { connection, _held: held }
    }

    fn serve<L: Layers>(&self, layers: Arc<L>, left: Vec<Slot>) -> io::Result<()> {
        let filesystem = LayerFilesystem { numbers: Numbers::of(layers.known()), layers };
        self.connection.serve(&Arc::new(FileServer(Server::new(filesystem))), left)
    }
}
