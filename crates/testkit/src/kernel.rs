//! Features of the machine that runs a test.
//!
//! A test that needs root or a kernel feature asks [`require`] first and returns when the answer is
//! no. On machines that must not skip anything, `LAZULI_REQUIRE_KERNEL=1` turns that answer into a
//! failure.

use std::{
    fmt, fs,
    io::{self, Write as _},
    os::unix::fs::PermissionsExt,
    path::Path,
};

use nix::sys::fanotify::{EventFFlags, Fanotify, InitFlags, MarkFlags, MaskFlags};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

use crate::freezer::{Freezer, Version};

/// Something that not every test machine has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Feature {
    /// Effective user 0.
    Root,
    /// Pre-content events (`FAN_PRE_ACCESS`, Linux 6.14) on the file system of the temporary
    /// directory.
    Fanotify,
    /// Mounting an EROFS file without a loop device (Linux 6.12).
    ErofsFileBacked,
    /// Loop devices, and `/dev/fuse`.
    Loop,
    /// EROFS on several disks (Linux 5.16).
    ErofsOnDisks,
    /// Mounts that appear below others (Linux 6.5), so that one can replace another.
    MountsBeneath,
    /// A file system that the kernel has loaded.
    Filesystem(&'static str),
    /// `/dev/fuse` that opens, and `fusermount3`.
    Fuse,
    /// The freezer of this version of cgroups.
    Freezer(Version),
    /// A program in `PATH`.
    Program(&'static str),
    /// An image in the directory that `LAZULI_CORPUS` names.
    Corpus(&'static str),
}

impl fmt::Display for Feature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Feature::Root => f.write_str("root"),
            Feature::Fanotify => f.write_str("fanotify pre-content events"),
            Feature::ErofsFileBacked => f.write_str("file-backed EROFS mounts"),
            Feature::Loop => f.write_str("FUSE and loop devices"),
            Feature::ErofsOnDisks => f.write_str("EROFS on several disks"),
            Feature::MountsBeneath => f.write_str("mounts beneath others"),
            Feature::Filesystem(name) => f.write_str(name),
            Feature::Fuse => f.write_str("FUSE"),
            Feature::Freezer(version) => write!(f, "the freezer of cgroup {version:?}"),
            Feature::Program(name) => write!(f, "the program {name}"),
            Feature::Corpus(image) => write!(f, "the corpus image {image}"),
        }
    }
}

/// Returns whether this machine has `feature`. If not, reports on standard error which test is
/// skipped and why.
///
/// # Panics
/// When the feature is missing and `LAZULI_REQUIRE_KERNEL=1`.
pub fn require(feature: Feature) -> bool {
    let Err(why) = probe(feature) else { return true };
    skip(feature, why);
    false
}

/// Reports on standard error that this test is skipped, since it `needs` something, and `why` that
/// is missing.
///
/// # Panics
/// When `LAZULI_REQUIRE_KERNEL=1`.
pub fn skip(needs: impl fmt::Display, why: impl fmt::Display) {
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("unnamed test");
    if std::env::var_os("LAZULI_REQUIRE_KERNEL").is_some_and(|value| value == "1") {
        panic!("{test} needs {needs}: {why}");
    }
    // Not eprintln: the test harness captures the output of passing tests.
    let _ = writeln!(io::stderr(), "skipped: {test}: needs {needs}: {why}");
}

fn probe(feature: Feature) -> io::Result<()> {
    match feature {
        Feature::Root if rustix::process::geteuid().is_root() => Ok(()),
        Feature::Root => Err(io::Error::other("the effective user is not 0")),
        Feature::Fanotify => fanotify(),
        Feature::ErofsFileBacked => erofs_file_backed(),
        Feature::Fuse => {
            fs::File::options().read(true).write(true).open("/dev/fuse")?;
            program("fusermount3")
        }
        Feature::Loop => {
            for path in ["/dev/loop-control", "/dev/fuse"] {
                fs::File::options().read(true).write(true).open(path)?;
            }
            Ok(())
        }
        Feature::ErofsOnDisks => {
            probe(Feature::Filesystem("erofs"))?;
            since(5, 16)
        }
        Feature::MountsBeneath => since(6, 5),
        Feature::Filesystem(name) => {
            match fs::read_to_string("/proc/filesystems")?.contains(&format!("\t{name}\n")) {
                true => Ok(()),
                false => Err(io::Error::other("the kernel does not have it")),
            }
        }
        Feature::Freezer(version) => Freezer::create(version)?.thaw(),
        Feature::Program(name) => program(name),
        Feature::Corpus(image) => {
            let corpus = std::env::var_os("LAZULI_CORPUS").unwrap_or_default();
            fs::metadata(Path::new(&corpus).join(image).join("index.json")).map(drop)
        }
    }
}

/// Whether the kernel is of this version or a later one.
fn since(major: u32, minor: u32) -> io::Result<()> {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease")?;
    let mut numbers = release.split('.').map_while(|number| number.parse::<u32>().ok());
    match numbers.next().zip(numbers.next()) {
        Some(found) if found >= (major, minor) => Ok(()),
        _ => {
            Err(io::Error::other(format!("Linux {} is older than {major}.{minor}", release.trim())))
        }
    }
}

fn program(name: &str) -> io::Result<()> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let executable = |path: &Path| {
        fs::metadata(path)
            .is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
    };
    if std::env::split_paths(&path).any(|dir| executable(&dir.join(name))) {
        Ok(())
    } else {
        Err(io::Error::other("not in PATH"))
    }
}

/// Marking is the proof: the kernel refuses the event on file systems and kernels without it.
fn fanotify() -> io::Result<()> {
    const FAN_PRE_ACCESS: u64 = 0x0010_0000;
    let file = tempfile::NamedTempFile::new()?;
    let init = InitFlags::FAN_CLASS_PRE_CONTENT | InitFlags::FAN_CLOEXEC;
    let group = Fanotify::init(init, EventFFlags::O_RDONLY | EventFFlags::O_CLOEXEC)?;
    let mask = MaskFlags::from_bits_retain(FAN_PRE_ACCESS);
    group.mark(MarkFlags::FAN_MARK_ADD, mask, rustix::fs::CWD, Some(file.path()))?;
    Ok(())
}

/// Mounts a file system of one block: a superblock and an empty root directory.
fn erofs_file_backed() -> io::Result<()> {
    let dir = tempfile::tempdir()?;
    let image = dir.path().join("image");
    let mountpoint = dir.path().join("mount");
    fs::create_dir(&mountpoint)?;
    fs::write(&image, smallest_erofs())?;
    mount(&image, &mountpoint, "erofs", MountFlags::RDONLY, None)?;
    unmount(&mountpoint, UnmountFlags::DETACH)?;
    Ok(())
}

fn smallest_erofs() -> Vec<u8> {
    const SUPERBLOCK: usize = 1024;
    /// Directly after the superblock; node ids count 32-byte slots.
    const ROOT: usize = SUPERBLOCK + 128;
    let mut image = vec![0; 4096];
    let mut put =
        |offset: usize, bytes: &[u8]| image[offset..][..bytes.len()].copy_from_slice(bytes);
    put(SUPERBLOCK, &0xe0f5_e1e2_u32.to_le_bytes());
    put(SUPERBLOCK + 12, &[12]); // block size 1 << 12
    put(SUPERBLOCK + 14, &((ROOT / 32) as u16).to_le_bytes());
    put(SUPERBLOCK + 16, &1_u64.to_le_bytes()); // inodes
    put(SUPERBLOCK + 36, &1_u32.to_le_bytes()); // blocks
    put(ROOT, &(2_u16 << 1).to_le_bytes()); // compact, tail packed behind the inode
    put(ROOT + 4, &0o040_755_u16.to_le_bytes());
    put(ROOT + 6, &2_u16.to_le_bytes()); // links
    put(ROOT + 8, &27_u32.to_le_bytes()); // size: two entries of 12 bytes, names `.` and `..`
    let entries = ROOT + 32;
    for (entry, name_offset) in [(0, 24_u16), (1, 25)] {
        put(entries + 12 * entry, &((ROOT / 32) as u64).to_le_bytes());
        put(entries + 12 * entry + 8, &name_offset.to_le_bytes());
        put(entries + 12 * entry + 10, &[2]); // a directory
    }
    put(entries + 24, b"...");
    image
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_found_only_if_it_is_in_path() {
        assert!(probe(Feature::Program("sh")).is_ok());
        assert!(probe(Feature::Program("no such program")).is_err());
    }

    #[test]
    fn a_kernel_with_erofs_takes_the_probe_image() {
        if !require(Feature::Root) {
            return;
        }
        let supported = fs::read_to_string("/proc/filesystems").unwrap().contains("\terofs\n");
        assert!(!supported || probe(Feature::ErofsFileBacked).is_ok());
    }
}
