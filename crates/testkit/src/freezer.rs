//! Stopping processes with the freezers of both versions of cgroups.

use std::{
    fs, io,
    path::PathBuf,
    process, thread,
    time::{Duration, Instant},
};

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use tempfile::TempDir;

/// Time-out for the kernel to stop the processes of a group.
const TIMEOUT: Duration = Duration::from_secs(30);

/// A version of cgroups, with its own way to freeze.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// Stops threads wherever they sleep in the kernel, if the kernel allows it there.
    V1,
    /// Stops threads on their way back to the program.
    V2,
}

/// A group that can be frozen; thawed and removed with the value.
#[derive(Debug)]
pub struct Freezer {
    version: Version,
    group: PathBuf,
    /// A hierarchy that was mounted for this.
    mounted: Option<TempDir>,
}

impl Freezer {
    /// Makes an empty group. Fails where the hierarchy is not mounted and cannot be.
    pub fn create(version: Version) -> io::Result<Self> {
        let kind = if version == Version::V1 { "cgroup" } else { "cgroup2" };
        let mounts = fs::read_to_string("/proc/self/mounts")?;
        let found = mounts.lines().find_map(|line| {
            let fields: Vec<_> = line.split(' ').collect();
            let is_freezer = version == Version::V2 || fields[3].split(',').any(|o| o == "freezer");
            (fields[2] == kind && is_freezer).then(|| PathBuf::from(fields[1]))
        });
        let mounted = found.is_none().then(tempfile::tempdir).transpose()?;
        if let Some(at) = &mounted {
            let options = (version == Version::V1).then_some(c"freezer");
            mount(kind, at.path(), kind, MountFlags::empty(), options)?;
        }
        let root = found.or_else(|| mounted.as_ref().map(|at| at.path().to_owned()));
        let thread = thread::current();
        let name = thread.name().unwrap_or("unnamed").replace("::", "-");
        let name = format!("lazuli-test-{}-{name}", process::id());
        let group = root.unwrap_or_default().join(name);
        let freezer = Freezer { version, group, mounted };
        fs::create_dir(&freezer.group)?;
        Ok(freezer)
    }

    /// Puts a process into the group.
    pub fn add(&self, process: u32) -> io::Result<()> {
        fs::write(self.group.join("cgroup.procs"), process.to_string())
    }

    /// Freezes the group. Version 1 returns when all of the group is frozen. Version 2 doesn't
    /// wait, because it lets threads finish their system calls.
    pub fn freeze(&self) -> io::Result<()> {
        self.set(true)?;
        let began = Instant::now();
        while self.version == Version::V1 && !self.is_frozen()? {
            if began.elapsed() > TIMEOUT {
                return Err(io::Error::other("the group does not freeze"));
            }
            thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Lets everything in the group continue.
    pub fn thaw(&self) -> io::Result<()> {
        self.set(false)
    }

    /// Returns whether all of the group is frozen.
    pub fn is_frozen(&self) -> io::Result<bool> {
        let (file, line) = match self.version {
            Version::V1 => ("freezer.state", "FROZEN"),
            Version::V2 => ("cgroup.events", "frozen 1"),
        };
        Ok(fs::read_to_string(self.group.join(file))?.lines().any(|found| found == line))
    }

    fn set(&self, frozen: bool) -> io::Result<()> {
        let (file, values) = match self.version {
            Version::V1 => ("freezer.state", ["THAWED", "FROZEN"]),
            Version::V2 => ("cgroup.freeze", ["0", "1"]),
        };
        fs::write(self.group.join(file), values[usize::from(frozen)])
    }
}

impl Drop for Freezer {
    fn drop(&mut self) {
        let _ = self.thaw();
        let began = Instant::now();
        // Busy until the last process in it has ended.
        while self.group.exists()
            && fs::remove_dir(&self.group).is_err()
            && began.elapsed() < TIMEOUT
        {
            thread::sleep(Duration::from_millis(10));
        }
        if let Some(at) = &self.mounted {
            let _ = unmount(at.path(), UnmountFlags::DETACH);
        }
    }
}
