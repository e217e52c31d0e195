//! Linux and `e2fsck` read our ext4 metadata.

mod limits;
mod odd;

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsStr,
    fs::{self, File},
    io::{ErrorKind, Write},
    os::unix::{ffi::OsStrExt, fs::MetadataExt},
    path::{Path, PathBuf},
    process::Command,
};

use lazuli_image::{
    BLOCK_SIZE, Codec, Inode, Kind, Tree,
    ext4::{Layout, plan},
    rafs::{Bootstrap, write_bootstrap},
};
use lazuli_testkit::kernel::{Feature, require, skip};
use rustix::{
    fs::{lgetxattr, llistxattr},
    mount::{UnmountFlags, unmount},
};

use self::odd::odd;
use crate::support::{
    BlobBuilder, Sample, add, assert_chunks, flatten, metadata, records, small_chunks, small_sample,
};

const UUID: [u8; 16] = *b"a file system id";

/// The metadata of an image.
fn written(bootstrap: &[u8]) -> (Layout, Vec<u8>) {
    let bootstrap = Bootstrap::open(bootstrap).unwrap();
    let plan = plan(&bootstrap).unwrap();
    let mut metadata = Vec::new();
    plan.write(UUID, &mut metadata).unwrap();
    assert_eq!(plan.layout().metadata * BLOCK_SIZE, metadata.len() as u64);
    (plan.layout(), metadata)
}

/// Writes the device of `sample` to a file.
fn device(sample: &Sample, path: &Path) {
    let (layout, metadata) = written(&sample.bootstrap);
    let mut file = File::create(path).unwrap();
    file.write_all(&metadata).unwrap();
    for (blob, blocks) in sample.blobs.iter().zip(&layout.blobs) {
        file.write_all(&blob.decoded).unwrap();
        let padding = blocks * BLOCK_SIZE - blob.decoded.len() as u64;
        file.write_all(&vec![0; padding as usize]).unwrap();
    }
}

struct Mounted(PathBuf);

impl Mounted {
    /// `None` where this machine cannot.
    fn new(device: &Path, at: &Path) -> Option<Self> {
        if !require(Feature::Root) || !require(Feature::Program("losetup")) {
            return None;
        }
        if !fs::read_to_string("/proc/filesystems").unwrap().contains("\text4\n") {
            skip("ext4", "the kernel has none");
            return None;
        }
        fs::create_dir(at).unwrap();
        let mut mount = Command::new("mount");
        let output = mount.args(["-t", "ext4", "-o", "ro,loop"]).args([device, at]).output();
        let output = output.unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Some(Mounted(at.to_owned()))
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = unmount(&self.0, UnmountFlags::DETACH);
    }
}

/// Runs `e2fsck` on a device, which may find nothing wrong but that there is no `lost+found`.
fn check(device: &Path) {
    if !require(Feature::Program("e2fsck")) {
        return;
    }
    let output = Command::new("e2fsck").arg("-fn").arg(device).output().unwrap();
    let shown = String::from_utf8_lossy(&output.stdout);
    let expected = |line: &str| {
        line.is_empty()
            || line.starts_with("Pass ")
            || line == "/lost+found not found.  Create? no"
            || line.contains(" files (") && line.ends_with(" blocks")
            || line.ends_with("********** WARNING: Filesystem still has errors **********")
    };
    assert!(shown.lines().all(expected), "{shown}");
    assert!(shown.contains("Pass 5"), "{shown}");
}

#[test]
fn the_kernel_shows_the_tree_of_the_bootstrap() {
    let directory = tempfile::tempdir().unwrap();
    let sample = odd();
    let path = directory.path().join("device");
    device(&sample, &path);
    check(&path);
    let Some(mounted) = Mounted::new(&path, &directory.path().join("mnt")) else { return };

    let bootstrap = Bootstrap::open(&sample.bootstrap[..]).unwrap();
    let expected = flatten(&sample.tree);
    let mut found = 0;
    let mut pending = vec![(Vec::new(), mounted.0.clone(), bootstrap.root())];
    while let Some((path, real, nid)) = pending.pop() {
        found += 1;
        let (inode, first) = &expected[&path];
        let stat = fs::symlink_metadata(&real).unwrap();
        let shown = path.escape_ascii().to_string();
        let links = bootstrap.inode(nid).unwrap().nlink;
        compare(&shown, inode, &real, &stat, links);
        let same = mounted.0.join(OsStr::from_bytes(first.strip_prefix(b"/").unwrap_or(first)));
        assert_eq!(stat.ino(), fs::symlink_metadata(same).unwrap().ino(), "{shown}");
        match &inode.kind {
            Kind::Directory(_) => {
                let entries = bootstrap.read_dir(nid, 0).unwrap().map(Result::unwrap);
                let entries: Vec<_> = entries.filter(|entry| !entry.is_dot()).collect();
                let names = fs::read_dir(&real).unwrap().map(|entry| entry.unwrap().file_name());
                let names: Vec<_> = names.collect();
                let unique: BTreeSet<_> = names.iter().map(|name| name.as_bytes()).collect();
                assert_eq!(unique.len(), names.len(), "{shown}");
                assert_eq!(names.len(), entries.len(), "{shown}");
                for entry in entries {
                    let name = entry.name;
                    let real = real.join(OsStr::from_bytes(name));
                    pending.push(([&path[..], b"/", name].concat(), real.clone(), entry.nid));
                    let absent = [b"\x01", &name[1..]].concat();
                    let absent = real.with_file_name(OsStr::from_bytes(&absent));
                    let absent = fs::symlink_metadata(absent);
                    assert_eq!(absent.unwrap_err().kind(), ErrorKind::NotFound, "{shown}");
                }
            }
            Kind::Regular { size, chunks } => {
                let content = fs::read(&real).unwrap();
                assert_eq!(content.len() as u64, *size, "{shown}");
                assert_chunks(&bootstrap, chunks, &content, &shown);
            }
            _ => {}
        }
    }
    assert_eq!(found, expected.len());
}

/// What `stat`, `readlink` and `getxattr` say.
fn compare(shown: &str, inode: &Inode, real: &Path, stat: &fs::Metadata, links: u32) {
    let Inode { kind, metadata } = inode;
    assert_eq!(stat.mode(), u32::from(kind.mode() | metadata.permissions), "{shown}");
    assert_eq!((stat.uid(), stat.gid()), (metadata.uid, metadata.gid), "{shown}");
    assert_eq!(stat.nlink(), u64::from(links), "{shown}");
    let time = (metadata.mtime.seconds, i64::from(metadata.mtime.nanoseconds));
    for found in [
        (stat.mtime(), stat.mtime_nsec()),
        (stat.ctime(), stat.ctime_nsec()),
        (stat.atime(), stat.atime_nsec()),
    ] {
        assert_eq!(found, time, "{shown}");
    }
    let mut buffer = [0_u8; 8192];
    let len = llistxattr(real, &mut buffer[..]).unwrap();
    let names: BTreeSet<Vec<u8>> = buffer[..len]
        .split(|byte| *byte == 0)
        .filter(|name| !name.is_empty() && *name != b"security.selinux")
        .map(<[u8]>::to_vec)
        .collect();
    let expected: BTreeSet<Vec<u8>> = metadata.xattrs.keys().map(|name| name.to_vec()).collect();
    assert_eq!(names, expected, "{shown}");
    for (name, value) in &metadata.xattrs {
        let len = lgetxattr(real, std::str::from_utf8(name).unwrap(), &mut buffer[..]).unwrap();
        assert_eq!(buffer[..len], **value, "{shown}");
    }
    match kind {
        Kind::Symlink(target) => {
            assert_eq!(fs::read_link(real).unwrap().as_os_str().as_bytes(), &**target, "{shown}");
        }
        Kind::CharDevice(device) | Kind::BlockDevice(device) => {
            let found = (rustix::fs::major(stat.rdev()), rustix::fs::minor(stat.rdev()));
            assert_eq!(found, (device.major, device.minor), "{shown}");
        }
        _ => {}
    }
}

/// Few blocks of content, so that groups have to be smaller than usual to hold all inodes; then
/// blobs of several groups.
#[test]
fn images_of_many_inodes_and_of_many_blocks_are_sound() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("device");
    let mut tree = Tree::new(metadata(0o755));
    let mut parent = Tree::ROOT;
    for number in 0..70_000 {
        if number % 1000 == 0 {
            let name = format!("directory {number}");
            parent = add(&mut tree, Tree::ROOT, name.as_bytes(), Kind::Directory(BTreeMap::new()));
        }
        add(&mut tree, parent, format!("{number}").as_bytes(), Kind::Fifo);
    }
    let bootstrap = write_bootstrap(&tree, &[], &small_chunks()).unwrap();
    device(&Sample { tree, blobs: vec![], bootstrap }, &path);
    check(&path);
    let mounted = Mounted::new(&path, &directory.path().join("many"));
    if let Some(mounted) = mounted {
        let last = fs::read_dir(mounted.0.join("directory 69000")).unwrap();
        assert_eq!(last.count(), 1000);
    }

    let mut blob = BlobBuilder::new(Codec::Zstd, small_chunks());
    let mut tree = Tree::new(metadata(0o755));
    add(&mut tree, Tree::ROOT, b"first", blob.file(0, &vec![1; 140 << 20]));
    blob.file(0, &vec![2; 10 << 20]);
    add(&mut tree, Tree::ROOT, b"last", blob.file(0, b"the end"));
    let blobs = vec![blob.finish()];
    let bootstrap = write_bootstrap(&tree, &records(&blobs), &small_chunks()).unwrap();
    device(&Sample { tree, blobs, bootstrap }, &path);
    check(&path);
    let mounted = Mounted::new(&path, &directory.path().join("large"));
    if let Some(mounted) = mounted {
        assert_eq!(fs::read(mounted.0.join("last")).unwrap(), b"the end");
        assert!(fs::read(mounted.0.join("first")).unwrap() == vec![1; 140 << 20]);
    }
}

#[test]
fn the_same_bootstrap_gives_the_same_bytes() {
    let sample = small_sample();
    assert!(written(&sample.bootstrap) == written(&sample.bootstrap));
}
