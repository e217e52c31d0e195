//! The verbs, one file each: the command line, and one function that only orchestrates and prints.

mod bundle;
mod check;
mod commit;
mod convert;
mod copy;
mod daemon;
mod diff;
mod doctor;
mod index;
mod inspect;
mod manual;
mod merge;
mod mount;
mod node_report;
mod optimize;
mod prefetch;
mod preheat;
mod run;
mod scrub;
mod serve_convert;
mod setup;
pub(crate) mod status;
mod stop;
mod trace;
mod umount;
mod unpack;
pub(crate) mod verify_image;

use std::process::ExitCode;

use anyhow::Result;
use clap::Subcommand;

use crate::Session;

#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    Convert(convert::Arguments),
    Index(index::Arguments),
    Commit(commit::Arguments),
    Optimize(optimize::Arguments),
    Merge(merge::Arguments),
    Unpack(unpack::Arguments),
    Copy(copy::Arguments),
    Bundle(bundle::Arguments),
    Mount(mount::Arguments),
    #[command(visible_alias = "unmount")]
    Umount(umount::Arguments),
    Run(run::Arguments),
    Prefetch(prefetch::Arguments),
    Preheat(preheat::Arguments),
    Trace(trace::Arguments),
    Check(check::Arguments),
    Inspect(inspect::Arguments),
    Diff(diff::Arguments),
    Scrub(scrub::Arguments),
    Status(status::Arguments),
    Doctor(doctor::Arguments),
    VerifyImage(verify_image::Arguments),
    Daemon(daemon::Arguments),
    ServeConvert(serve_convert::Arguments),
    Stop(stop::Arguments),
    Setup(setup::Arguments),
    #[command(hide = true)]
    NodeReport(node_report::Arguments),
    #[command(hide = true)]
    Manual(manual::Arguments),
}

impl Verb {
    pub(crate) fn run(self, session: &Session) -> Result<ExitCode> {
        let done = |()| ExitCode::SUCCESS;
        match self {
            Verb::Convert(arguments) => convert::run(session, &arguments).map(done),
            Verb::Index(arguments) => index::run(session, &arguments).map(done),
            Verb::Commit(arguments) => commit::run(session, &arguments).map(done),
            Verb::Optimize(arguments) => optimize::run(session, &arguments).map(done),
            Verb::Merge(arguments) => merge::run(session, &arguments).map(done),
            Verb::Unpack(arguments) => unpack::run(session, &arguments).map(done),
            Verb::Copy(arguments) => copy::run(session, &arguments).map(done),
            Verb::Bundle(arguments) => bundle::run(session, &arguments).map(done),
            Verb::Mount(arguments) => mount::run(session, &arguments).map(done),
            Verb::Umount(arguments) => umount::run(session, &arguments).map(done),
            Verb::Run(arguments) => run::run(session, &arguments),
            Verb::Prefetch(arguments) => prefetch::run(session, &arguments).map(done),
            Verb::Preheat(arguments) => preheat::run(session, &arguments).map(done),
            Verb::Trace(arguments) => trace::run(session, &arguments).map(done),
            Verb::Check(arguments) => check::run(session, &arguments).map(done),
            Verb::Inspect(arguments) => inspect::run(session, &arguments).map(done),
            Verb::Diff(arguments) => diff::run(session, &arguments),
            Verb::Scrub(arguments) => scrub::run(session, &arguments),
            Verb::Status(arguments) => status::run(session, &arguments).map(done),
            Verb::Doctor(arguments) => doctor::run(session, &arguments),
            Verb::VerifyImage(arguments) => verify_image::run(session, &arguments),
            Verb::Daemon(arguments) => daemon::run(session, &arguments),
            Verb::ServeConvert(arguments) => serve_convert::run(session, &arguments).map(done),
            Verb::Setup(arguments) => setup::run(session, &arguments).map(done),
            Verb::Stop(arguments) => stop::run(session, &arguments).map(done),
            Verb::NodeReport(arguments) => node_report::run(&arguments).map(done),
            Verb::Manual(arguments) => manual::run(&arguments).map(done),
        }
    }

    /// The exit code when [`Verb::run`] fails, see [`crate::exit`].
    pub(crate) fn failure_code(&self) -> u8 {
        match self {
            Verb::Run(_) => 125,
            Verb::Diff(_) => 2,
            _ => 1,
        }
    }

    /// A daemon's log is read later, so it is more verbose than an interactive command's.
    pub(crate) fn default_log_level(&self) -> &'static str {
        let is_daemon =
            matches!(self, Verb::Daemon(_) | Verb::NodeReport(_) | Verb::ServeConvert(_));
        if is_daemon { "info" } else { "warn" }
    }
}
