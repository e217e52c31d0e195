//! Mounts of images by the kernel's own file systems, and bind mounts of them.
//!
//! The mount API (`fsopen`, `fsconfig`, `fsmount`) takes one device at a time. mount(2) takes 4095
//! bytes of options, which some 40 blobs exceed.

use std::{
    collections::BTreeSet,
    ffi::CStr,
    fmt,
    fs::{self, File},
    io::{self, Read as _},
    os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    sync::Mutex,
};

use lazuli_sys::{
    device_mapper::{self, JoinedDisk},
    loop_device::LoopDevice,
};
use rustix::{
    fs::{Advice, AtFlags, CWD, Mode, OFlags, StatxFlags, fadvise, makedev, open, statx},
    io::Errno,
    mount::{
        FsMountFlags, FsOpenFlags, FsPickFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags,
        UnmountFlags, fsconfig_create, fsconfig_reconfigure, fsconfig_set_flag,
        fsconfig_set_string, fsmount, fsopen, fspick, move_mount, open_tree,
    },
};
use serde::{Deserialize, Serialize};

use crate::sync::lock;

/// Read-ahead of image mounts in KiB. The kernel's 128 would make a round trip of every 128 KiB of
/// a cold file, and costs a third of the speed of a warm one.
const READ_AHEAD_KB: u32 = 1024;

const BDI: &str = "/sys/class/bdi";

const BLOCK: &str = "/sys/block";

const SEQUENCE: &str = "diskseq";

/// The meaning of an image's set-user-id bits and file capabilities at a mount point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Suid {
    /// As on any root file system: containers need them. The mode of the directories above has to
    /// keep users of the node out.
    Keep,
    /// None: a user of the node may run programs there, and must not become another user.
    Ignore,
}

/// A failed mount operation.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} {}{}", path.display(), hint(log))]
pub struct MountError {
    /// The operation.
    pub action: &'static str,
    /// Its file or directory.
    pub path: PathBuf,
    /// The kernel's log of this mount; often empty.
    pub log: String,
    /// The operating system's reason.
    pub source: io::Error,
}

fn hint(log: &str) -> String {
    if log.is_empty() { String::new() } else { format!(" ({log})") }
}

impl MountError {
    pub(super) fn new(action: &'static str, path: &Path, source: impl Into<io::Error>) -> Self {
        MountError { action, path: path.into(), log: String::new(), source: source.into() }
    }
}

impl From<MountError> for io::Error {
    fn from(error: MountError) -> Self {
        io::Error::new(error.source.kind(), error)
    }
}

/// The backing device of a file system, which the kernel removes with the last user of the file
/// system: a device of its own for EROFS on files, the loop device with the metadata for EROFS on
/// loop devices, the joined disk for ext4.
///
/// A file system can live longer than every mount of it that we know: in an overlay mount on top,
/// in another mount namespace, or in a file that is still open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Backing(Vec<String>);

impl Backing {
    /// Returns whether anything still uses the file system. True when in doubt.
    pub fn is_alive(&self) -> bool {
        self.0.is_empty() || self.0.iter().any(|name| is_alive(name))
    }

    /// Identifies a file system on a loop device: `loop7-123`, with the number that the kernel
    /// gives anew to each file behind it.
    fn of_disk(device: &LoopDevice) -> io::Result<Self> {
        let name = format!("loop{}", device.number());
        let sequence = fs::read_to_string(Path::new(BLOCK).join(&name).join(SEQUENCE))?;
        Ok(Backing(vec![format!("{name}-{}", sequence.trim_end())]))
    }

    /// Identifies a file system on a joined disk: `dm-3-lazuli-4f1c…`, with its uuid.
    fn of_joined(disk: &JoinedDisk) -> Self {
        Backing(vec![format!("{}-{}", disk.name(), disk.uuid())])
    }

    /// The disk that has the metadata, if it is on one.
    pub fn disk(&self) -> Option<PathBuf> {
        Some(Path::new("/dev").join(disk(self.0.first()?)?.name()))
    }

    /// The file system on it.
    pub fn format(&self) -> Format {
        match self.0.first().map(|name| disk(name)) {
            Some(Some(Disk::Joined { .. })) => Format::Ext4,
            _ => Format::Erofs,
        }
    }
}

/// A file system of the kernel that shows images.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// On files, or on loop devices.
    Erofs,
    /// On a joined disk.
    Ext4,
}

impl Format {
    /// The kernel's name for it.
    fn name(self) -> &'static CStr {
        match self {
            Format::Erofs => c"erofs",
            Format::Ext4 => c"ext4",
        }
    }
}

/// A disk, and what tells it from others that had its name before or have it later.
enum Disk<'a> {
    Loop { name: &'a str, sequence: &'a str },
    Joined { name: &'a str, uuid: &'a str },
}

impl Disk<'_> {
    fn name(&self) -> &str {
        match self {
            Disk::Loop { name, .. } | Disk::Joined { name, .. } => name,
        }
    }
}

/// `loop7-123` or `dm-3-lazuli-4f1c…`.
fn disk(name: &str) -> Option<Disk<'_>> {
    if name.starts_with("loop") {
        let (name, sequence) = name.split_once('-')?;
        return Some(Disk::Loop { name, sequence });
    }
    let number = name.strip_prefix("dm-")?.find('-')?;
    let (name, uuid) = name.split_at("dm-".len() + number);
    Some(Disk::Joined { name, uuid: &uuid[1..] })
}

fn is_alive(name: &str) -> bool {
    match disk(name) {
        Some(Disk::Loop { name, sequence }) => {
            let device = Path::new(BLOCK).join(name);
            let now = fs::read_to_string(device.join(SEQUENCE));
            now.is_ok_and(|now| now.trim_end() == sequence) && device.join("loop").exists()
        }
        Some(Disk::Joined { name, uuid }) => {
            device_mapper::uuid_of(name).is_some_and(|now| now == uuid)
        }
        None => Path::new(BDI).join(name).exists(),
    }
}

impl fmt::Display for Backing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() { f.write_str("unknown") } else { f.write_str(&self.0.join("+")) }
    }
}

/// An image, mounted detached. Dropping it releases the file system; bind mounts of it stay.
#[derive(Debug)]
pub struct ImageMount {
    tree: OwnedFd,
    backing: Backing,
    /// Dropped after the rest.
    _last: Option<Box<dyn fmt::Debug + Send + Sync>>,
}

impl ImageMount {
    /// Mounts the image `bootstrap` as EROFS with `devices`, in the order of its device table.
    ///
    /// The mount is read-only and `nodev`: device nodes of an image are data of the image and must
    /// not open devices of the node. Containers are not limited by that, as overlayfs opens device
    /// nodes by the flags of its own mount, and runtimes mount their own /dev. Whether set-user-id
    /// programs and file capabilities work is decided where it is bound.
    ///
    /// Pre-content marks on the devices must exist before this is called: the kernel looks for them
    /// when it opens the files, and never again.
    pub fn mount(bootstrap: &Path, devices: &[BorrowedFd<'_>]) -> Result<Self, MountError> {
        // The kernel reads inodes through the page cache of the bootstrap, one block at a time.
        preread(bootstrap, u64::MAX).map_err(|error| MountError::new("read", bootstrap, error))?;
        let (tree, backing) = create(bootstrap, devices)?;
        Ok(ImageMount { tree, backing, _last: None })
    }

    /// Mounts the image as EROFS with its bootstrap on the disk `primary` and its `devices` in the
    /// order of its device table. Otherwise like [`ImageMount::mount`].
    pub fn mount_disks(primary: &LoopDevice, devices: &[PathBuf]) -> Result<Self, MountError> {
        let source = primary.path();
        let backing = Backing::of_disk(primary)
            .map_err(|error| MountError::new("find out about", &source, error))?;
        ImageMount::mount_on(&source, u64::MAX, devices, backing)
    }

    /// Mounts the image as ext4 on a disk that begins with `metadata` bytes of names and
    /// attributes. Otherwise like [`ImageMount::mount`].
    pub fn mount_joined(disk: &JoinedDisk, metadata: u64) -> Result<Self, MountError> {
        ImageMount::mount_on(&disk.path(), metadata, &[], Backing::of_joined(disk))
    }

    fn mount_on(
        source: &Path,
        metadata: u64,
        devices: &[PathBuf],
        backing: Backing,
    ) -> Result<Self, MountError> {
        // The read-ahead of a file system is that of the disk with its metadata.
        let name = source.file_name().unwrap_or_default();
        raise_read_ahead(&Path::new(BLOCK).join(name).join("queue"));
        preread(source, metadata).map_err(|error| MountError::new("read", source, error))?;
        let context = configure(backing.format(), source, devices)?;
        fsconfig_create(context.as_fd()).map_err(|error| refused(&context, source, error))?;
        let tree = detached(&context, source, Suid::Keep)?;
        Ok(ImageMount { tree, backing, _last: None })
    }

    /// The same with something that is dropped after everything that this process has of the mount.
    #[must_use]
    pub fn with_last(self, last: impl fmt::Debug + Send + Sync + 'static) -> Self {
        ImageMount { _last: Some(Box::new(last)), ..self }
    }

    /// Takes over the topmost mount at `path`, without mounts below it. Marks have to be back on
    /// its devices before it is read.
    pub fn adopt(path: &Path, backing: Backing) -> Result<Self, MountError> {
        let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
        let tree = open_tree(CWD, path, flags)
            .map_err(|error| MountError::new("take over", path, error))?;
        Ok(ImageMount { tree, backing, _last: None })
    }

    /// Shows the image at the directory `to`, too.
    pub fn bind(&self, to: &Path, suid: Suid) -> io::Result<()> {
        let tree = self.another(suid)?;
        Ok(move_mount(tree, c"", CWD, to, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?)
    }

    /// Another mount of the file system, attached nowhere.
    fn another(&self, suid: Suid) -> io::Result<OwnedFd> {
        let flags = OpenTreeFlags::OPEN_TREE_CLONE
            | OpenTreeFlags::OPEN_TREE_CLOEXEC
            | OpenTreeFlags::AT_EMPTY_PATH;
        match (open_tree(&self.tree, c"", flags), self.backing.disk()) {
            // Before Linux 6.15 a mount that is attached nowhere cannot be cloned. To mount a disk
            // again is to mount the file system that is on it.
            (Err(Errno::INVAL), Some(disk)) => {
                let context = configure(self.backing.format(), &disk, &[])?;
                let again = fsconfig_create(context.as_fd());
                again.map_err(|error| refused(&context, &disk, error))?;
                Ok(detached(&context, &disk, suid)?)
            }
            (tree, _) => {
                let tree = tree?;
                if suid == Suid::Ignore {
                    lazuli_sys::mount::ignore_suid(tree.as_fd())?;
                }
                Ok(tree)
            }
        }
    }

    /// Makes the kernel read the devices with direct I/O from now on: one copy of the data in
    /// memory instead of two, and a speed that doesn't collapse on busy processors. While data
    /// still arrives, every reader would have to wait until the disk has the bytes just written, so
    /// a mount starts without. Fails on kernels before 6.15, and on file systems without support.
    pub fn read_directly(&self) -> io::Result<()> {
        self.reconfigure(Some(c"directio"))
    }

    /// Takes [`ImageMount::read_directly`] back. Reads that have begun end as they are.
    pub fn read_through_cache(&self) -> io::Result<()> {
        self.reconfigure(None)
    }

    fn reconfigure(&self, option: Option<&CStr>) -> io::Result<()> {
        let flags = FsPickFlags::FSPICK_CLOEXEC | FsPickFlags::FSPICK_EMPTY_PATH;
        let context = fspick(&self.tree, c"", flags)?;
        // The kernel resets options that are not named here to their defaults.
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

    /// Tells whether the file system lives after this is dropped.
    pub fn backing(&self) -> &Backing {
        &self.backing
    }
}

impl AsFd for ImageMount {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.tree.as_fd()
    }
}

/// A mount that is attached nowhere, and its backing device: one name in /sys/class/bdi, more when
/// another process mounted at the same moment.
pub(super) fn create(
    bootstrap: &Path,
    devices: &[BorrowedFd<'_>],
) -> Result<(OwnedFd, Backing), MountError> {
    // By descriptor, so that a renamed file cannot take its place.
    let path = |device: &BorrowedFd<'_>| format!("/proc/self/fd/{}", device.as_raw_fd()).into();
    let devices: Vec<PathBuf> = devices.iter().map(path).collect();
    let context = configure(Format::Erofs, bootstrap, &devices)?;
    let (bdi, created) = watch_bdi(|| fsconfig_create(context.as_fd()));
    created.map_err(|error| refused(&context, bootstrap, error))?;
    match &bdi[..] {
        [name] => raise_read_ahead(&Path::new(BDI).join(name)),
        // Another program mounted in the same instant. Its read-ahead is not ours to change.
        names => tracing::warn!(?names, "cannot tell whose read-ahead to raise"),
    }
    Ok((detached(&context, bootstrap, Suid::Keep)?, Backing(bdi)))
}

/// `directory` is that of a backing device or of the queue of a disk.
fn raise_read_ahead(directory: &Path) {
    let path = directory.join("read_ahead_kb");
    if let Err(error) = fs::write(&path, READ_AHEAD_KB.to_string()) {
        tracing::warn!(path = %path.display(), %error, "cannot raise the read-ahead");
    }
}

/// The mount of a file system, attached nowhere.
fn detached(context: &OwnedFd, source: &Path, suid: Suid) -> Result<OwnedFd, MountError> {
    let mut attributes = MountAttrFlags::MOUNT_ATTR_RDONLY | MountAttrFlags::MOUNT_ATTR_NODEV;
    attributes.set(MountAttrFlags::MOUNT_ATTR_NOSUID, suid == Suid::Ignore);
    fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes)
        .map_err(|error| refused(context, source, error))
}

fn configure(format: Format, source: &Path, devices: &[PathBuf]) -> Result<OwnedFd, MountError> {
    let refused_early = |error| MountError::new("mount", source, error);
    let context = fsopen(format.name(), FsOpenFlags::FSOPEN_CLOEXEC).map_err(refused_early)?;
    let set = || {
        fsconfig_set_string(context.as_fd(), c"source", source)?;
        for device in devices {
            fsconfig_set_string(context.as_fd(), c"device", device)?;
        }
        fsconfig_set_flag(context.as_fd(), c"ro")
    };
    set().map_err(|error: Errno| refused(&context, source, error))?;
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

/// Runs `create`, and returns the EROFS backing devices that appeared: the kernel doesn't name a
/// file system's device, but only a new file system creates one.
fn watch_bdi<T>(create: impl FnOnce() -> T) -> (Vec<String>, T) {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _guard = lock(&ONE_AT_A_TIME);
    let before = list_bdi();
    let result = create();
    (list_bdi().difference(&before).cloned().collect(), result)
}

fn list_bdi() -> BTreeSet<String> {
    let entries = fs::read_dir(BDI).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter(|name| name.starts_with("erofs-")).collect()
}

/// Reads a file, or so many bytes of it, into the page cache.
fn preread(path: &Path, bytes: u64) -> io::Result<()> {
    let file = File::open(path)?;
    // Not what is behind them.
    fadvise(&file, 0, None, Advice::Random)?;
    let mut file = file.take(bytes);
    let mut buffer = vec![0; 1 << 20];
    while file.read(&mut buffer)? > 0 {}
    Ok(())
}

/// The device number of the file system at `path`, as in stat(2). Sends no request to that file
/// system: this process may be the one to answer, and a thread that waits for its own process keeps
/// it from ending.
pub fn device(path: &Path) -> io::Result<u64> {
    let found = statx(CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::TYPE)?;
    Ok(makedev(found.stx_dev_major, found.stx_dev_minor))
}

/// The path without symbolic links. Asks nothing of the file system there either.
pub fn real_path(path: &Path) -> io::Result<PathBuf> {
    let there = open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    fs::read_link(format!("/proc/self/fd/{}", there.as_raw_fd()))
}

/// Replaces the mount at `path` by a detached one. On Linux 6.5 and later, a mount is visible there
/// at every instant.
pub fn replace(path: &Path, mount: BorrowedFd<'_>) -> io::Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    if move_mount(mount, c"", CWD, path, flags | MoveMountFlags::MOVE_MOUNT_BENEATH).is_ok() {
        return detach(path);
    }
    detach(path)?;
    Ok(move_mount(mount, c"", CWD, path, flags)?)
}

/// Unmounts the mount at `path`; fails with [`io::ErrorKind::ResourceBusy`] while a process uses
/// it.
pub fn unmount(path: &Path) -> io::Result<()> {
    Ok(rustix::mount::unmount(path, UnmountFlags::NOFOLLOW)?)
}

/// Detaches the mount at `path`; open files stay open.
pub fn detach(path: &Path) -> io::Result<()> {
    Ok(rustix::mount::unmount(path, UnmountFlags::NOFOLLOW | UnmountFlags::DETACH)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backing_devices_are_told_apart() {
        let backing = |names: &[&str]| Backing(names.iter().map(|name| (*name).into()).collect());
        assert_eq!(backing(&["loop7-123"]).disk(), Some("/dev/loop7".into()));
        assert_eq!(backing(&["dm-3-lazuli-4f-1c"]).disk(), Some("/dev/dm-3".into()));
        assert_eq!(backing(&["erofs-12"]).disk(), None);
        let format = |name| backing(&[name]).format();
        let formats = ["loop7-123", "dm-3-lazuli-4f", "erofs-12"].map(format);
        assert_eq!(formats, [Format::Erofs, Format::Ext4, Format::Erofs]);
        assert_eq!(backing(&["loop7-123"]).to_string(), "loop7-123");
        assert!(!backing(&["loop999999-1"]).is_alive());
        assert!(!backing(&["dm-999999-lazuli-4f"]).is_alive());
        assert!(!backing(&["erofs-999999999"]).is_alive());
        assert!(backing(&[]).is_alive(), "in doubt");
    }
}
