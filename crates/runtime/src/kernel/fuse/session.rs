//! A mount point: its connection to the kernel and the threads that answer it.

use std::{
    ffi::CString,
    fs::File,
    io::{self, IoSliceMut},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

use fuse_backend_rs::{
    Error as RequestError,
    api::{filesystem::FileSystem, server::Server},
    transport::{FuseBuf, FuseDevWriter, Reader},
};
use rustix::{
    fs::{AtFlags, CWD, StatxFlags, statx},
    io::Errno,
    mount::MountFlags,
    net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg},
};
use tracing::{debug, error, warn};

use crate::kernel::mount::{self, Suid};

/// Bytes of the largest request or reply: 1 MiB of data, the most the kernel ever asks for, and a page
/// for its header. Pages of a buffer that no request fills take no memory.
const BUFFER: usize = (1 << 20) + 4096;

/// Threads of one session. A read of missing data holds its thread until the data is there, so this is
/// how many reads can wait at once before other requests wait for them. Threads are made when all are
/// busy; one that waits costs some 50 KiB.
const MAX_THREADS: usize = 256;

/// Threads that stay when nothing is to be done: enough for a burst of look-ups on a small machine.
const IDLE_THREADS: usize = 4;

/// The file system type in the mount table.
pub const KIND: &str = "fuse.lazuli";

/// Why a session could not be started or ended.
#[derive(Debug, thiserror::Error)]
pub enum FuseError {
    /// `/dev/fuse` is missing or may not be opened.
    #[error("/dev/fuse: {0}")]
    Device(#[source] io::Error),
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
        error: io::Error,
    },
    /// The connection of an earlier process cannot be served.
    #[error("serving {} again: {error}", mountpoint.display())]
    Resume {
        /// Which mount.
        mountpoint: PathBuf,
        /// Why.
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

/// A mounted file system. Dropping it detaches the mount: open files stay readable until they are closed.
#[derive(Debug)]
pub struct Session {
    connection: Arc<Connection>,
    /// The device number of the mounted file system, by which the mount is recognized.
    device: Option<(u32, u32)>,
}

impl Session {
    /// Mounts `filesystem` at the directory `mountpoint` and serves it. `source` is shown in the mount
    /// table. Device nodes in it do not open. Needs no privileges where `fusermount3` is installed;
    /// without them the mount is for this user only, and set-user-id bits in it have no effect.
    pub fn mount<F>(
        filesystem: F,
        mountpoint: &Path,
        source: &str,
        suid: Suid,
    ) -> Result<Self, FuseError>
    where
        F: FileSystem + Send + Sync + 'static,
    {
        let device = match mount_directly(mountpoint, source, suid) {
            Err(FuseError::Device(error) | FuseError::Mount { error, .. })
                if error.kind() == io::ErrorKind::PermissionDenied =>
            {
                mount_with_helper(mountpoint, source)?
            }
            direct => direct?,
        };
        let session = Self::new(device, mountpoint);
        session.serve(filesystem)?;
        Ok(session)
    }

    /// Serves a mount again whose process died, over its connection. Needs no negotiation: what the kernel
    /// remembers of the old process (which requests it need not send, node numbers) follows from the image.
    ///
    /// # Errors
    /// [`FuseError::Resume`] on kernels before 6.9: they cannot send those requests again that the old process
    /// had read and not answered.
    pub fn resume<F>(filesystem: F, device: OwnedFd, mountpoint: &Path) -> Result<Self, FuseError>
    where
        F: FileSystem + Send + Sync + 'static,
    {
        let session = Self::new(device.into(), mountpoint);
        if let Err(error) = resend(&session.connection.device) {
            let mountpoint = mountpoint.to_path_buf();
            return Err(FuseError::Resume { mountpoint, error });
        }
        session.serve(filesystem)?;
        Ok(session)
    }

    fn new(device: File, mountpoint: &Path) -> Self {
        let connection = Arc::new(Connection {
            device,
            mountpoint: mountpoint.to_path_buf(),
            requests: AtomicU64::new(0),
            threads: Mutex::default(),
            ended: Condvar::new(),
        });
        Session { connection, device: device_number(mountpoint) }
    }

    fn serve<F>(&self, filesystem: F) -> Result<(), FuseError>
    where
        F: FileSystem + Send + Sync + 'static,
    {
        spawn(&self.connection, &Arc::new(Server::new(filesystem))).map_err(|error| {
            FuseError::Thread { mountpoint: self.mountpoint().to_path_buf(), error }
        })
    }

    /// The connection. The mount answers while any copy of it is open, here or elsewhere, and requests wait
    /// meanwhile that nobody reads.
    pub fn connection(&self) -> Arc<dyn AsFd + Send + Sync> {
        self.connection.clone()
    }

    /// Where it is mounted.
    pub fn mountpoint(&self) -> &Path {
        &self.connection.mountpoint
    }

    /// Requests of the kernel since the mount.
    pub fn requests(&self) -> u64 {
        self.connection.requests.load(Ordering::Relaxed)
    }

    /// Removes the mount. Errors when a process uses it. Another mount namespace may keep the connection
    /// alive, which is served on then.
    pub fn unmount(&self) -> Result<(), FuseError> {
        self.remove(false)
    }

    /// Takes the mount out of the tree. Who has files open in it keeps them, and is served as long as
    /// this process lives.
    pub fn detach(&self) -> Result<(), FuseError> {
        self.remove(true)
    }

    /// Returns when the mount is gone, whoever removed it, and all requests are answered.
    pub fn wait(&self) {
        let threads = self.connection.threads();
        let gone = self.connection.ended.wait_while(threads, |threads| threads.total > 0);
        drop(gone.unwrap_or_else(PoisonError::into_inner));
    }

    fn remove(&self, lazily: bool) -> Result<(), FuseError> {
        let mountpoint = &self.connection.mountpoint;
        // Somebody else may have unmounted it: what is there now is then not ours to unmount. The number
        // is not given to another file system as long as this one lives, and we serve it.
        let ended = self.connection.threads().total == 0;
        if ended || self.device.is_none() || device_number(mountpoint) != self.device {
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

/// Which file system is at `path`, without asking that file system.
fn device_number(path: &Path) -> Option<(u32, u32)> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::STATX_DONT_SYNC;
    let found = statx(CWD, path, flags, StatxFlags::TYPE).ok()?;
    Some((found.stx_dev_major, found.stx_dev_minor))
}

/// Has the kernel send everything again that was read from the connection and not answered. The message is a
/// `struct fuse_out_header` (length, code, 0) with code `FUSE_NOTIFY_RESEND`.
fn resend(device: &File) -> io::Result<()> {
    const FUSE_NOTIFY_RESEND: i32 = 7;
    let mut message = [0; 16];
    message[..4].copy_from_slice(&16_u32.to_ne_bytes());
    message[4..8].copy_from_slice(&FUSE_NOTIFY_RESEND.to_ne_bytes());
    rustix::io::write(device, &message)?;
    Ok(())
}

impl Drop for Session {
    fn drop(&mut self) {
        if let Err(error) = self.detach() {
            warn!("{error}");
        }
    }
}

fn mount_directly(mountpoint: &Path, source: &str, suid: Suid) -> Result<File, FuseError> {
    let device =
        File::options().read(true).write(true).open("/dev/fuse").map_err(FuseError::Device)?;
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
    match rustix::mount::mount(source, mountpoint, KIND, flags, options.as_deref()) {
        Ok(()) => Ok(device),
        Err(error) => {
            Err(FuseError::Mount { mountpoint: mountpoint.to_path_buf(), error: error.into() })
        }
    }
}

/// `fusermount3` mounts and sends the connection back over a socket: here its standard input, so that no
/// other process that is started meanwhile inherits it.
fn mount_with_helper(mountpoint: &Path, source: &str) -> Result<File, FuseError> {
    let refused =
        |reason: String| FuseError::Helper { mountpoint: mountpoint.to_path_buf(), reason };
    let (ours, theirs) = UnixStream::pair().map_err(|error| refused(error.to_string()))?;
    // Commas separate options; `fusermount3` takes a backslash as quoting the next byte.
    let source = source.replace('\\', r"\\").replace(',', r"\,");
    let output = Command::new("fusermount3")
        .arg("-o")
        .arg(format!("ro,default_permissions,subtype=lazuli,fsname={source}"))
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

#[derive(Debug)]
struct Connection {
    device: File,
    mountpoint: PathBuf,
    requests: AtomicU64,
    threads: Mutex<Threads>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct Threads {
    total: usize,
    idle: usize,
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.device.as_fd()
    }
}

impl Connection {
    fn threads(&self) -> MutexGuard<'_, Threads> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a new thread as waiting.
    fn join(&self) {
        let mut threads = self.threads();
        threads.total += 1;
        threads.idle += 1;
    }

    /// Counts a waiting thread as gone.
    fn leave(&self) {
        let mut threads = self.threads();
        threads.total -= 1;
        threads.idle -= 1;
        if threads.total == 0 {
            self.ended.notify_all();
        }
    }

    /// Counts a waiting thread as busy. Whether another one is needed, so that one always waits.
    fn start_request(&self) -> bool {
        let mut threads = self.threads();
        threads.idle -= 1;
        threads.idle == 0 && threads.total < MAX_THREADS
    }

    /// Counts a busy thread as waiting, and is true; or as gone, if enough others wait. At once: threads that only meant to go
    /// would be taken for waiting ones by others, who would go, too, until nobody is left.
    fn end_request(&self) -> bool {
        let mut threads = self.threads();
        if threads.idle < IDLE_THREADS {
            threads.idle += 1;
            return true;
        }
        // So many others wait, and one of them takes the next request.
        threads.total -= 1;
        false
    }
}

/// Starts one more thread that answers requests.
fn spawn<F>(connection: &Arc<Connection>, server: &Arc<Server<F>>) -> io::Result<()>
where
    F: FileSystem + Send + Sync + 'static,
{
    connection.join();
    let (mine, server) = (connection.clone(), server.clone());
    let thread = thread::Builder::new().name("fuse".to_owned()).spawn(move || {
        if serve(&mine, &server) {
            mine.leave();
        }
    });
    thread.map(drop).inspect_err(|_| connection.leave())
}

/// Answers requests until the mount is gone, and is true, or until there are enough other threads.
fn serve<F>(connection: &Arc<Connection>, server: &Arc<Server<F>>) -> bool
where
    F: FileSystem + Send + Sync + 'static,
{
    let (mut request, mut reply) = (vec![0; BUFFER], vec![0; BUFFER]);
    loop {
        let length = match rustix::io::read(&connection.device, &mut request[..]) {
            Ok(length) => length,
            // Interrupted, or the process that asked was killed before the request was taken.
            Err(Errno::INTR | Errno::NOENT) => continue,
            Err(Errno::NODEV) => {
                debug!("{} is unmounted", connection.mountpoint.display());
                return true;
            }
            Err(error) => {
                error!("{} is served no more: {error}", connection.mountpoint.display());
                return true;
            }
        };
        connection.requests.fetch_add(1, Ordering::Relaxed);
        if connection.start_request()
            && let Err(error) = spawn(connection, server)
        {
            warn!("no more threads for {}: {error}", connection.mountpoint.display());
        }
        answer(connection, server, &mut request[..length], &mut reply);
        if !connection.end_request() {
            return false;
        }
    }
}

/// Handles one request. Whatever goes wrong, the kernel gets an answer, since the reader waits for it.
fn answer<F>(connection: &Connection, server: &Server<F>, request: &mut [u8], reply: &mut [u8])
where
    F: FileSystem + Send + Sync,
{
    // struct fuse_in_header: length, opcode, request id; in the byte order of the machine.
    let Some((header, _)) = request.split_first_chunk::<16>() else { return };
    let [.., a, b, c, d, e, f, g, h] = *header;
    let id = u64::from_ne_bytes([a, b, c, d, e, f, g, h]);
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        // Both constructors only wrap their buffers.
        let reader = Reader::<()>::from_fuse_buffer(FuseBuf::new(request)).ok()?;
        let writer = FuseDevWriter::<()>::new(connection.device.as_raw_fd(), reply).ok()?;
        server.handle_message(reader, writer.into(), None, None).err()
    }));
    let mountpoint = connection.mountpoint.display();
    match outcome {
        Ok(None) => return,
        // Usually the reader was killed, or the mount is going away.
        Ok(Some(RequestError::EncodeMessage(error))) => {
            debug!("{mountpoint}: request {id}: the kernel does not take the answer: {error}");
        }
        Ok(Some(problem)) => error!("{mountpoint}: request {id}: {problem}"),
        Err(_) => error!("{mountpoint}: request {id}: a panic, see above"),
    }
    // struct fuse_out_header: length, error, request id. Refused when nobody waits for it any more.
    let mut failure = [0; 16];
    failure[..4].copy_from_slice(&16_u32.to_ne_bytes());
    failure[4..8].copy_from_slice(&(-Errno::IO.raw_os_error()).to_ne_bytes());
    failure[8..].copy_from_slice(&id.to_ne_bytes());
    if let Err(error) = rustix::io::write(&connection.device, &failure) {
        debug!("{mountpoint}: request {id}: {error}");
    }
}
