//! EROFS mounts of images, and bind mounts of them.
//!
//! The mount API (`fsopen`, `fsconfig`, `fsmount`) takes one device at a time. mount(2) takes 4095 bytes of
//! options, which some 40 blobs exceed.

use std::{
    collections::BTreeSet,
    ffi::OsString,
    fs::{self, File},
    io::{self, Read as _},
    os::{
        fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd},
        unix::ffi::OsStringExt as _,
    },
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use rustix::{
    fs::{Advice, CWD},
    io::Errno,
    mount::{
        FsMountFlags, FsOpenFlags, FsPickFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags,
        UnmountFlags, fsconfig_create, fsconfig_reconfigure, fsconfig_set_flag,
        fsconfig_set_string, fsmount, fsopen, fspick, move_mount, open_tree,
    },
};

/// Read-ahead of image mounts in KiB. The kernel's 128 would make a round trip of every 128 KiB of a cold
/// file, and costs a third of the speed of a warm one.
const READ_AHEAD_KB: u32 = 1024;

const BDI: &str = "/sys/class/bdi";

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

/// The mount of an EROFS image, and the file system behind it.
///
/// The file system can live longer than the mount: in an overlay mount on top of it, in another mount namespace,
/// or in a file that is still open after [`detach`]. Dropping this unmounts nothing.
#[derive(Debug)]
pub struct Erofs {
    path: PathBuf,
    bdi: Vec<OsString>,
}

impl Erofs {
    /// Mounts the image `bootstrap` with `devices`, in the order of its device table, at `path`.
    ///
    /// The mount is read-only and `nodev`: device nodes of an image are data of the image and must not open
    /// devices of the node. Containers are not limited by that, as overlayfs opens device nodes by
    /// the flags of its own mount, and runtimes mount their own /dev. Set-user-id programs and file
    /// capabilities keep working, since containers use them; who must not reach them is kept out by the mode
    /// of the directories above `path`.
    ///
    /// Pre-content marks on the devices must exist before this is called: the kernel looks for them
    /// when it opens the files, and never again.
    pub fn mount(
        bootstrap: &Path,
        devices: &[BorrowedFd<'_>],
        path: &Path,
    ) -> Result<Self, MountError> {
        // The kernel reads inodes through the page cache of the bootstrap, one block at a time.
        preread(bootstrap).map_err(|error| MountError::new("read", bootstrap, error))?;
        let (mount, bdi) = create(bootstrap, devices)?;
        attach(&mount, path).map_err(|error| MountError::new("attach an image at", path, error))?;
        Ok(Erofs { path: path.to_owned(), bdi })
    }

    /// Takes over a mount that an earlier process made. Marks have to be back on its devices.
    ///
    /// While nobody listened, readers may have put holes into the page cache as zeros. They are dropped here by
    /// going through all files; a program that has such a page mapped keeps it.
    pub fn adopt(path: &Path) -> Result<Self, MountError> {
        forget_pages(path).map_err(|error| MountError::new("take over", path, error))?;
        // The kernel does not tell which of them is ours, so it counts as alive while any of them is.
        Ok(Erofs { path: path.to_owned(), bdi: list_bdi().into_iter().collect() })
    }

    /// Has the kernel read the devices past their page cache from now on: one copy of the data in memory instead
    /// of two, and a speed that does not collapse when processors are busy. While data still
    /// arrives, that would make every reader wait until the disk has what was just written, so a mount
    /// starts without. Fails on kernels (before 6.15) and file systems that cannot do it.
    pub fn read_directly(&self) -> Result<(), MountError> {
        let set = || {
            let context = fspick(CWD, &self.path, FsPickFlags::FSPICK_CLOEXEC)?;
            fsconfig_set_flag(context.as_fd(), c"ro")?;
            fsconfig_set_flag(context.as_fd(), c"directio")?;
            fsconfig_reconfigure(context.as_fd())
        };
        set().map_err(|error| MountError::new("have direct reads of", &self.path, error))
    }

    /// Where it is mounted, or was.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether anything still uses the file system. The kernel removes its backing device with the last
    /// user. True when in doubt.
    pub fn is_alive(&self) -> bool {
        self.bdi.is_empty() || self.bdi.iter().any(|name| Path::new(BDI).join(name).exists())
    }
}

/// Drops the clean pages of every file below `dir` that nobody has mapped.
fn forget_pages(dir: &Path) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let kind = entry.file_type()?;
        if kind.is_dir() {
            forget_pages(&entry.path())?;
        } else if kind.is_file() {
            rustix::fs::fadvise(File::open(entry.path())?, 0, None, Advice::DontNeed)?;
        }
    }
    Ok(())
}

/// A mount that is attached nowhere yet, and the names in /sys/class/bdi of its backing device: one, more when
/// somebody else mounted at the same moment.
pub(super) fn create(
    bootstrap: &Path,
    devices: &[BorrowedFd<'_>],
) -> Result<(OwnedFd, Vec<OsString>), MountError> {
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
    Ok((mount, bdi))
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
fn watch_bdi<T>(create: impl FnOnce() -> T) -> (Vec<OsString>, T) {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let before = list_bdi();
    let result = create();
    (list_bdi().difference(&before).cloned().collect(), result)
}

fn list_bdi() -> BTreeSet<OsString> {
    let entries = fs::read_dir(BDI).into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name());
    names.filter(|name| name.as_encoded_bytes().starts_with(b"erofs-")).collect()
}

fn preread(path: &Path) -> io::Result<()> {
    let mut file = File::open(path)?;
    let mut buffer = vec![0; 1 << 20];
    while file.read(&mut buffer)? > 0 {}
    Ok(())
}

fn attach(mount: &OwnedFd, path: &Path) -> Result<(), Errno> {
    move_mount(mount.as_fd(), c"", CWD, path, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
}

/// Makes what is mounted at `from` appear at `to` as well, with the same flags.
pub fn bind(from: &Path, to: &Path) -> io::Result<()> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    Ok(attach(&open_tree(CWD, from, flags)?, to)?)
}

/// Unmounts what is mounted at `path`; fails with [`io::ErrorKind::ResourceBusy`] while anybody uses it.
pub fn unmount(path: &Path) -> io::Result<()> {
    Ok(rustix::mount::unmount(path, UnmountFlags::NOFOLLOW)?)
}

/// Takes what is mounted at `path` out of the tree; who has files open in it keeps them.
pub fn detach(path: &Path) -> io::Result<()> {
    Ok(rustix::mount::unmount(path, UnmountFlags::NOFOLLOW | UnmountFlags::DETACH)?)
}

/// Every place in this process's namespace where something is mounted, in the order of mounting.
pub fn mount_points() -> io::Result<Vec<PathBuf>> {
    let text = fs::read("/proc/self/mountinfo")?;
    Ok(text.split(|byte| *byte == b'\n').filter_map(mount_point).collect())
}

/// The fifth field of `36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw`.
fn mount_point(line: &[u8]) -> Option<PathBuf> {
    let field = line.split(|byte| *byte == b' ').nth(4)?;
    Some(PathBuf::from(OsString::from_vec(unescape(field))))
}

/// The kernel writes space, tab, newline and backslash as three octal digits.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, tail)) = rest.split_first() {
        let digits = tail.get(..3).filter(|digits| digits.iter().all(|d| (b'0'..b'8').contains(d)));
        match (first, digits) {
            (b'\\', Some(digits)) => {
                let value = digits.iter().fold(0_u32, |value, d| value * 8 + u32::from(d - b'0'));
                bytes.push(value as u8);
                rest = &tail[3..];
            }
            _ => {
                bytes.push(*first);
                rest = tail;
            }
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_mountinfo() {
        let line = b"36 35 0:42 / /a\\040b\\134c\\9 rw,noatime master:1 shared:2 - erofs /x ro";
        assert_eq!(mount_point(line), Some("/a b\\c\\9".into()));
        for line in [&b""[..], b"36 35", b"36 35 0:42 /"] {
            assert_eq!(mount_point(line), None, "{}", line.escape_ascii());
        }
        assert!(mount_points().unwrap().contains(&"/".into()));
    }
}
