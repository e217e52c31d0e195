use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use clap::Args;
use lazuli_runtime::daemon::DriverChoice;

use crate::{
    Session,
    config::Snapshotter,
    containerd_dropin::{self, Choice, Pods, Written},
    doctor::{containerd::Running, service},
};

/// Register the snapshotter with containerd, and choose the pods that use it
///
/// Writes a file among the imports of the running containerd. It takes effect when containerd is
/// restarted, which running containers don't notice.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// Which pods get their images through Lazuli
    #[arg(long, value_enum, default_value_t = Pods::Runtime)]
    pods: Pods,
    /// Remove the file again
    #[arg(long)]
    undo: bool,
    /// containerd's socket
    #[arg(long, value_name = "SOCKET", default_value = "/run/containerd/containerd.sock")]
    containerd: PathBuf,
}

pub(super) fn run(session: &Session, arguments: &Arguments) -> Result<()> {
    let default = Snapshotter::default();
    let snapshotter = session.config.snapshotter.as_ref().unwrap_or(&default);
    let running = Running::ask(&arguments.containerd, &snapshotter.address)?;
    let files = &running.files;
    let Some(directory) = files.imports() else {
        bail!(
            "{} imports no directory: make `imports = [\"/etc/containerd/conf.d/*.toml\"]` its \
             first line, and restart containerd",
            files.main().display()
        );
    };
    if arguments.undo {
        match containerd_dropin::remove(&directory)? {
            Some(file) => {
                println!("removed {}; it counts until containerd is restarted", file.display())
            }
            None => println!("nothing was set up"),
        }
        return Ok(());
    }
    if let Some(name) = files.names().iter().find(|name| *name != "lazuli") {
        bail!(
            "containerd's files call the snapshotter {name}: `setup containerd` knows the name \
             lazuli alone, and two names for one socket lose snapshots. Choose the pods by hand \
             with snapshotter = {name:?}, or remove [proxy_plugins.{name}]"
        );
    }
    let choice = Choice {
        pods: arguments.pods,
        major: running.major(),
        socket: &snapshotter.address,
        root: &session.root,
        systemd_cgroup: running.systemd_cgroup(),
        maps_ids: maps_ids(session, snapshotter.driver),
    };
    match containerd_dropin::write(&directory, choice)? {
        Written::New(file) => tell(&file),
        Written::Same(file) => println!("{} is as it should be", file.display()),
    }
    if choice.major < 2 {
        println!(
            "containerd {}.x needs these lines in {} itself:\n{}",
            choice.major,
            files.main().display(),
            containerd_dropin::lines_for_main(arguments.pods)
        );
    }
    Ok(())
}

fn tell(file: &Path) {
    println!("wrote {}: it counts when containerd has been restarted", file.display());
}

/// Returns whether containers' images will be on a file system that supports mapped ids.
fn maps_ids(session: &Session, driver: DriverChoice) -> bool {
    let driver = match driver {
        DriverChoice::Auto => service::status(session).map(|status| status.daemon.driver).ok(),
        asked => Some(asked),
    };
    !matches!(driver, Some(DriverChoice::Fuse))
}
