use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args;
use lazuli_runtime::daemon::Request;

use crate::{Session, daemon};

/// Unmount an image
///
/// Refuses while a process uses the mount. Fetched data stays in the cache.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Where it is mounted
    #[arg(value_name = "DIR")]
    directory: PathBuf,
}

pub(crate) fn run(session: &Session, arguments: &Arguments) -> Result<()> {
    let mountpoint = real_path(&arguments.directory)?;
    match daemon::connect_if_needed(session)? {
        Some(mut daemon) => daemon.call(&Request::Umount { mountpoint, lazy: false })?,
        None => bail!("nothing is mounted: no daemon runs on {}", session.root.display()),
    };
    Ok(())
}

/// Resolves symbolic links of a path. A mount point whose file system no longer answers cannot be
/// accessed, but its parent can.
fn real_path(directory: &Path) -> Result<PathBuf> {
    if let Ok(path) = directory.canonicalize() {
        return Ok(path);
    }
    let directory = std::path::absolute(directory)?;
    let (Some(parent), Some(name)) = (directory.parent(), directory.file_name()) else {
        return Ok(directory);
    };
    let parent = parent
        .canonicalize()
        .with_context(|| format!("there is no directory {}", parent.display()))?;
    Ok(parent.join(name))
}
