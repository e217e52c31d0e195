//! Finding the daemon of a root directory, and starting it when it is not there.

use std::{
    fs::{self, DirBuilder, OpenOptions},
    os::unix::{
        fs::{DirBuilderExt, OpenOptionsExt},
        process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use lazuli_runtime::daemon::{Client, ClientError};

use crate::{Session, exit};

/// A daemon that finds its mounts again reads all of their metadata first; seconds on a slow disk.
const START_LIMIT: Duration = Duration::from_secs(30);

/// How often it is asked whether the daemon listens.
const STEP: Duration = Duration::from_millis(5);

/// How long another daemon is left to its beginning or end before this command tries again.
const OTHERS: Duration = Duration::from_millis(100);

/// Connects to the daemon, which is started if it does not run.
pub(crate) fn connect(session: &Session) -> Result<Client> {
    let started = Instant::now();
    let mut child: Option<Child> = None;
    loop {
        match Client::connect(&session.root) {
            Err(ClientError::NotRunning { .. }) => {}
            other => return Ok(other?),
        }
        let ended = child.as_mut().map(Child::try_wait).transpose()?.flatten();
        match ended {
            // Another command starts one at this moment, or an older one is just ending.
            Some(status) if status.code() == Some(exit::LOCKED.into()) => {
                child = None;
                thread::sleep(OTHERS);
            }
            Some(status) => bail!("the daemon ended at once ({status}): {}", last_line(session)),
            None if child.is_none() => child = Some(start(session)?),
            None => {}
        }
        if started.elapsed() > START_LIMIT {
            let log = log_path(session);
            bail!("the daemon did not answer within {START_LIMIT:?}; see {}", log.display());
        }
        thread::sleep(STEP);
    }
}

/// Connects if a daemon runs, or has to: one that crashed left mounts, which only a daemon can serve or remove.
pub(crate) fn connect_if_needed(session: &Session) -> Result<Option<Client>> {
    match Client::connect(&session.root) {
        Ok(client) => Ok(Some(client)),
        Err(ClientError::NotRunning { .. }) if has_mounts(&session.root) => {
            connect(session).map(Some)
        }
        Err(ClientError::NotRunning { .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn has_mounts(root: &Path) -> bool {
    let records = fs::read_dir(root.join("mounts")).into_iter().flatten().flatten();
    records.into_iter().any(|record| record.path().extension().is_some_and(|e| e == "json"))
}

/// Starts the daemon in a process group of its own, so that Ctrl-C here does not reach it.
fn start(session: &Session) -> Result<Child> {
    let created = DirBuilder::new().recursive(true).mode(0o700).create(&session.root);
    created
        .with_context(|| format!("cannot create the state directory {}", session.root.display()))?;
    let log = log_path(session);
    let output = OpenOptions::new()
        .create(true)
        .append(true)
        .mode(0o600)
        .open(&log)
        .with_context(|| format!("cannot open {}", log.display()))?;
    let program = std::env::current_exe().context("cannot find the lazuli program")?;
    let mut command = Command::new(program);
    command.arg("--root").arg(&session.root);
    if let Some(config) = &session.config_path {
        command.arg("--config").arg(config);
    }
    command.arg("daemon").current_dir("/").stdin(Stdio::null()).stdout(output.try_clone()?);
    command.stderr(output).process_group(0).spawn().context("cannot start the daemon")
}

fn log_path(session: &Session) -> PathBuf {
    session.root.join("daemon.log")
}

fn last_line(session: &Session) -> String {
    let text = fs::read_to_string(log_path(session)).unwrap_or_default();
    text.lines().last().unwrap_or("it logged nothing").to_owned()
}
