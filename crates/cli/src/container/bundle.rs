//! The directory of one running container, and its clean-up.
//!
//! ```text
//! ROOT/run/ID/
//!   lock          held by the `lazuli run` that owns the container
//!   lower/        the image, mounted by the daemon
//!   upper/ work/  overlayfs: what the container writes
//!   rootfs/       the overlay, the container's root
//!   config.json   for runc
//! ROOT/run/.runc/ runc's own state
//! ```
//!
//! A bundle whose lock is free was left by a killed `lazuli run`; the next one removes it.

use std::{
    fs::{self, DirBuilder, File},
    io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, anyhow};
use lazuli_runtime::daemon::{Client, Request};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, UnmountFlags, fsconfig_create,
    fsconfig_set_string, fsmount, fsopen, move_mount, unmount,
};

use crate::path_context::PathContext as _;

/// A container's directory. Dropping it ends the container and removes everything.
#[derive(Debug)]
pub(crate) struct Bundle {
    id: String,
    directory: PathBuf,
    root: PathBuf,
    _lock: File,
}

impl Bundle {
    /// Makes a new bundle below `root` and removes abandoned ones.
    pub(crate) fn create(root: &Path) -> Result<Self> {
        let run = root.join("run");
        let prepare = || -> io::Result<(String, PathBuf, File)> {
            // Containers may write set-user-id programs, which other users must not reach.
            DirBuilder::new().recursive(true).mode(0o700).create(&run)?;
            // One at a time: a bundle that is just being made has no lock yet, and must not be
            // swept.
            let directory_lock = File::open(&run)?;
            directory_lock.lock()?;
            sweep(root, &run);
            let id = format!("lazuli-{}", std::process::id());
            let directory = run.join(&id);
            fs::create_dir(&directory)?;
            let lock = File::create(directory.join("lock"))?;
            lock.lock()?;
            for part in ["lower", "upper", "work", "rootfs"] {
                fs::create_dir(directory.join(part))?;
            }
            Ok((id, directory, lock))
        };
        let (id, directory, lock) = prepare().cannot("prepare a container in", &run)?;
        Ok(Bundle { id, directory, root: root.to_owned(), _lock: lock })
    }

    /// The container's name for runc.
    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    /// The directory at which the daemon mounts the image.
    pub(crate) fn lower(&self) -> PathBuf {
        self.directory.join("lower")
    }

    /// The container's root.
    pub(crate) fn rootfs(&self) -> PathBuf {
        self.directory.join("rootfs")
    }

    /// Mounts the writable layer over the image.
    pub(crate) fn mount_overlay(&self) -> Result<()> {
        // `:` separates lower directories and `\` escapes it; upper and work take paths as they
        // are.
        let lower = path_text(&self.lower())?.replace('\\', r"\\").replace(':', r"\:");
        let mount = || -> rustix::io::Result<()> {
            let context = fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC)?;
            fsconfig_set_string(&context, "source", "lazuli")?;
            fsconfig_set_string(&context, "lowerdir", lower.as_str())?;
            fsconfig_set_string(&context, "upperdir", self.directory.join("upper"))?;
            fsconfig_set_string(&context, "workdir", self.directory.join("work"))?;
            fsconfig_create(&context)?;
            let mount = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())?;
            let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
            move_mount(mount, "", rustix::fs::CWD, self.rootfs(), flags)
        };
        mount().map_err(|error| {
            let hint = if error == Errno::PERM { " (this needs root)" } else { "" };
            let rootfs = self.rootfs();
            anyhow!("cannot mount an overlay at {}{hint}: {error}", rootfs.display())
        })
    }

    /// Writes runc's `config.json`.
    pub(crate) fn write_config(&self, config: &serde_json::Value) -> Result<()> {
        let path = self.directory.join("config.json");
        fs::write(&path, serde_json::to_vec_pretty(config)?).cannot("write", &path)
    }

    /// `runc run` for this bundle.
    pub(crate) fn runc_run(&self) -> Command {
        let mut command = runc(&self.root);
        command.arg("run").arg("--bundle").arg(&self.directory);
        command.arg("--pid-file").arg(self.pid_file()).arg(&self.id);
        command
    }

    /// Returns whether the command was started: runc's own failures have exit code 1, as many
    /// commands do.
    pub(crate) fn has_started(&self) -> bool {
        self.pid_file().exists()
    }

    fn pid_file(&self) -> PathBuf {
        self.directory.join("pid")
    }
}

impl Drop for Bundle {
    fn drop(&mut self) {
        if let Err(error) = remove(&self.root, &self.directory, &self.id) {
            tracing::warn!(bundle = %self.directory.display(), "not cleaned up: {error:#}");
        }
    }
}

fn runc(root: &Path) -> Command {
    let mut command = Command::new("runc");
    command.arg("--root").arg(root.join("run/.runc"));
    command
}

/// Removes bundles whose owners are gone.
fn sweep(root: &Path, run: &Path) {
    let Ok(entries) = fs::read_dir(run) else { return };
    for entry in entries.flatten() {
        let id = entry.file_name().to_string_lossy().into_owned();
        if !id.starts_with("lazuli-") {
            continue;
        }
        let abandoned =
            File::open(entry.path().join("lock")).map_or(true, |lock| lock.try_lock().is_ok());
        if abandoned {
            match remove(root, &entry.path(), &id) {
                Ok(()) => tracing::info!(id, "removed what an earlier run left behind"),
                Err(error) => tracing::warn!(id, "cannot remove an earlier run: {error:#}"),
            }
        }
    }
}

fn remove(root: &Path, directory: &Path, id: &str) -> Result<()> {
    // `--force` also succeeds when there is no such container.
    let _ = runc(root)
        .args(["delete", "--force", id])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    let _ = unmount(directory.join("rootfs"), UnmountFlags::DETACH);
    let lower = directory.join("lower");
    if is_mount_point(&lower)
        && let Ok(mut daemon) = Client::connect(root)
    {
        daemon.call(&Request::Umount { mountpoint: lower, lazy: false })?;
    }
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).cannot("remove", directory)
        }
        _ => Ok(()),
    }
}

fn is_mount_point(directory: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let device = |path: &Path| fs::metadata(path).map(|metadata| metadata.dev());
    match (device(directory), directory.parent().map(device)) {
        // A directory with a dead file system (ENOTCONN) is a mount point too.
        (Err(error), _) => error.kind() != io::ErrorKind::NotFound,
        (Ok(own), Some(Ok(parent))) => own != parent,
        _ => false,
    }
}

fn path_text(path: &Path) -> Result<&str> {
    path.to_str().with_context(|| format!("{} is not UTF-8", path.display()))
}
