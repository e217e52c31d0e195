//! Finding the daemon of a root directory, and starting it when it is not there.

use std::{
    ffi::OsString,
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
use lazuli_runtime::daemon::{Client, ClientError, Request, Response, Status};

use crate::{Session, exit, path_context::PathContext as _};

/// A daemon that finds its mounts again reads all of their metadata first; seconds on a slow disk.
const START_LIMIT: Duration = Duration::from_secs(30);

/// Interval for checking whether the daemon listens.
const STEP: Duration = Duration::from_millis(5);

/// Wait for another daemon to start or exit before retrying.
const OTHERS: Duration = Duration::from_millis(100);

/// Connects to the daemon, which is started if it does not run.
pub(crate) fn connect(session: &Session) -> Result<Client> {
    let started = Instant::now();
    let mut child: Option<Child> = None;
    loop {
        match Client::connect(&session.root) {
            Err(ClientError::NotRunning { .. }) => {}
            // A worker that finds many mounts again may need longer than a client waits for a sign
            // of it.
            Err(ClientError::NoWorker(_)) if started.elapsed() < START_LIMIT => continue,
            other => return Ok(other?),
        }
        let ended = child.as_mut().map(Child::try_wait).transpose()?.flatten();
        match ended {
            // Another command is starting a daemon at this moment, or an older one is just ending.
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

/// Connects to a running daemon, or starts one that is needed: a crashed daemon left mounts, which
/// only a daemon can serve or remove.
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

/// Starts the daemon.
fn start(session: &Session) -> Result<Child> {
    let created = DirBuilder::new().recursive(true).mode(0o700).create(&session.root);
    created.cannot("create the state directory", &session.root)?;
    let log = log_path(session);
    let output =
        OpenOptions::new().create(true).append(true).mode(0o600).open(&log).cannot("open", &log)?;
    let mut command = Template::new(session).plain();
    command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
    command.spawn().context("cannot start the daemon")
}

/// Re-runs this program with its own global options.
#[derive(Debug)]
pub(crate) struct Template {
    arguments: Vec<OsString>,
}

impl Template {
    pub(crate) fn new(session: &Session) -> Self {
        let mut arguments: Vec<OsString> = vec!["--root".into(), session.root.clone().into()];
        if let Some(config) = &session.config_path {
            arguments.extend(["--config".into(), config.into()]);
        }
        if let Some(log) = &session.log {
            arguments.extend(["--log".into(), log.into()]);
        }
        Template { arguments }
    }

    /// This program, for any verb.
    pub(crate) fn program(&self) -> Command {
        // This very program, also when its file has been replaced: keeper and worker have to be of
        // one version.
        let mut command = Command::new("/proc/self/exe");
        command.arg0("lazuli").args(&self.arguments).current_dir("/");
        // A process group of its own, so that Ctrl-C here does not reach it.
        command.process_group(0);
        command
    }

    /// `lazuli daemon`.
    fn plain(&self) -> Command {
        let mut command = self.program();
        command.arg("daemon");
        command
    }

    /// `lazuli daemon FLAG`.
    pub(crate) fn command(&self, flag: &str) -> Command {
        let mut command = self.plain();
        command.arg(flag);
        command
    }
}

fn log_path(session: &Session) -> PathBuf {
    session.root.join("daemon.log")
}

fn last_line(session: &Session) -> String {
    let text = fs::read_to_string(log_path(session)).unwrap_or_default();
    text.lines().last().unwrap_or("it logged nothing").to_owned()
}

/// The daemon's status.
pub(crate) fn status(daemon: &mut Client) -> Result<Status> {
    match daemon.call(&Request::Status)? {
        Response::Status(status) => Ok(status),
        other => bail!("the daemon answered {other:?} to a status request; is it another version?"),
    }
}
