use std::{
    ffi::OsString,
    io::IsTerminal,
    os::unix::process::ExitStatusExt,
    process::{ExitCode, ExitStatus},
    time::Instant,
};

use anyhow::{Context, Result, bail};
use clap::Args;
use indicatif::BinaryBytes;
use lazuli_runtime::daemon::{Client, MountStatus};
use rustix::process::{Pid, Signal, kill_process};
use tokio::signal::unix::{SignalKind, signal};

use super::{mount, status};
use crate::{
    Session,
    container::{Bundle, ImageProcess, User, bundle_config},
};

/// Start a container on an image that has not arrived yet
///
/// The image is mounted lazily, overlayfs takes the writes, and runc runs the command in the
/// foreground. The exit code is the command's; 125 means that Lazuli itself failed. What
/// the container wrote is gone afterwards.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    image: mount::ImageArguments,
    /// Print what was fetched, to stderr
    #[arg(long)]
    stats: bool,
    /// Replaces the image's command
    #[arg(last = true, value_name = "CMD")]
    command: Vec<OsString>,
}

pub(crate) fn run(session: &Session, arguments: &Arguments) -> Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    // From here on signals end the container, not this process, which has to clean up after it.
    let mut signals = {
        let _context = runtime.enter();
        Signals::catch()?
    };
    let started = Instant::now();
    let bundle = Bundle::create(&session.root)?;
    let mounted = mount::mount(session, &arguments.image, bundle.lower())?;
    let image_mounted = started.elapsed();
    bundle.mount_overlay()?;
    let process = ImageProcess::from_config(&mounted.config)?;
    let user = User::resolve(process.user(), &bundle.lower())?;
    let terminal = std::io::stdin().is_terminal() && std::io::stdout().is_terminal();
    let rootfs = bundle.rootfs();
    let config =
        bundle_config(bundle.id(), &rootfs, &process, &user, &arguments.command, terminal)?;
    bundle.write_config(&config)?;
    let status = runtime.block_on(wait(&bundle, &mut signals))?;
    if arguments.stats {
        let ended = started.elapsed();
        let after = current(session, &bundle)?;
        eprintln!(
            "lazuli: mounted in {:.3} s, ended after {:.3} s with driver {:?}",
            image_mounted.as_secs_f64(),
            ended.as_secs_f64(),
            after.driver
        );
        eprintln!(
            "lazuli: fetched {} ({} bytes) of {} in {} requests, {:.1} % of the image",
            BinaryBytes(after.bytes_fetched),
            after.bytes_fetched,
            BinaryBytes(after.bytes_total),
            after.requests,
            percent(after.bytes_fetched, after.bytes_total),
        );
    }
    drop(bundle);
    Ok(ExitCode::from(exit_code(status)))
}

fn current(session: &Session, bundle: &Bundle) -> Result<MountStatus> {
    let mounts = status::fetch(&mut Client::connect(&session.root)?)?.mounts;
    let own = mounts.into_iter().find(|mount| mount.mountpoint == bundle.lower());
    own.context("the daemon no longer serves this container's image")
}

async fn wait(bundle: &Bundle, signals: &mut Signals) -> Result<ExitStatus> {
    let mut runc = match tokio::process::Command::from(bundle.runc_run()).spawn() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            bail!("runc is not installed: `apt-get install runc`")
        }
        other => other.context("cannot start runc")?,
    };
    let pid = runc.id().and_then(|id| Pid::from_raw(id.cast_signed()));
    loop {
        tokio::select! {
            status = runc.wait() => return status.context("cannot wait for runc"),
            received = signals.next() => {
                // A terminal sends Ctrl-C to the whole group, runc included.
                let shared = matches!(received, Signal::INT | Signal::QUIT)
                    && std::io::stdin().is_terminal();
                if let Some(pid) = pid && !shared {
                    let _ = kill_process(pid, received);
                }
            }
        }
    }
}

/// The signals that ask a command to end.
struct Signals {
    hangup: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
    quit: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
}

impl Signals {
    fn catch() -> Result<Self> {
        Ok(Signals {
            hangup: signal(SignalKind::hangup())?,
            interrupt: signal(SignalKind::interrupt())?,
            quit: signal(SignalKind::quit())?,
            terminate: signal(SignalKind::terminate())?,
        })
    }

    async fn next(&mut self) -> Signal {
        tokio::select! {
            _ = self.hangup.recv() => Signal::HUP,
            _ = self.interrupt.recv() => Signal::INT,
            _ = self.quit.recv() => Signal::QUIT,
            _ = self.terminate.recv() => Signal::TERM,
        }
    }
}

/// As a shell shows it: 128 + signal for a command that a signal ended.
fn exit_code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX)
}

#[expect(clippy::cast_precision_loss, reason = "a percentage for people")]
fn percent(part: u64, whole: u64) -> f64 {
    100.0 * part as f64 / whole.max(1) as f64
}
