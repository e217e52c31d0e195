use std::{
    ffi::OsString,
    io::IsTerminal,
    os::unix::process::ExitStatusExt,
    process::{ExitCode, ExitStatus},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use clap::Args;
use futures_util::future::select_all;
use indicatif::BinaryBytes;
use lazuli_runtime::{
    daemon::{Client, MountStatus},
    kernel::mount::Suid,
};
use rustix::process::{Pid, Signal, kill_process};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::oneshot,
};

use super::mount;
use crate::{
    Session,
    container::{
        Bundle, DEFAULT_PIDS, ImageProcess, Isolation, Limits, Network, Stdio, User, bundle_config,
        look_up,
    },
};

/// Start a container on an image that has not arrived yet
///
/// The image is mounted lazily, overlayfs takes the writes, and runc runs the command in the
/// foreground. The exit code is the command's; 125 means that Lazuli itself failed, 126 that the
/// command cannot be executed, 127 that it was not found. The container's writes are discarded
/// afterwards. An image without an index is pulled first.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    image: mount::ImageArguments,
    /// Print statistics of the fetched data to stderr
    #[arg(long)]
    stats: bool,
    /// The container's network
    #[arg(long, value_name = "NETWORK", default_value = "host")]
    network: Network,
    /// Maximum number of processes and threads
    #[arg(long, value_name = "N", default_value_t = DEFAULT_PIDS)]
    pids_limit: u32,
    /// Maximum memory, as in 512m or 2g [default: three quarters of the machine's]
    #[arg(long, value_name = "BYTES", value_parser = memory)]
    memory: Option<u64>,
    /// Use a user namespace: the container's root has no power over the node. Owners of files stay
    /// as they are. Needs --network none
    #[arg(long)]
    user_namespace: bool,
    /// Replaces the image's command
    #[arg(last = true, value_name = "CMD")]
    command: Vec<OsString>,
}

pub(crate) fn run(session: &Session, arguments: &Arguments) -> Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(container(session, arguments))
}

async fn container(session: &Session, arguments: &Arguments) -> Result<ExitCode> {
    // From here on, signals end the container, and this process cleans up after it.
    let mut signals = Signals::catch()?;
    if arguments.user_namespace && arguments.network == Network::Host {
        // The kernel lets no namespace mount the /sys of a network that is not its own.
        bail!("--user-namespace needs a network of its own: --network none");
    }
    arguments.image.must_show_files()?;
    let started = Instant::now();
    let bundle = Bundle::create(&session.root)?;
    let request = mount::request(&arguments.image, bundle.lower(), Suid::Keep)?;
    // A registry may take long to answer. The daemon gives up when this process is gone.
    let ((answer, mut mounted), own) = (oneshot::channel(), session.clone());
    std::thread::spawn(move || answer.send(mount::call(&own, &request)).is_ok());
    let mounted = loop {
        tokio::select! {
            mounted = &mut mounted => break mounted.context("the mount request failed")??,
            signal = signals.next() => match signal {
                // By default these end nothing.
                Signal::CONT | Signal::WINCH => {}
                signal => return Ok(ended_by(signal.as_raw())),
            },
        }
    };
    let image_mounted = started.elapsed();
    bundle.mount_overlay()?;
    let image = ImageProcess::from_config(&mounted.config)?;
    let user = User::resolve(image.user(), &bundle.lower())?;
    let process = image.arguments(&arguments.command)?;
    let directory = image.working_directory();
    if let Err(error) = look_up(&process[0], &bundle.lower(), &image.search_path(), &directory) {
        eprintln!("lazuli: {error}");
        return Ok(ExitCode::from(error.exit_code()));
    }
    let stdio = match std::io::stdin().is_terminal() && std::io::stdout().is_terminal() {
        true => Stdio::Terminal,
        false => Stdio::Inherited,
    };
    let isolation = Isolation {
        network: arguments.network,
        limits: Limits { pids: arguments.pids_limit, memory: arguments.memory },
        user_namespace: arguments.user_namespace,
    };
    let config =
        bundle_config(bundle.id(), &bundle.rootfs(), &image, &user, &process, stdio, isolation);
    bundle.write_config(&config)?;
    let status = wait(&bundle, &mut signals).await?;
    if arguments.stats {
        let after = current(session, &bundle)?;
        print_statistics(&after, image_mounted, started.elapsed());
    }
    if !status.success() && !bundle.has_started() {
        bail!("runc could not start the container; it says why above");
    }
    Ok(match (status.code(), status.signal()) {
        (Some(code), _) => ExitCode::from(u8::try_from(code).unwrap_or(u8::MAX)),
        (None, signal) => ended_by(signal.unwrap_or_default()),
    })
}

/// Bytes, with Docker's suffixes.
fn memory(text: &str) -> Result<u64, String> {
    let (number, shift) = match text.strip_suffix(['b', 'k', 'm', 'g', 'B', 'K', 'M', 'G']) {
        Some(number) => match text.as_bytes()[number.len()].to_ascii_lowercase() {
            b'k' => (number, 10),
            b'm' => (number, 20),
            b'g' => (number, 30),
            _ => (number, 0),
        },
        None => (text, 0),
    };
    let parsed = number.parse().ok().and_then(|number: u64| number.checked_mul(1 << shift));
    parsed.ok_or_else(|| "expected bytes, or a number with k, m or g".to_owned())
}

/// An exit code in a shell's convention: 128 + signal.
fn ended_by(signal: i32) -> ExitCode {
    ExitCode::from(u8::try_from(128 + signal).unwrap_or(u8::MAX))
}

fn print_statistics(after: &MountStatus, mounted: Duration, ended: Duration) {
    eprintln!(
        "lazuli: mounted in {:.3} s, ended after {:.3} s with driver {:?}",
        mounted.as_secs_f64(),
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

fn current(session: &Session, bundle: &Bundle) -> Result<MountStatus> {
    let mounts = crate::daemon::status(&mut Client::connect(&session.root)?)?.mounts;
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

/// Signals that `docker run` passes to its container.
const SIGNALS: [Signal; 9] = [
    Signal::HUP,
    Signal::INT,
    Signal::QUIT,
    Signal::TERM,
    Signal::USR1,
    Signal::USR2,
    Signal::ALARM,
    Signal::CONT,
    Signal::WINCH,
];

/// The signals that are handed on.
struct Signals(Vec<(Signal, tokio::signal::unix::Signal)>);

impl Signals {
    fn catch() -> Result<Self> {
        let catch = |number: Signal| Ok((number, signal(SignalKind::from_raw(number.as_raw()))?));
        Ok(Signals(SIGNALS.into_iter().map(catch).collect::<Result<_>>()?))
    }

    async fn next(&mut self) -> Signal {
        let each = self.0.iter_mut().map(|(number, stream)| {
            Box::pin(async {
                stream.recv().await;
                *number
            })
        });
        select_all(each).await.0
    }
}

#[expect(clippy::cast_precision_loss, reason = "a percentage for people")]
fn percent(part: u64, whole: u64) -> f64 {
    100.0 * part as f64 / whole.max(1) as f64
}
