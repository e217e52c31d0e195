//! EROFS mounts of images, and bind mounts of them.
//!
//! The mount API (`fsopen`, `fsconfig`, `fsmount`) takes one device at a time. mount(2) takes 4095 bytes of
//! options, which some 40 blobs exceed.

use std::{
    collections::BTreeSet,
    ffi::CStr,
    fmt,
    fs::{self, File},
    io::{self, Read as _},
    os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use rustix::{
    fs::{AtFlags, CWD, Mode, OFlags, StatxFlags, makedev, open, statx},
    io::Errno,
    mount::{
        FsMountFlags, FsOpenFlags, FsPickFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags,
        UnmountFlags, fsconfig_create, fsconfig_reconfigure, fsconfig_set_flag,
        fsconfig_set_string, fsmount, fsopen, fspick, move_mount, open_tree,
    },
};
use serde::{Deserialize, Serialize};

/// Read-ahead of image mounts in KiB. The kernel's 128 would make a round trip of every 128 KiB of a cold
/// file, and costs a third of the speed of a warm one.
const READ_AHEAD_KB: u32 = 1024;

const BDI: &str = "/sys/class/bdi";

/// What set-user-id bits and file capabilities of an image mean at a mount point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Suid {
    /// As on any root file system: containers need them. The mode of the directories above has to keep users of the node out.
    Keep,
    /// Nothing: a user of the node may run what is there, and must not become another one by it.
    Ignore,
}

/// What could not be mounted.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} {}{}", path.display(), hint(log))]
pub struct MountError {
    /// What was tried.
    pub action: &'static str,
    /// With which file or directory.
    pub path: PathBuf,
    /// What the kernel's log of this mount says; often empty.
    pub log: String,
    /// The operating system's reason.
    pub source: io::Error,
}

fn hint(log: &str) -> String {
    if log.is_empty() { String::new() } else { format!(" ({log})") }
}

impl MountError {
    fn new(action: &'static str, path: &Path, source: impl Into<io::Error>) -> Self {
        MountError { action, path: path.into(), log: String::new(), source: source.into() }
    }
}

impl From<MountError> for io::Error {
    fn from(error: MountError) -> Self {
        io::Error::new(error.source.kind(), error)
    }
}

/// The backing device of an EROFS file system, which the kernel removes with the last user of the file system.
///
/// A file system can live longer than every mount of it that we know: in an overlay mount on top, in another
/// mount namespace, or in a file that is still open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Backing(Vec<String>);

impl Backing {
    /// Whether anything still uses the file system. True when in doubt.
    pub fn is_alive(&self) -> bool {
        self.0.is_empty() || self.0.iter().any(|name| Path::new(BDI).join(name).exists())
    }
}

impl fmt::Display for Backing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() { f.write_str("unknown") } else { f.write_str(&self.0.join("+")) }
    }
}

/// An EROFS image, mounted where nobody sees it. Dropping it lets go of the file system; what was bound stays.
#[derive(Debug)]
pub struct Erofs {
    tree: OwnedFd,
    backing: Backing,
}

impl Erofs {
    /// Mounts the image `bootstrap` with `devices`, in the order of its device table.
    ///
    /// The mount is read-only and `nodev`: device nodes of an image are data of the image and must not open
    /// devices of the node. Containers are not limited by that, as overlayfs opens device nodes by
    /// the flags of its own mount, and runtimes mount their own /dev. Whether set-user-id programs and file
    /// capabilities work is decided where it is bound.
    ///
    /// Pre-content marks on the devices must exist before this is called: the kernel looks for them
    /// when it opens the files, and never again.
    pub fn mount(bootstrap: &Path, devices: &[BorrowedFd<'_>]) -> Result<Self, MountError> {
        // The kernel reads inodes through the page cache of the bootstrap, one block at a time.
        preread(bootstrap).map_err(|error| MountError::new("read", bootstrap, error))?;
        let (tree, backing) = create(bootstrap, devices)?;
        Ok(Erofs { tree, backing })
    }

    /// Takes over what is mounted at `path`: the last mount there, and nothing that is mounted below it. Marks have
    /// to be back on its devices before anybody reads.
    pub fn adopt(path: &Path, backing: Backing) -> Result<Self, MountError> {
        let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
        let tree = open_tree(CWD, path, flags)
            .map_err(|error| MountError::new("take over", path, error))?;
        Ok(Erofs { tree, backing })
    }

    /// Shows the image at the directory `to`, too.
    pub fn bind(&self, to: &Path, suid: Suid) -> io::Result<()> {
        let flags = OpenTreeFlags::OPEN_TREE_CLONE
            | OpenTreeFlags::OPEN_TREE_CLOEXEC
            | OpenTreeFlags::AT_EMPTY_PATH;
        let tree = open_tree(&self.tree, c"", flags)?;
        if suid == Suid::Ignore {
            lazuli_sys::mount::ignore_suid(tree.as_fd())?;
        }
        Ok(move_mount(tree, c"", CWD, to, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?)
    }

    /// Has the kernel read the devices past their page cache from now on: one copy of the data in memory instead
    /// of two, and a speed that does not collapse when processors are busy. While data still
    /// arrives, that would make every reader wait until the disk has what was just written, so a mount
    /// starts without. Fails on kernels (before 6.15) and file systems that cannot do it.
    pub fn read_directly(&self) -> io::Result<()> {
        self.reconfigure(Some(c"directio"))
    }

    /// Takes [`Erofs::read_directly`] back. Reads that have begun end as they are.
    pub fn read_through_cache(&self) -> io::Result<()> {
        self.reconfigure(None)
    }

    fn reconfigure(&self, option: Option<&CStr>) -> io::Result<()> {
        let flags = FsPickFlags::FSPICK_CLOEXEC | FsPickFlags::FSPICK_EMPTY_PATH;
        let context = fspick(&self.tree, c"", flags)?;
        // What is not named here the kernel sets back to its default.
        for option in [Some(c"ro"), option].into_iter().flatten() {
            fsconfig_set_flag(context.as_fd(), option)?;
        }
        Ok(fsconfig_reconfigure(context.as_fd())?)
    }

    /// A path to its root directory, for this process and as long as this lives.
    pub fn path(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.tree.as_raw_fd()).into()
    }

    /// The device number of its files, as stat(2) shows it.
    pub fn device(&self) -> io::Result<u64> {
        Ok(rustix::fs::fstat(&self.tree)?.st_dev)
    }

    /// What tells whether the file system still lives after this is dropped.
    pub fn backing(&self) -> &Backing {
        &self.backing
    }
}

/// A mount that is attached nowhere, and its backing device: one name in /sys/class/bdi, more when somebody
/// else mounted at the same moment.
pub(super) fn create(
    bootstrap: &Path,
    devices: &[BorrowedFd<'_>],
) -> Result<(OwnedFd, Backing), MountError> {
    let context = configure(bootstrap, devices)?;
    let (bdi, created) = watch_bdi(|| fsconfig_create(context.as_fd()));
    created.map_err(|error| refused(&context, bootstrap, error))?;
    match &bdi[..] {
        [name] => {
            let path = Path::new(BDI).join(name).join("read_ahead_kb");
            if let Err(error) = fs::write(&path, READ_AHEAD_KB.to_string()) {
                tracing::warn!(path = %path.display(), %error, "cannot raise the read-ahead");
            }
        }
        // Another program mounted in the same instant. Its read-ahead is not ours to change.
        names => tracing::warn!(?names, "cannot tell whose read-ahead to raise"),
    }
    let attributes = MountAttrFlags::MOUNT_ATTR_RDONLY | MountAttrFlags::MOUNT_ATTR_NODEV;
    let mount = fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes)
        .map_err(|error| refused(&context, bootstrap, error))?;
    Ok((mount, Backing(bdi)))
}

fn configure(bootstrap: &Path, devices: &[BorrowedFd<'_>]) -> Result<OwnedFd, MountError> {
    let refused_early = |error| MountError::new("mount", bootstrap, error);
    let context = fsopen(c"erofs", FsOpenFlags::FSOPEN_CLOEXEC).map_err(refused_early)?;
    let set = || {
        fsconfig_set_string(context.as_fd(), c"source", bootstrap)?;
        for device in devices {
            // By descriptor, so that it is this file and no other that bears the name meanwhile.
            let path = format!("/proc/self/fd/{}", device.as_raw_fd());
            fsconfig_set_string(context.as_fd(), c"device", path)?;
        }
        fsconfig_set_flag(context.as_fd(), c"ro")
    };
    set().map_err(|error: Errno| refused(&context, bootstrap, error))?;
    Ok(context)
}

/// The error with the messages that the kernel left in the mount context.
fn refused(context: &OwnedFd, bootstrap: &Path, error: Errno) -> MountError {
    let mut log = Vec::new();
    let mut message = [0; 1024];
    // Each read gives one message, `e ` (or `w `, `i `) before the text; ENODATA ends them.
    while let Ok(len) = rustix::io::read(context, &mut message) {
        let text = String::from_utf8_lossy(&message[..len]);
        log.push(text.get(2..).unwrap_or_default().trim().to_owned());
    }
    MountError { log: log.join("; "), ..MountError::new("mount", bootstrap, error) }
}

/// Runs `create` and tells which EROFS backing devices it made: the kernel does not say which device is whose,
/// but only a new file system makes one.
fn watch_bdi<T>(create: impl FnOnce() -> T) -> (Vec<String>, T) {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let before = list_bdi();
    let result = create();
    (list_bdi().difference(&before).cloned().collect(), result)
}

fn list_bdi() -> BTreeSet<String> {
    let entries = fs::read_dir(BDI).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter(|name| name.starts_with("erofs-")).collect()
}

fn preread(path: &Path) -> io::Result<()> {
    let mut file = File::open(path)?;
    let mut buffer = vec![0; 1 << 20];
    while file.read(&mut buffer)? > 0 {}
    Ok(())
}

/// The device number of the file system at `path`, as stat(2) shows it. Asks nothing of that file system: it may be one that
/// this process answers for, and a thread that waits for its own process keeps it from ending.
pub fn device(path: &Path) -> io::Result<u64> {
    let found = statx(CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::TYPE)?;
    Ok(makedev(found.stx_dev_major, found.stx_dev_minor))
}

/// The path without symbolic links. Asks nothing of the file system there either.
pub fn real_path(path: &Path) -> io::Result<PathBuf> {
    let there = open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    fs::read_link(format!("/proc/self/fd/{}", there.as_raw_fd()))
}

/// Puts a mount that is nowhere in the place of the one that is at `path`. On Linux 6.5 and later, at no instant nothing is there.
pub fn replace(path: &Path, mount: BorrowedFd<'_>) -> io::Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    if move_mount(mount, c"", CWD, path, flags | MoveMountFlags::MOVE_MOUNT_BENEATH).is_ok() {
        return detach(path);
    }
    detach(path)?;
    Ok(move_mount(mount, c"", CWD, path, flags)?)
}

/// Unmounts what is mounted at `path`; fails with [`io::ErrorKind::ResourceBusy`] while anybody uses it.
pub fn unmount(path: &Path) -> io::Result<()> {
    Ok(rustix::mount::unmount(path, UnmountFlags::NOFOLLOW)?)
}

/// Takes what is mounted at `path` out of the tree; who has files open in it keeps them.
pub fn detach(path: &Path) -> io::Result<()> {
    Ok(rustix::mount::unmount(path, UnmountFlags::NOFOLLOW | UnmountFlags::DETACH)?)
}
