use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use lazuli_runtime::{
    daemon::{
        ClientError, DriverChoice, MountRequest, Mounted, PrefetchRequest, Request, Response,
    },
    kernel::mount::Suid,
};

use super::prefetch;
use crate::{Session, daemon, image_args};

/// Mount an image; its data arrives as it is read
///
/// Returns when the image is mounted. The mount belongs to the node's daemon, which is started if
/// it does not run, and stays until `lazuli umount`. An image without an index is pulled first.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    image: ImageArguments,
    /// An existing directory
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    /// Let set-user-id programs and file capabilities of the image work for all users of DIR
    #[arg(long)]
    suid: bool,
}

/// The identity of an image and how it is served; shared by `mount` and `run`.
#[derive(Debug, Args)]
pub(crate) struct ImageArguments {
    /// An image or artifact: a registry reference or oci:DIR[:TAG]
    #[arg(value_name = "IMAGE")]
    pub(crate) image: String,
    /// How the kernel requests data
    #[arg(long, value_enum, default_value = "auto")]
    driver: Driver,
    #[command(flatten)]
    pub(crate) access: image_args::Access,
}

impl ImageArguments {
    /// # Errors
    /// The mount would show disks, not the files of the image.
    pub(crate) fn must_show_files(&self) -> Result<()> {
        if let Driver::Disks = self.driver {
            bail!("--driver disks is for virtual machines: lazuli mount --driver disks IMAGE DIR");
        }
        Ok(())
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Driver {
    /// The best driver that works here
    Auto,
    /// EROFS with fanotify pre-content events: Linux 6.15 or later, root
    Fanotify,
    /// EROFS on loop devices: Linux 5.16 or later, root
    Loop,
    /// ext4 made on the node, on loop devices: Linux 5.8 or later, root
    Ext4,
    /// FUSE: any kernel, also without root
    Fuse,
    /// Files that a virtual machine uses as disks: any kernel; Linux 5.16 or later in the machine
    Disks,
}

pub(crate) fn run(session: &Session, arguments: &Arguments) -> Result<()> {
    let directory = arguments.directory.canonicalize().with_context(|| {
        format!(
            "cannot mount at {}: it must be an existing directory",
            arguments.directory.display()
        )
    })?;
    if session.root.starts_with(&directory) {
        bail!("cannot mount at {}: it would hide the state directory", directory.display());
    }
    let suid = if arguments.suid { Suid::Keep } else { Suid::Ignore };
    let request = request(&arguments.image, directory, suid)?;
    let mounted = call(session, &request)?.mount;
    println!(
        "{} mounted at {} ({} of {} chunks here)",
        mounted.image,
        mounted.mountpoint.display(),
        mounted.chunks_ready,
        mounted.chunks_total
    );
    Ok(())
}

/// Asks the daemon for a mount at an absolute path.
pub(crate) fn request(
    arguments: &ImageArguments,
    mountpoint: PathBuf,
    suid: Suid,
) -> Result<MountRequest> {
    if mountpoint.to_str().is_none() {
        let path = mountpoint.display();
        bail!("cannot mount at {path}: only paths in UTF-8 can be told to the daemon");
    }
    Ok(MountRequest {
        image: image_args::absolute_image(&arguments.image)?,
        mountpoint,
        driver: match arguments.driver {
            Driver::Auto => DriverChoice::Auto,
            Driver::Fanotify => DriverChoice::Fanotify,
            Driver::Loop => DriverChoice::Loop,
            Driver::Ext4 => DriverChoice::Ext4,
            Driver::Fuse => DriverChoice::Fuse,
            Driver::Disks => DriverChoice::Disks,
        },
        asked: None,
        platform: arguments.access.platform.clone(),
        plain_http: arguments.access.plain_http,
        base: false,
        layers: None,
        layer: None,
        bootstrap: None,
        nosuid: suid == Suid::Ignore,
    })
}

/// Sends a mount request and waits for its answer. An image without an index is pulled first.
pub(crate) fn call(session: &Session, request: &MountRequest) -> Result<Mounted> {
    let MountRequest { image, platform, plain_http, .. } = request.clone();
    let request = Request::Mount(request.clone());
    let mut response = daemon::connect(session)?.call(&request);
    if let Err(ClientError::NoIndex(_)) = response {
        eprintln!("{image} has no index: all of it is pulled first");
        prefetch::all_of(session, PrefetchRequest { image, platform, plain_http })?;
        response = daemon::connect(session)?.call(&request);
    }
    match response? {
        Response::Mounted(mounted) => Ok(mounted),
        other => bail!("the daemon answered {other:?} to a mount request; is it another version?"),
    }
}
