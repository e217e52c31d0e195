//! Finding the daemon of a root directory, and starting it when it is not there.

use std::{
    fs::{self, OpenOptions},
    os::unix::{fs::OpenOptionsExt, process::CommandExt},
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use lazuli_runtime::daemon::{Client, ClientError};

use crate::Session;

/// A daemon that finds its mounts again reads their bootstraps first; seconds on a slow disk.
const START_LIMIT: Duration = Duration::from_secs(30);

/// Connects to the daemon, which is started if it does not run.
pub(crate) fn connect(session: &Session) -> Result<Client> {
    match Client::connect(&session.root) {
        Err(ClientError::NotRunning { .. }) => start(session),
        other => Ok(other?),
    }
}

/// Starts the daemon in a session of its own, so that it outlives the shell.
fn start(session: &Session) -> Result<Client> {
    fs::create_dir_all(&session.root)
        .with_context(|| format!("cannot create the state directory {}", session.root.display()))?;
    let log = session.root.join("daemon.log");
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
    let mut child = command
        .stderr(output)
        // Ctrl-C in this terminal must not reach the daemon.
        .process_group(0)
        .spawn()
        .context("cannot start the daemon")?;
    let started = Instant::now();
    loop {
        match Client::connect(&session.root) {
            Err(ClientError::NotRunning { .. }) => {}
            other => return Ok(other?),
        }
        if let Some(status) = child.try_wait()? {
            // Another command may have started it at the same moment: then ours found the lock taken.
            return Client::connect(&session.root).with_context(|| {
                format!("the daemon ended at once ({status}): {}", last_line(&log))
            });
        }
        if started.elapsed() > START_LIMIT {
            bail!("the daemon did not answer within {START_LIMIT:?}; see {}", log.display());
        }
        thread::sleep(Duration::from_millis(5));
    }
}

fn last_line(log: &Path) -> String {
    let text = fs::read_to_string(log).unwrap_or_default();
    text.lines().last().unwrap_or("it logged nothing").to_owned()
}
