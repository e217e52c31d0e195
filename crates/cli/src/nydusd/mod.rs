//! The command under the name `nydusd`, which nydus-snapshotter and Kata Containers start to serve
//! images. It answers upstream's API, and the node's daemon serves: all images of a node share one
//! cache, and mounts outlive this process.
//!
//! ```text
//! nydus-snapshotter ─▶ api ─▶ service ─▶ control socket of `lazuli daemon`
//!        │                     │    └──▶ guest, over vhost-user
//!        └── supervisor ◀──────┘  the list of mounts, for a successor
//! ```
//!
//! It has exactly the verbs and options that these pass; the command line refuses all others.

mod api;
mod backend;
mod documents;
mod guest;
mod service;
mod supervisor;

use std::{
    ffi::OsStr,
    fs::OpenOptions,
    io,
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
};

use anyhow::{Context as _, Result};
use clap::{Args, Parser, Subcommand};
use lazuli_sys::limit::raise_descriptors;
use rustix::{fs::Mode, process::umask};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::oneshot,
};

use self::{
    guest::{Scratch, Share, Socket, sweep},
    service::{Identity, Instance, Phase, Service},
};
use crate::{Session, exit, path_context::PathContext as _, start_logging};

/// Returns whether the command was called by upstream's name.
pub(crate) fn is_called() -> bool {
    let name = std::env::args_os().next();
    name.as_deref().and_then(|name| Path::new(name).file_name()) == Some(OsStr::new("nydusd"))
}

/// Serve images for nydus-snapshotter and Kata Containers as upstream's daemon does
#[derive(Debug, Parser)]
#[command(name = "nydusd", version = VERSION, max_term_width = 100)]
struct Arguments {
    /// State directory of the daemon that serves [default: /var/lib/lazuli]
    #[arg(long, value_name = "DIR")]
    root: Option<PathBuf>,
    #[command(subcommand)]
    verb: Verb,
}

/// In upstream's format, which nydus-snapshotter parses: it replaces processes of another commit.
const VERSION: &str = concat!(
    "\nVersion: \tv",
    env!("CARGO_PKG_VERSION"),
    " (Lazuli)\nGit Commit: \t",
    env!("CARGO_PKG_VERSION")
);

#[derive(Debug, Subcommand)]
enum Verb {
    /// Show images on this node
    Fuse(Fuse),
    /// Show images and directories to a virtual machine
    Virtiofs(Virtiofs),
}

#[derive(Debug, Args)]
struct Fuse {
    /// Where images appear: with --bootstrap its files, else a directory for each mount
    #[arg(long, value_name = "DIR")]
    mountpoint: PathBuf,
    /// A bootstrap to mount at once
    #[arg(long, value_name = "FILE", requires = "config")]
    bootstrap: Option<PathBuf>,
    /// Where its blobs are
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// The socket of whoever keeps the list of mounts while this process is replaced
    #[arg(long, value_name = "SOCKET")]
    supervisor: Option<PathBuf>,
    /// What the supervisor calls this process
    #[arg(long)]
    id: Option<String>,
    /// Wait for the mounts of another process
    #[arg(long)]
    upgrade: bool,
    #[command(flatten)]
    common: Common,
}

#[derive(Debug, Args)]
struct Virtiofs {
    /// The socket at which the machine's monitor connects
    #[arg(long, value_name = "SOCKET")]
    sock: PathBuf,
    #[arg(long, hide = true)]
    hybrid_mode: bool,
    #[command(flatten)]
    common: Common,
}

#[derive(Debug, Args)]
struct Common {
    /// The socket of the API
    #[arg(long, value_name = "SOCKET")]
    apisock: PathBuf,
    /// What is logged
    #[arg(
        long,
        value_parser = ["trace", "debug", "info", "warn", "error"],
        default_value = "info"
    )]
    log_level: String,
    /// Where, instead of standard error
    #[arg(long, value_name = "FILE")]
    log_file: Option<PathBuf>,
    #[command(flatten)]
    unused: Unused,
}

/// Settings of upstream's process that the node's daemon has no use for: it has its own.
#[derive(Debug, Args)]
struct Unused {
    #[arg(long, hide = true)]
    thread_num: Option<u32>,
    #[arg(long, hide = true)]
    prefetch_files: Option<PathBuf>,
    #[arg(long, hide = true)]
    failover_policy: Option<String>,
    #[arg(long, hide = true)]
    log_rotation_size: Option<u64>,
    #[arg(long, hide = true)]
    rlimit_nofile: Option<u64>,
}

pub(crate) fn main() -> ExitCode {
    let Arguments { root, verb } = Arguments::parse();
    let done = match &verb {
        Verb::Fuse(arguments) => fuse(root, arguments),
        Verb::Virtiofs(arguments) => virtiofs(root, arguments),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => exit::report(&error, 1),
    }
}

fn fuse(root: Option<PathBuf>, arguments: &Fuse) -> Result<()> {
    let session = begin(root, &arguments.common)?;
    let mountpoint = arguments.mountpoint.canonicalize();
    let mountpoint = mountpoint.cannot("mount at", &arguments.mountpoint)?;
    let socket = &arguments.common.apisock;
    let identity = Identity { id: arguments.id.clone(), supervisor: arguments.supervisor.clone() };
    let successor = arguments.upgrade || arguments.supervisor.is_some() && is_left(socket);
    let phase = if successor { Phase::Init } else { Phase::Running };
    let service = Arc::new(Service::new(session, mountpoint, None, identity, phase));
    if let (Some(bootstrap), Some(path), false) =
        (&arguments.bootstrap, &arguments.config, successor)
    {
        let (source, config) = (bootstrap.clone(), backend::read(path)?);
        // Before the socket is there: clients give a mount more time to appear than to be ready.
        service.mount("/", Instance::Image { source, config })?;
    }
    serve(socket, service, std::future::pending(), AtExit::Leave)
}

fn virtiofs(root: Option<PathBuf>, arguments: &Virtiofs) -> Result<()> {
    let session = begin(root, &arguments.common)?;
    // Each file that a guest knows has a descriptor.
    raise_descriptors().context("cannot raise the limit of descriptors")?;
    let scratch = Scratch::new(&session)?;
    let served = show_to_guest(&session, &scratch.directory, arguments);
    served.and(scratch.remove())
}

fn show_to_guest(session: &Session, directory: &Path, arguments: &Virtiofs) -> Result<()> {
    let (share, identity) = (Share::new(), Identity { id: None, supervisor: None });
    let (guest, directory) = (Some(share.clone()), directory.to_owned());
    let service = Service::new(session.clone(), directory, guest, identity, Phase::Running);
    let monitor = Socket::listen(&arguments.sock)?;
    let (tell, gone) = oneshot::channel();
    std::thread::spawn(move || tell.send(monitor.serve(&share)));
    let swept = session.clone();
    let ended = async move {
        tokio::task::spawn_blocking(move || {
            // Files of the guest are made with the modes that it asks for.
            umask(Mode::empty());
            if let Err(error) = sweep(&swept) {
                tracing::warn!(error = format!("{error:#}"), "what other processes left stays");
            }
        });
        match gone.await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::error!(error = format!("{error:#}"), "the guest has ended"),
            Err(_) => tracing::error!("the guest's thread has failed"),
        }
    };
    // Nobody takes a guest over.
    serve(&arguments.common.apisock, Arc::new(service), ended, AtExit::Unmount)
}

/// What becomes of the mounts when a client ends the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AtExit {
    /// A successor has them.
    Leave,
    Unmount,
}

/// Requests of clients at a time.
const THREADS: usize = 16;

/// Sets the log up, and reads the configuration.
fn begin(root: Option<PathBuf>, common: &Common) -> Result<Session> {
    if let Some(path) = &common.log_file {
        let file = OpenOptions::new().create(true).append(true).open(path);
        let file = file.cannot("write", path)?;
        rustix::stdio::dup2_stderr(file).cannot("log to", path)?;
    }
    start_logging(&common.log_level)?;
    Session::new(root, None, None)
}

/// Returns whether a process that listened at `socket` died.
fn is_left(socket: &Path) -> bool {
    let connected = UnixStream::connect(socket);
    connected.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
}

/// Serves until a client, a signal or `ended` ends it.
fn serve(
    socket: &Path,
    service: Arc<Service>,
    ended: impl Future<Output = ()>,
    at_exit: AtExit,
) -> Result<()> {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    let builder = builder.worker_threads(2).max_blocking_threads(THREADS).enable_all();
    let runtime = builder.build()?;
    let mounts = service.clone();
    let unmount = runtime.block_on(async {
        let listener = api::listen(socket).cannot("listen at", socket)?;
        let (mut terminate, mut interrupt) =
            (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        tracing::info!(socket = %socket.display(), "serving");
        let unmount = tokio::select! {
            () = api::serve(listener, service) => at_exit == AtExit::Unmount,
            _ = terminate.recv() => true,
            _ = interrupt.recv() => true,
            () = ended => true,
        };
        // Clients take a socket without a process for a death.
        if let Err(error) = std::fs::remove_file(socket) {
            tracing::warn!(socket = %socket.display(), %error, "it stays");
        }
        Ok::<_, anyhow::Error>(unmount)
    });
    let unmounted = match unmount {
        // Here, and not on a thread of the runtime, which clients may keep busy.
        Ok(true) => mounts.unmount_all(),
        Ok(false) => Ok(()),
        Err(error) => mounts.unmount_all().and(Err(error)),
    };
    runtime.shutdown_background();
    unmounted
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        super::Arguments::command().debug_assert();
    }
}
