//! Small ext4 file systems on loop devices: disks that can be full, or lose their power. Needs
//! root, `losetup` and `mkfs.ext4`.

use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::Duration,
};

use rustix::{
    fs::{FallocateFlags, fallocate},
    io::Errno,
    mount::{MountFlags, UnmountFlags, mount, unmount},
};

use crate::kernel::{Feature, require};

/// Returns whether this machine supports it. Reports the missing part otherwise, see [`require`].
pub fn able() -> bool {
    let programs = ["losetup", "mkfs.ext4"].map(Feature::Program);
    require(Feature::Root) && programs.into_iter().all(require)
}

/// A mounted file system. Dropping it unmounts it and takes its loop device away; the image stays.
#[derive(Debug)]
pub struct Ext4 {
    device: PathBuf,
    mountpoint: PathBuf,
}

impl Ext4 {
    /// Makes a file `image` of `size` bytes with an empty file system in it, without blocks that
    /// only root may use.
    pub fn format(image: &Path, size: u64) -> io::Result<()> {
        // An existing file may be special, so it is only opened.
        let file = File::options().write(true).create(true).truncate(false).open(image)?;
        if file.metadata()?.len() != size {
            file.set_len(size)?;
        }
        let mut make = Command::new("mkfs.ext4");
        run(make.args(["-q", "-F", "-m", "0", "-b", "4096"]).arg(image)).map(drop)
    }

    /// Mounts `image` at the directory `mountpoint`. If it was not unmounted, the kernel replays
    /// its journal.
    pub fn mount(image: &Path, mountpoint: &Path) -> io::Result<Self> {
        let mut attach = Command::new("losetup");
        let device = run(attach.args(["--find", "--show"]).arg(image))?;
        let disk = Ext4 { device: device.trim().into(), mountpoint: mountpoint.to_owned() };
        mount(&disk.device, mountpoint, "ext4", MountFlags::NOATIME, None)?;
        Ok(disk)
    }

    /// The same, with an image made for it.
    pub fn create(image: &Path, size: u64, mountpoint: &Path) -> io::Result<Self> {
        Self::format(image, size)?;
        Self::mount(image, mountpoint)
    }

    /// The mountpoint.
    pub fn path(&self) -> &Path {
        &self.mountpoint
    }

    /// Takes all space but about `left` bytes, until the result is removed.
    pub fn fill(&self, left: u64) -> io::Result<PathBuf> {
        let path = self.mountpoint.join("filler");
        let file = File::create(&path)?;
        let state = rustix::fs::fstatvfs(&file)?;
        let mut size = (state.f_bavail * state.f_frsize).saturating_sub(left);
        // The file system may need some blocks for its own metadata.
        let allocate = |size| fallocate(&file, FallocateFlags::empty(), 0, size);
        while allocate(size) == Err(Errno::NOSPC) && size > 0 {
            size = size.saturating_sub(16 << 10);
        }
        while left == 0 && allocate(size + 4096).is_ok() {
            size += 4096;
        }
        Ok(path)
    }
}

impl Drop for Ext4 {
    fn drop(&mut self) {
        // Files that a test left open go a moment later.
        for _ in 0..100 {
            match unmount(&self.mountpoint, UnmountFlags::empty()) {
                Err(Errno::BUSY) => thread::sleep(Duration::from_millis(20)),
                _ => break,
            }
        }
        let _ = unmount(&self.mountpoint, UnmountFlags::DETACH);
        let detached = run(Command::new("losetup").arg("--detach").arg(&self.device));
        assert!(detached.is_ok() || thread::panicking(), "{detached:?}");
    }
}

/// Standard output of a program that has to succeed.
fn run(command: &mut Command) -> io::Result<String> {
    let output = command.output()?;
    if !output.status.success() {
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        return Err(io::Error::other(format!("{command:?}: {message}")));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_full_disk_refuses_writes_until_space_is_freed() {
        if !able() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let (image, at) = (dir.path().join("image"), dir.path().join("at"));
        fs::create_dir(&at).unwrap();
        let disk = Ext4::create(&image, 16 << 20, &at).unwrap();
        let filler = disk.fill(100 << 10).unwrap();
        let written = fs::write(at.join("more"), vec![1; 1 << 20]);
        assert_eq!(written.unwrap_err().kind(), io::ErrorKind::StorageFull);
        fs::remove_file(filler).unwrap();
        fs::write(at.join("more"), vec![1; 1 << 20]).unwrap();
        drop(disk);
        let disk = Ext4::mount(&image, &at).unwrap();
        assert_eq!(fs::read(disk.path().join("more")).unwrap().len(), 1 << 20);
    }
}
