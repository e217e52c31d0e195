use anyhow::Result;
use clap::Args;

use lazuli_runtime::daemon::Stop;

use crate::{Session, daemon};

/// End the node's daemon
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Also while images are mounted: detach them first
    #[arg(long)]
    force: bool,
}

pub(crate) fn run(session: &Session, arguments: &Arguments) -> Result<()> {
    match daemon::connect_if_needed(session)? {
        Some(daemon) => daemon.stop(if arguments.force { Stop::Forced } else { Stop::IfUnused })?,
        None => println!("no daemon runs on {}", session.root.display()),
    }
    Ok(())
}
