use std::{ffi::OsString, os::unix::process::CommandExt as _};

use anyhow::{Context as _, Result, bail};
use clap::Args;
use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal, setpriority_process};

use crate::{Session, daemon::Template, serve_convert};

/// Receive a registry's events, and make the images that are pushed start lazily
///
/// Runs in the foreground, beside a registry and without privileges, and is set up by the table
/// [convert] of the configuration. Each tag that the registry reports is indexed or converted by a
/// process of its own. Nothing of an image is run.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Become this verb at a low priority, as a child of this process: PID VERB ARGUMENTS…
    #[arg(long, hide = true, num_args = 2.., allow_hyphen_values = true)]
    job: Option<Vec<OsString>>,
}

pub(crate) fn run(session: &Session, arguments: &Arguments) -> Result<()> {
    if let Some(job) = &arguments.job {
        return become_job(session, job);
    }
    let table = session.config.convert.as_ref().context(
        "no table [convert] in the configuration, expected at least its keys `secret_file`, `registry` \
         and `repositories`",
    )?;
    let settings = table.settings(&session.root)?;
    serve_convert::serve(session, settings)
}

/// The priority of jobs: registries often run on the same machine.
const NICE: i32 = 10;

/// Replaces this process by the job, which ends with the server.
fn become_job(session: &Session, job: &[OsString]) -> Result<()> {
    let [server, verb @ ..] = job else { bail!("expected PID VERB") };
    let server = server.to_str().and_then(|pid| pid.parse().ok()).and_then(Pid::from_raw);
    // Not SIGKILL: the verb removes its temporary files.
    set_parent_process_death_signal(Some(Signal::TERM)).context("prctl")?;
    // It may have ended before the call.
    if server.is_none() || getppid() != server {
        bail!("the server has ended");
    }
    setpriority_process(None, NICE).context("cannot lower the priority")?;
    let error = Template::new(session).program().args(verb).exec();
    Err(error).context("cannot start the job")
}
