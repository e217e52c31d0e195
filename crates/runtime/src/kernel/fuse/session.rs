//! A mount point: its connection to the kernel and the threads that answer it.

use std::{
    ffi::CString,
    fs::File,
    io::{self, IoSliceMut},
    mem::{self, MaybeUninit},
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
};

use fuse_backend_rs::{
    Error as RequestError,
    api::{filesystem::FileSystem, server::Server},
    transport::{FuseBuf, FuseDevWriter, Reader},
};
use lazuli_image::Digest;
use rustix::{
    io::Errno,
    mount::{
        FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags, fsconfig_create, fsconfig_set_flag,
        fsconfig_set_string, fsmount, fsopen,
    },
    net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg},
};
use tracing::{debug, error, info, warn};

use super::{
    connection::{Answer, Connection},
    journal::{Journal, Shape, Slot},
};
use crate::{
    keeper::{Descriptors, KeptDescriptor, Link},
    kernel::mount::{self, Suid},
};

/// Threads of one session that read requests. A read of missing data holds its thread until the
/// data is there, so this is how many reads can wait at once before other requests wait for them;
/// one that waits costs some 50 KiB. Of what is sent for a file system that cannot be written to,
/// only the kernel's list of forgotten nodes is longer than a slot, which needs no answer.
pub(super) const SHAPE: Shape = Shape { slots: 256, size: 8192 };

/// The file system type in the mount table: `fuse.` and `SUBTYPE`.
pub const KIND: &str = "fuse.lazuli";

const SUBTYPE: &str = "lazuli";

/// How the keeper's names begin of what belongs to FUSE mounts.
pub const HELD: &str = "fuse-";

/// The keeper's name for a connection.
fn connection_name(key: &str) -> String {
    format!("{HELD}{key}")
}

/// The keeper's name for the journal of a connection. The keeper has it before the connection: a
/// connection without a journal is one of a version that had none.
fn journal_name(key: &str) -> String {
    format!("{HELD}journal-{key}")
}

/// Why a session could not be started or ended.
#[derive(Debug, thiserror::Error)]
pub enum FuseError {
    /// `/dev/fuse` is missing or may not be opened.
    #[error("/dev/fuse: {0}")]
    Device(#[source] io::Error),
    /// There is no memory for the journal.
    #[error("memory for requests that are not answered yet: {0}")]
    Journal(#[source] io::Error),
    /// The kernel refused the mount.
    #[error("mounting at {}: {error}", mountpoint.display())]
    Mount {
        /// Where.
        mountpoint: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// `fusermount3`, which mounts for users who are not root, refused.
    #[error("mounting at {} with fusermount3: {reason}", mountpoint.display())]
    Helper {
        /// Where.
        mountpoint: PathBuf,
        /// Why.
        reason: String,
    },
    /// The mount is there, but there is no thread to serve it.
    #[error("starting a thread for {}: {error}", mountpoint.display())]
    Thread {
        /// Which mount.
        mountpoint: PathBuf,
        /// Why.
        #[source]
        error: io::Error,
    },
    /// The connection of an earlier process cannot be served.
    #[error("serving {} again: {error}", mountpoint.display())]
    Resume {
        /// Which mount.
        mountpoint: PathBuf,
        /// Why.
        #[source]
        error: io::Error,
    },
    /// The mount could not be removed.
    #[error("unmounting {}: {error}", mountpoint.display())]
    Unmount {
        /// Which mount.
        mountpoint: PathBuf,
        /// Why; `EBUSY` when a process uses it.
        error: io::Error,
    },
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

/// Which mount is meant.
#[derive(Clone, Copy, Debug)]
pub struct MountTarget<'a> {
    /// Where it is.
    pub mountpoint: &'a Path,
    /// What tells it from others, for the keeper.
    pub key: &'a str,
    /// The manifest of the image, which is charged for threads.
    pub image: Digest,
    /// Whether there is a mount whose connection is closed, which a new one is to take the place
    /// of.
    pub is_dead: bool,
}

/// What an earlier worker left of one mount.
#[derive(Debug)]
pub struct Left {
    pub(super) connection: OwnedFd,
    /// `None` when the worker that made the mount was of a version that had none.
    pub(super) journal: Option<OwnedFd>,
}

impl Left {
    /// Takes out of `given` what belongs to the mount `key`. `None` when its connection is closed.
    pub fn find(given: &mut Descriptors, key: &str) -> Option<Self> {
        let journal = given.remove(&journal_name(key));
        let connection = given.remove(&connection_name(key))?;
        Some(Left { connection, journal })
    }

    /// Has the keeper let go of everything that belongs to the mount `key`.
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
        place: MountTarget<'_>,
        source: &str,
        suid: Suid,
        link: &Arc<Link>,
    ) -> Result<Self, FuseError>
    where
        F: FileSystem + Send + Sync + 'static,
    {
        let mountpoint = place.mountpoint;
        let device = File::options().read(true).write(true).open("/dev/fuse");
        // The keeper has everything before there is a mount: one that this process did not get to
        // serve is served by the next.
        let mut session = Self::new(device.map_err(FuseError::Device)?, create()?, place, link);
        let device = session.connection.device();
        let mounted = match place.is_dead {
            true => replace_directly(device, mountpoint, source, suid),
            false => mount_directly(device, mountpoint, source, suid),
        };
        match mounted {
            Err(FuseError::Mount { error, .. })
                if error.kind() == io::ErrorKind::PermissionDenied =>
            {
                drop(session);
                let device = mount_with_helper(mountpoint, source)?;
                session = Self::new(device, create()?, place, link);
            }
            direct => direct?,
        }
        session.device = mount::device(mountpoint).ok();
        if let Err(error) = session.serve(filesystem, Vec::new()) {
            // Nobody uses it yet.
            let _ = detach(mountpoint);
            return Err(error);
        }
        Ok(session)
    }

    /// Serves a mount again whose process is gone, over its connection: answers what that process
    /// had read and not answered, and reads on. Needs no negotiation: what the kernel remembers of
    /// the old process (which requests it need not send, node numbers) follows from the image. No
    /// other process may read the connection any more.
    ///
    /// # Errors
    /// [`FuseError::Resume`] when there is no journal of what the old process had read, and the
    /// kernel (before Linux 6.9) cannot send it again. [`FuseError::Thread`] when there are too few
    /// threads: the keeper still has everything, and the next process can try. The mount is left as
    /// it is.
    pub fn resume<F>(
        filesystem: F,
        left: Left,
        place: MountTarget<'_>,
        link: &Arc<Link>,
    ) -> Result<Self, FuseError>
    where
        F: FileSystem + Send + Sync + 'static,
    {
        let mountpoint = place.mountpoint;
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
        let mut session = Self::new(device, journal, place, link);
        if let Err(error) = session.serve(filesystem, left) {
            // The keeper would close the connection.
            mem::forget(session);
            return Err(error);
        }
        session.device = mount::device(mountpoint).ok();
        Ok(session)
    }

    /// Not yet served. As long as the mount is not known, dropping this leaves it alone.
    fn new(device: File, journal: Arc<Journal>, place: MountTarget<'_>, link: &Arc<Link>) -> Self {
        let mountpoint = place.mountpoint.to_path_buf();
        let name = mountpoint.display().to_string();
        let connection = Connection::new(device, journal.clone(), name, Some(place.image));
        let journal = link.hold(journal_name(place.key), journal);
        let held = [journal, link.hold(connection_name(place.key), connection.clone())];
        Session { connection, mountpoint, device: None, _held: held }
    }

    fn serve<F>(&self, filesystem: F, left: Vec<Slot>) -> Result<(), FuseError>
    where
        F: FileSystem + Send + Sync + 'static,
    {
        let server = Arc::new(ImageServer(Server::new(filesystem)));
        let failed = |error| FuseError::Thread { mountpoint: self.mountpoint.clone(), error };
        self.connection.serve(&server, left).map_err(failed)
    }

    /// Returns when everything is answered that an earlier process left.
    pub fn caught_up(&self) -> impl Future<Output = ()> + Send + use<> {
        self.connection.caught_up()
    }

    /// Where it is mounted.
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
        self.remove(false)
    }

    /// Takes the mount out of the tree. Who has files open in it keeps them, and is served as long
    /// as this process lives.
    pub fn detach(&self) -> Result<(), FuseError> {
        self.remove(true)
    }

    /// Returns when the mount is gone, whoever removed it, and all requests are answered.
    pub fn wait(&self) {
        self.connection.wait_for_end();
    }

    fn remove(&self, lazily: bool) -> Result<(), FuseError> {
        let mountpoint = &self.mountpoint;
        // Somebody else may have unmounted it: what is there now is then not ours to unmount. The
        // number is not given to another file system as long as this one lives, and we serve it.
        if self.connection.has_ended()
            || self.device.is_none()
            || mount::device(mountpoint).ok() != self.device
        {
            return Ok(());
        }
        let result = if lazily { mount::detach(mountpoint) } else { mount::unmount(mountpoint) };
        let result = match result {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                unmount_with_helper(mountpoint, lazily)
            }
            result => result,
        };
        result.map_err(|error| FuseError::Unmount { mountpoint: mountpoint.clone(), error })
    }
}

/// Has the kernel send everything again that was read from the connection and not answered. The
/// message is a `struct fuse_out_header` (length, code, 0) with code `FUSE_NOTIFY_RESEND`, which
/// Linux 6.9 and later know.
fn resend(device: BorrowedFd<'_>) -> io::Result<()> {
    const FUSE_NOTIFY_RESEND: i32 = 7;
    let mut message = [0; 16];
    message[..4].copy_from_slice(&16_u32.to_ne_bytes());
    message[4..8].copy_from_slice(&FUSE_NOTIFY_RESEND.to_ne_bytes());
    rustix::io::write(device, &message)?;
    Ok(())
}

/// Whether this kernel can send requests again, see [`Session::resume`]. Tries it on a mount that
/// nobody sees, for which it needs root.
pub fn can_resend() -> io::Result<bool> {
    let device = File::options().read(true).write(true).open("/dev/fuse")?;
    let context = create_filesystem(&device, "trial", SUBTYPE)?;
    let resent = resend(device.as_fd());
    drop(context);
    match resent {
        Ok(()) => Ok(true),
        Err(error) if Errno::from_io_error(&error) == Some(Errno::INVAL) => Ok(false),
        Err(error) => Err(error),
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

pub(super) fn mount_directly(
    device: &File,
    mountpoint: &Path,
    source: &str,
    suid: Suid,
) -> Result<(), FuseError> {
    let options = format!(
        "fd={},rootmode=40000,user_id={},group_id={},default_permissions,allow_other",
        device.as_raw_fd(),
        rustix::process::getuid().as_raw(),
        rustix::process::getgid().as_raw(),
    );
    let options = CString::new(options).ok();
    let mut flags = MountFlags::RDONLY | MountFlags::NODEV;
    if suid == Suid::Ignore {
        flags |= MountFlags::NOSUID;
    }
    rustix::mount::mount(source, mountpoint, KIND, flags, options.as_deref()).map_err(|error| {
        FuseError::Mount { mountpoint: mountpoint.to_path_buf(), error: error.into() }
    })
}

/// Mounts where a mount is whose connection is closed, and takes that away.
fn replace_directly(
    device: &File,
    mountpoint: &Path,
    source: &str,
    suid: Suid,
) -> Result<(), FuseError> {
    let mut attributes = MountAttrFlags::MOUNT_ATTR_RDONLY | MountAttrFlags::MOUNT_ATTR_NODEV;
    if suid == Suid::Ignore {
        attributes |= MountAttrFlags::MOUNT_ATTR_NOSUID;
    }
    let replace = || {
        let context = create_filesystem(device, source, SUBTYPE)?;
        let mount = fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes)?;
        mount::replace(mountpoint, mount.as_fd())
    };
    match replace() {
        // No such calls, or not for this user.
        Err(error) if matches!(Errno::from_io_error(&error), Some(Errno::NOSYS | Errno::PERM)) => {
            detach(mountpoint).map_err(|error| FuseError::Mount {
                mountpoint: mountpoint.to_path_buf(),
                error,
            })?;
            mount_directly(device, mountpoint, source, suid)
        }
        replaced => replaced
            .map_err(|error| FuseError::Mount { mountpoint: mountpoint.to_path_buf(), error }),
    }
}

/// A file system behind `device`, as [`mount_directly`] makes it, that is not mounted yet.
pub(in crate::kernel) fn create_filesystem(
    device: &File,
    source: &str,
    subtype: &str,
) -> io::Result<OwnedFd> {
    let context = fsopen(c"fuse", FsOpenFlags::FSOPEN_CLOEXEC)?;
    let options = [
        ("source", source),
        ("subtype", subtype),
        ("fd", &device.as_raw_fd().to_string()),
        ("rootmode", "40000"),
        ("user_id", &rustix::process::getuid().as_raw().to_string()),
        ("group_id", &rustix::process::getgid().as_raw().to_string()),
    ];
    for (name, value) in options {
        fsconfig_set_string(context.as_fd(), name, value)?;
    }
    for flag in ["ro", "default_permissions", "allow_other"] {
        fsconfig_set_flag(context.as_fd(), flag)?;
    }
    fsconfig_create(context.as_fd())?;
    Ok(context)
}

/// `fusermount3` mounts and sends the connection back over a socket: here its standard input, so
/// that no other process that is started meanwhile inherits it.
fn mount_with_helper(mountpoint: &Path, source: &str) -> Result<File, FuseError> {
    let refused =
        |reason: String| FuseError::Helper { mountpoint: mountpoint.to_path_buf(), reason };
    let (ours, theirs) = UnixStream::pair().map_err(|error| refused(error.to_string()))?;
    // Commas separate options; `fusermount3` takes a backslash as quoting the next byte.
    let source = source.replace('\\', r"\\").replace(',', r"\,");
    let output = Command::new("fusermount3")
        .arg("-o")
        .arg(format!("ro,default_permissions,subtype={SUBTYPE},fsname={source}"))
        .arg("--")
        .arg(mountpoint)
        .env("_FUSE_COMMFD", "0")
        .stdin(OwnedFd::from(theirs))
        .output()
        .map_err(|error| refused(error.to_string()))?;
    if !output.status.success() {
        return Err(refused(String::from_utf8_lossy(&output.stderr).trim().to_owned()));
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    recvmsg(&ours, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)
        .map_err(|error| refused(error.to_string()))?;
    let received = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    received.map(File::from).ok_or_else(|| refused("it sent no connection".to_owned()))
}

/// Takes what is mounted at `mountpoint` out of the tree, with whatever privileges there are.
pub fn detach(mountpoint: &Path) -> io::Result<()> {
    match mount::detach(mountpoint) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            unmount_with_helper(mountpoint, true)
        }
        result => result,
    }
}

fn unmount_with_helper(mountpoint: &Path, lazily: bool) -> io::Result<()> {
    let mut command = Command::new("fusermount3");
    command.arg("-u").args(lazily.then_some("-z")).arg("--").arg(mountpoint);
    let output = command.output()?;
    if output.status.success() {
        Ok(())
    } else {
        Err(io::Error::other(String::from_utf8_lossy(&output.stderr).trim().to_owned()))
    }
}

/// An image as the crate serves it.
struct ImageServer<F: FileSystem + Sync>(Server<F>);

/// `FUSE_FORGET`, `FUSE_INTERRUPT` and `FUSE_BATCH_FORGET`, of which the last may be cut short
/// here. Node numbers follow from the image, and whoever is interrupted waits for the answer all
/// the same.
pub(in crate::kernel) const WITHOUT_ANSWER: [u32; 3] = [2, 36, 42];

impl<F: FileSystem + Send + Sync + 'static> Answer for ImageServer<F> {
    fn answer(
        self: &Arc<Self>,
        connection: &Arc<Connection>,
        slot: Slot,
        reply: &mut [u8],
    ) -> Option<Slot> {
        self.handle(connection, &mut slot.request(), reply);
        Some(slot)
    }
}

impl<F: FileSystem + Send + Sync> ImageServer<F> {
    /// Handles one request. Whatever goes wrong, the kernel gets an answer, since the reader waits
    /// for it.
    fn handle(&self, connection: &Connection, request: &mut [u8], reply: &mut [u8]) {
        // struct fuse_in_header: length, opcode, request id; in the byte order of the machine.
        let Some((header, _)) = request.split_first_chunk::<16>() else { return };
        let [_, _, _, _, o, p, q, r, a, b, c, d, e, f, g, h] = *header;
        let (opcode, id) =
            (u32::from_ne_bytes([o, p, q, r]), u64::from_ne_bytes([a, b, c, d, e, f, g, h]));
        if WITHOUT_ANSWER.contains(&opcode) {
            return;
        }
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            // Both constructors only wrap their buffers.
            let reader = Reader::<()>::from_fuse_buffer(FuseBuf::new(request)).ok()?;
            let device = connection.device().as_raw_fd();
            let writer = FuseDevWriter::<()>::new(device, reply).ok()?;
            self.0.handle_message(reader, writer.into(), None, None).err()
        }));
        let name = connection.name();
        match outcome {
            Ok(None) => return,
            // Usually the reader was killed, or the mount is going away.
            Ok(Some(RequestError::EncodeMessage(error))) => {
                debug!("{name}: request {id}: the kernel does not take the answer: {error}");
            }
            Ok(Some(problem)) => error!("{name}: request {id}: {problem}"),
            Err(_) => error!("{name}: request {id}: a panic, see above"),
        }
        connection.refuse(id, Errno::IO);
    }
}
