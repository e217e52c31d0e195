use anyhow::{Context, Result};
use clap::Args;
use lazuli_runtime::daemon::{Daemon, Settings};

use crate::Session;

/// Run the node's daemon in the foreground
///
/// One daemon serves every image of a node. `mount` and `run` start it when it is not running.
#[derive(Debug, Args)]
pub(crate) struct Arguments {}

pub(crate) fn run(session: &Session, _: &Arguments) -> Result<()> {
    let settings = Settings {
        amplify: session.config.fetch.amplify_bytes,
        deadline: session.config.fetch.deadline(),
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let daemon = Daemon::open(&session.root, &settings).await?;
        daemon.serve().await.context("the daemon ended")
    })
}
