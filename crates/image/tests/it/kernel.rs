//! Linux and `fsck.erofs` read our images.

use std::{
    fs,
    io::ErrorKind,
    os::unix::{ffi::OsStrExt, fs::MetadataExt},
    path::Path,
    process::Command,
};

use lazuli_image::{Kind, rafs::Bootstrap};
use lazuli_testkit::kernel::{Feature, require};
use rustix::{
    fs::lgetxattr,
    mount::{MountFlags, UnmountFlags, mount, unmount},
};

use crate::support::{Sample, assert_chunks, flatten, sample};

/// Writes bootstrap and decoded blobs to `directory`, and returns the device options.
fn write(sample: &Sample, directory: &Path) -> Vec<String> {
    fs::write(directory.join("boot"), &sample.bootstrap).unwrap();
    let devices = sample.blobs.iter().enumerate().map(|(index, blob)| {
        let path = directory.join(format!("blob{index}"));
        fs::write(&path, &blob.decoded).unwrap();
        path.to_str().unwrap().to_owned()
    });
    devices.collect()
}

struct Mounted<'a>(&'a Path);

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        let _ = unmount(self.0, UnmountFlags::DETACH);
    }
}

#[test]
fn fsck_accepts_the_sample() {
    if !require(Feature::Program("fsck.erofs")) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let devices = write(&sample(), directory.path());
    let mut fsck = Command::new("fsck.erofs");
    fsck.args(devices.iter().map(|device| format!("--device={device}")));
    let output = fsck.arg(directory.path().join("boot")).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn the_kernel_shows_the_tree_of_the_sample() {
    if !require(Feature::Root) || !require(Feature::ErofsFileBacked) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let sample = sample();
    let devices = write(&sample, directory.path());
    let target = directory.path().join("mnt");
    fs::create_dir(&target).unwrap();
    let options: Vec<String> = devices.iter().map(|device| format!("device={device}")).collect();
    let options = std::ffi::CString::new(options.join(",")).unwrap();
    mount(directory.path().join("boot"), &target, "erofs", MountFlags::RDONLY, &*options).unwrap();
    let _mounted = Mounted(&target);

    let bootstrap = Bootstrap::open(&sample.bootstrap[..]).unwrap();
    let expected = flatten(&sample.tree);
    let mut found = 0;
    let mut pending = vec![(Vec::new(), target.clone())];
    while let Some((path, real)) = pending.pop() {
        found += 1;
        let shown = path.escape_ascii().to_string();
        let (inode, first) = &expected[&path];
        let stat = fs::symlink_metadata(&real).unwrap();
        let mode = inode.kind.mode() | inode.metadata.permissions;
        assert_eq!(stat.mode(), u32::from(mode), "{shown}");
        assert_eq!((stat.uid(), stat.gid()), (inode.metadata.uid, inode.metadata.gid), "{shown}");
        let mtime = inode.metadata.mtime;
        assert_eq!(
            (stat.mtime(), stat.mtime_nsec()),
            (mtime.seconds, mtime.nanoseconds.into()),
            "{shown}"
        );
        let same =
            target.join(std::ffi::OsStr::from_bytes(first.strip_prefix(b"/").unwrap_or(first)));
        assert_eq!(stat.ino(), fs::symlink_metadata(same).unwrap().ino(), "{shown}");
        for (name, value) in &inode.metadata.xattrs {
            let mut buffer = [0; 8192];
            let len =
                lgetxattr(&real, std::str::from_utf8(name).unwrap(), &mut buffer[..]).unwrap();
            assert_eq!(buffer[..len], **value, "{shown}");
        }
        match &inode.kind {
            Kind::Directory(_) => {
                for entry in fs::read_dir(&real).unwrap() {
                    let name = entry.unwrap().file_name();
                    pending.push(([&path[..], b"/", name.as_bytes()].concat(), real.join(name)));
                }
            }
            Kind::Symlink(target) => {
                assert_eq!(fs::read_link(&real).unwrap().as_os_str().as_bytes(), &**target);
            }
            Kind::CharDevice(device) | Kind::BlockDevice(device) => {
                let found = (rustix::fs::major(stat.rdev()), rustix::fs::minor(stat.rdev()));
                assert_eq!(found, (device.major, device.minor), "{shown}");
            }
            Kind::Regular { size, chunks } => {
                let content = fs::read(&real).unwrap();
                assert_eq!(content.len() as u64, *size, "{shown}");
                assert_chunks(&bootstrap, chunks, &content, &shown);
            }
            Kind::Fifo | Kind::Socket => {}
        }
    }
    assert_eq!(found, expected.len());
    let missing = fs::metadata(target.join("missing")).unwrap_err();
    assert_eq!(missing.kind(), ErrorKind::NotFound);
}
