use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    os::fd::AsFd as _,
    process::{Command, ExitCode, Stdio},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use clap::{ArgGroup, Args};
use futures_util::future::join_all;
use lazuli_registry::{Bundle, Options};
use lazuli_runtime::{
    daemon::{self, BUNDLE_DIRECTORY, Ended, Readers, Settings, Worker},
    keeper::{Keeper, Programs, Role},
    kernel::loop_devices,
};

use rustix::{fs::Mode, process::umask};

use crate::{Session, containerd, daemon as processes, exit, metrics, mirror};

/// Run the node's daemon in the foreground
///
/// One daemon serves every image of a node. `mount` and `run` start it when it is not running. It
/// consists of two processes: a worker, and a small keeper that starts another worker when one
/// dies, while readers wait. With the driver `loop` the worker has a helper.
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("handover").args(["takeover", "succeed", "check"])))]
pub(crate) struct Arguments {
    #[command(flatten)]
    role: Roles,
    /// Take over even if FUSE mounts of an earlier version cannot be handed over (before Linux
    /// 6.9): processes that use them get errors from then on
    #[arg(long, requires = "handover")]
    force: bool,
}

#[derive(Debug, Args)]
#[group(multiple = false)]
struct Roles {
    /// Replace the running daemon with this program, under running containers. Returns when the new
    /// one serves; if it cannot, the old one continues
    #[arg(long)]
    takeover: bool,
    /// Run as the new keeper of a takeover
    #[arg(long, hide = true)]
    succeed: bool,
    /// Run as the keeper of a worker that has lost its own
    #[arg(long, hide = true)]
    keep: bool,
    /// Run as the worker
    #[arg(long, hide = true)]
    worker: bool,
    /// Check whether this program could serve
    #[arg(long, hide = true)]
    check: bool,
    /// Run as a worker's helper, which makes system calls for it
    #[arg(long, hide = true)]
    helper: bool,
}

impl Arguments {
    fn readers(&self) -> Readers {
        if self.force { Readers::End } else { Readers::Keep }
    }
}

/// The right to write of everyone but the owner.
const OTHERS_WRITE: Mode = Mode::WGRP.union(Mode::WOTH);

/// The new keeper's message when a takeover has succeeded.
const SERVING: &str = "serving";

pub(crate) fn run(session: &Session, arguments: &Arguments) -> Result<ExitCode> {
    // The kernel has called it `exe`, after the link in /proc that it was started by.
    let _ = fs::write("/proc/self/comm", "lazuli");
    // Whoever started it, others may not write its files.
    let inherited = umask(OTHERS_WRITE);
    umask(inherited | OTHERS_WRITE);
    let root = &session.root;
    match arguments.role {
        Roles { takeover: true, .. } => take_over(session, arguments.readers())?,
        Roles { worker: true, .. } => return work(session),
        Roles { helper: true, .. } => help(session)?,
        Roles { check: true, .. } => daemon::check(root, arguments.readers())?,
        Roles { succeed: true, .. } => {
            let keeper = Keeper::succeed(root, programs(session, arguments.readers()))?;
            let mut output = std::io::stdout();
            // The parent that waits for this may be gone.
            let _ = writeln!(output, "{SERVING}").and_then(|()| output.flush());
            keeper.run()?;
        }
        Roles { keep: true, .. } => {
            Keeper::adopt(root, programs(session, Readers::Keep))?.run()?;
        }
        Roles { .. } => {
            Keeper::open(root, programs(session, Readers::Keep))?.run()?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// This program with these options, in other roles.
fn programs(session: &Session, readers: Readers) -> Programs {
    let template = processes::Template::new(session);
    Arc::new(move |role| {
        let mut command = match role {
            Role::Worker => template.command("--worker"),
            Role::Keeper => template.command("--keep"),
            Role::Check => with_readers(template.command("--check"), readers),
            Role::Helper => template.command("--helper"),
        };
        // `daemon --takeover` reads the new keeper's output until it is closed, so no longer-lived
        // process may hold its pipe.
        command.stdout(Stdio::null());
        command
    })
}

fn with_readers(mut command: Command, readers: Readers) -> Command {
    if readers == Readers::End {
        command.arg("--force");
    }
    command
}

fn take_over(session: &Session, readers: Readers) -> Result<()> {
    let command = processes::Template::new(session).command("--succeed");
    let mut command = with_readers(command, readers);
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    let mut successor = command.spawn().context("cannot start the new keeper")?;
    let mut said = String::new();
    if let Some(output) = successor.stdout.take() {
        BufReader::new(output).read_line(&mut said)?;
    }
    if said.trim_end() != SERVING {
        // It has said why.
        let status = successor.wait()?;
        bail!("nothing was taken over ({status})");
    }
    println!("version {} serves {}", env!("CARGO_PKG_VERSION"), session.root.display());
    Ok(())
}

/// Time limit for answers to containerd in progress when another worker takes over.
const LAST_WORDS: Duration = Duration::from_secs(3);

/// Runs a worker's helper, which gets its orders at standard input.
fn help(session: &Session) -> Result<()> {
    let orders = std::io::stdin().as_fd().try_clone_to_owned()?;
    loop_devices::help(&session.root, orders).context("only a worker can start a helper")
}

/// The worker's life.
fn work(session: &Session) -> Result<ExitCode> {
    // Before anything else is opened.
    let (link, given) = Worker::enter().context("only a keeper can start a worker")?;
    link.attend(programs(session, Readers::Keep)).context("cannot listen to the keeper")?;
    let snapshotter = session.config.snapshotter.as_ref();
    let layers = session.config.layers.as_ref();
    let layers = layers.map(|layers| layers.settings(&session.root)).transpose()?;
    let settings = Settings {
        amplify: session.config.fetch.amplify_bytes,
        deadline: session.config.fetch.deadline(),
        max_bytes: session.config.cache.max_bytes,
        direct_io: session.config.cache.direct_io,
        keep_free: Some(session.config.cache.keep_free()?),
        prefetch: session.config.prefetch.settings(),
        index: session.config.index.settings(),
        images: session.config.prefetch.images.clone(),
        registry: Options {
            bundle: Some(Bundle::at(session.root.join(BUNDLE_DIRECTORY))),
            ..session.config.node_registries()?
        },
        snapshots: snapshotter.map(|table| table.address.clone()),
        mirror: session.config.mirror.as_ref().map(|table| table.listen),
        layers,
        policy: session.config.policy.clone(),
    };
    let driver = snapshotter.map(|table| table.driver).unwrap_or_default();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let ended = runtime.block_on(async {
        let mut worker = Worker::open(&session.root, &settings, link, given).await?;
        let mirror = mirror::serve(session, &settings.registry, &mut worker);
        let (mirror, pulls) = mirror.unzip();
        let first = session.config.index.first;
        let metrics = metrics::serve(session.config.metrics.as_ref(), &worker);
        let snapshots = containerd::serve(&session.root, driver, first, mirror, &mut worker);
        let ended = worker.serve().await.context("the worker ended")?;
        if ended == Ended::Left {
            // Answers that are being written.
            let services = pulls.into_iter().chain(snapshots).chain(metrics);
            let _ = tokio::time::timeout(LAST_WORDS, join_all(services)).await;
        }
        anyhow::Ok(ended)
    });
    // Not a destructor may run unless nothing is left to serve: each would take something away from
    // the next worker.
    match ended {
        Ok(Ended::Stopped) => Ok(ExitCode::SUCCESS),
        Ok(Ended::Left) => std::process::exit(0),
        Err(error) => {
            exit::report(&error, 1);
            std::process::exit(1)
        }
    }
}
