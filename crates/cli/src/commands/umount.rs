use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;
use lazuli_runtime::daemon::{Client, Request};

use crate::Session;

/// Take a mounted image away
///
/// Refuses while a process uses it. What was fetched stays in the cache.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Where it is mounted
    #[arg(value_name = "DIR")]
    directory: PathBuf,
}

pub(crate) fn run(session: &Session, arguments: &Arguments) -> Result<()> {
    // Not `canonicalize`: that fails on a mount point whose file system no longer answers.
    let directory = std::path::absolute(&arguments.directory)?;
    let mountpoint = match (directory.parent(), directory.file_name()) {
        (Some(parent), Some(name)) => parent
            .canonicalize()
            .with_context(|| format!("there is no directory {}", parent.display()))?
            .join(name),
        _ => directory,
    };
    Client::connect(&session.root)?.call(&Request::Umount { mountpoint })?;
    Ok(())
}
