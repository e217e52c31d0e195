//! Asks the node's own `lazuli`.

use std::{path::Path, process::Stdio, time::Duration};

use anyhow::{Context, Result, bail};
use lazuli_runtime::daemon::Status;
use serde::{Deserialize, de::DeserializeOwned};
use tokio::{io::AsyncReadExt as _, process::Command, time::timeout};

/// Time limit for an answer. `doctor` itself gives each process that it asks some seconds.
const DEADLINE: Duration = Duration::from_secs(60);

/// Biggest answer in bytes. `status` has about 2 KiB for each mount.
const LIMIT: u64 = 16 << 20;

/// An observation at one moment.
#[derive(Debug)]
pub(super) struct Observation {
    /// The findings of `doctor` that matter to a lazy pod.
    pub(super) rows: Result<Vec<Row>>,
    /// The output of `status`.
    pub(super) status: Result<Status>,
}

/// A row of `lazuli doctor --json`, see [`crate::doctor::Row`].
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Row {
    pub(super) check: String,
    pub(super) verdict: String,
    pub(super) found: String,
    pub(super) fix: Option<String>,
}

#[derive(Deserialize)]
struct Rows {
    checks: Vec<Row>,
}

/// Asks `program`, see [`super::Reporter`].
pub(super) async fn observe(program: &Path) -> Observation {
    let rows = ask::<Rows>(program, "doctor").await.map(|rows| rows.checks);
    Observation { rows, status: ask(program, "status").await }
}

/// The output of a verb, which may exit with a failure, as `doctor` does when something is missing.
async fn ask<T: DeserializeOwned>(program: &Path, verb: &str) -> Result<T> {
    let command = format!("{} {verb}", program.display());
    let answer = timeout(DEADLINE, output(program, verb)).await;
    let answer = answer.with_context(|| format!("`{command}` did not end within {DEADLINE:?}"))?;
    let answer = answer.with_context(|| format!("`{command}` fails"))?;
    serde_json::from_slice(&answer).with_context(|| format!("`{command}` did not print its JSON"))
}

async fn output(program: &Path, verb: &str) -> Result<Vec<u8>> {
    let mut command = Command::new(program);
    command.arg(verb).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.kill_on_drop(true).spawn()?;
    let mut answer = Vec::new();
    if let Some(stdout) = child.stdout.take() {
        stdout.take(LIMIT + 1).read_to_end(&mut answer).await?;
    }
    if answer.len() as u64 > LIMIT {
        bail!("it printed more than {LIMIT} bytes");
    }
    child.wait().await?;
    Ok(answer)
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt as _};

    use super::*;

    fn program(directory: &tempfile::TempDir, script: &str) -> std::path::PathBuf {
        let path = directory.path().join("program");
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    #[tokio::test]
    async fn a_failed_check_is_an_answer_and_nonsense_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let lacking = r#"{"checks": [{"check": "plugin", "verdict": "lacking", "found": "nothing", "fix": "x", "new": 1}]}"#;
        let script = format!("[ $1 = doctor ] || exit 1; echo '{lacking}'; exit 1");
        let seen = observe(&program(&directory, &script)).await;
        assert_eq!(seen.rows.unwrap()[0].check, "plugin");
        let error = format!("{:#}", seen.status.unwrap_err());
        assert!(error.contains("status` did not print its JSON"), "{error}");
        let seen = observe(&program(&directory, "exec head -c 20000000 /dev/zero")).await;
        let error = format!("{:#}", seen.rows.unwrap_err());
        assert!(error.contains("more than 16777216 bytes"), "{error}");
        assert!(observe(&directory.path().join("missing")).await.rows.is_err());
    }
}
