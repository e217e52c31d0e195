//! A job's process: this program with another verb. Its memory ends with it.

use std::{
    collections::VecDeque,
    ffi::OsString,
    path::Path,
    process::{ExitStatus, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result};
use rustix::process::{Pid, Signal, kill_process};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _},
    process::{Child, Command},
    sync::watch,
    time::{sleep, timeout},
};

use super::leaves;
use crate::{daemon::Template, path_context::PathContext as _};

/// Time for a child to remove its files and uploads after a signal.
const CLEANING: Duration = Duration::from_secs(5);

/// Time for the last output to arrive. A credential helper may hold its pipe for longer.
const LAST_OUTPUT: Duration = Duration::from_secs(1);

/// Most lines of the output that an error has.
const LINES: usize = 5;

/// Most bytes of a line.
const LINE: usize = 1000;

/// How a job's process ended.
#[derive(Debug)]
pub(super) enum Ended {
    Done,
    Failed(String),
    /// The server is asked to end.
    Left,
}

/// Runs a verb for `image`, and logs what it prints. `scratch` is for its temporary files.
///
/// # Errors
/// It cannot be started.
pub(super) async fn run(
    program: &Template,
    verb: &[OsString],
    image: &str,
    scratch: &Path,
    deadline: Duration,
    mut leaving: watch::Receiver<bool>,
) -> Result<Ended> {
    let scratch = tempfile::Builder::new().prefix("job-").tempdir_in(scratch);
    let scratch = scratch.context("cannot make a scratch directory")?;
    let mut command = Command::from(program.program());
    command
        .args(["serve-convert", "--job", &std::process::id().to_string()])
        .args(verb)
        .env("TMPDIR", scratch.path())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    let mut child = command.spawn().context("cannot start a job")?;
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let (image, errors_of) = (image.to_owned(), image.to_owned());
    let output = tokio::spawn(async move { log(stdout, &image).await });
    let errors = tokio::spawn(async move { log(stderr, &errors_of).await });
    let ended = tokio::select! {
        status = child.wait() => Some(status.context("cannot wait for a job")?),
        () = sleep(deadline) => {
            end(&mut child).await;
            None
        }
        () = leaves(&mut leaving) => {
            end(&mut child).await;
            return Ok(Ended::Left);
        }
    };
    let _ = timeout(LAST_OUTPUT, output).await;
    let said = timeout(LAST_OUTPUT, errors).await;
    let said = said.ok().and_then(Result::ok).unwrap_or_default();
    scratch.close().cannot("remove", "a job's scratch directory")?;
    Ok(match ended {
        Some(status) if status.success() => Ended::Done,
        Some(status) => Ended::Failed(describe(status, &said)),
        None => {
            Ended::Failed(format!("it took longer than {deadline:?}, convert.deadline_seconds"))
        }
    })
}

/// Asks the child to end, and ends it if it does not.
async fn end(child: &mut Child) {
    let pid = child.id().and_then(|pid| Pid::from_raw(pid.try_into().ok()?));
    if let Some(pid) = pid
        && kill_process(pid, Signal::TERM).is_ok()
        && timeout(CLEANING, child.wait()).await.is_ok()
    {
        return;
    }
    let _ = child.kill().await;
}

fn describe(status: ExitStatus, said: &str) -> String {
    match said.trim_end() {
        "" => format!("it ended with {status}"),
        said => said.to_owned(),
    }
}

/// Logs each line, and returns the last ones. Lines may have names of an image's files: they are
/// logged with escapes.
async fn log(stream: Option<impl AsyncRead + Unpin>, image: &str) -> String {
    let Some(mut stream) = stream else { return String::new() };
    let mut last = VecDeque::new();
    let mut line = Vec::new();
    let mut buffer = [0; 4096];
    let mut finish = |line: &mut Vec<u8>| {
        let text = String::from_utf8_lossy(line).trim().to_owned();
        line.clear();
        if text.is_empty() {
            return;
        }
        tracing::info!(image, said = text.as_str(), "job");
        if last.len() == LINES {
            last.pop_front();
        }
        last.push_back(text);
    };
    while let Ok(size @ 1..) = stream.read(&mut buffer).await {
        for byte in &buffer[..size] {
            match byte {
                b'\n' => finish(&mut line),
                byte if line.len() < LINE => line.push(*byte),
                _ => {}
            }
        }
    }
    finish(&mut line);
    Vec::from(last).join("; ")
}

/// The verb `lazuli copy`.
pub(super) fn copy(source: &str, target: &str) -> Vec<OsString> {
    vec!["copy".into(), source.into(), target.into()]
}

/// The verb `lazuli index`.
pub(super) fn index(image: &str, sign: Option<&Path>) -> Vec<OsString> {
    signed(vec!["index".into(), image.into()], sign)
}

/// The verb `lazuli convert --keep-oci`, whose result replaces the tag.
pub(super) fn convert(source: &str, target: &str, sign: Option<&Path>) -> Vec<OsString> {
    signed(vec!["convert".into(), source.into(), target.into(), "--keep-oci".into()], sign)
}

fn signed(mut verb: Vec<OsString>, sign: Option<&Path>) -> Vec<OsString> {
    if let Some(key) = sign {
        verb.extend(["--sign".into(), key.into()]);
    }
    verb
}
