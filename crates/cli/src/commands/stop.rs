use anyhow::Result;
use clap::Args;
use lazuli_runtime::daemon::{Client, ClientError};

use crate::Session;

/// End the node's daemon
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Also while images are mounted: detach them first
    #[arg(long)]
    force: bool,
}

pub(crate) fn run(session: &Session, arguments: &Arguments) -> Result<()> {
    match Client::connect(&session.root) {
        Err(ClientError::NotRunning { .. }) => {
            println!("no daemon runs on {}", session.root.display());
            Ok(())
        }
        Err(error) => Err(error.into()),
        Ok(daemon) => Ok(daemon.stop(arguments.force)?),
    }
}
