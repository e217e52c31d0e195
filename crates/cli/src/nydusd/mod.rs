//! The command under the name `nydusd`, which nydus-snapshotter starts to serve images. It answers
//! upstream's API, and the node's daemon serves: all images of a node share one cache, and mounts
//! outlive this process.
//!
//! ```text
//! nydus-snapshotter ─▶ api ─▶ service ─▶ control socket of `lazuli daemon`
//!        │                       │
//!        └── supervisor ◀────────┘  the list of mounts, for a successor
//! ```
//!
//! It has exactly the verbs and options that nydus-snapshotter passes; the command line refuses all
//! others.

mod api;
mod backend;
mod documents;
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
use tokio::signal::unix::{SignalKind, signal};

use self::service::{Identity, Instance, Phase, Service};
use crate::{Session, exit, path_context::PathContext as _, start_logging};

/// Returns whether the command was called by upstream's name.
pub(crate) fn is_called() -> bool {
    let name = std::env::args_os().next();
    name.as_deref().and_then(|name| Path::new(name).file_name()) == Some(OsStr::new("nydusd"))
}

/// Serve images for nydus-snapshotter as upstream's daemon does
#[derive(Debug, Parser)]
#[command(name = "nydusd", version = VERSION, max_term_width = 100)]
struct Arguments {
    /// State directory of the daemon that serves [default: /var/lib/lazuli]
    #[arg(long, value_name = "DIR")]
    root: Option<PathBuf>,
    #[command(subcommand)]
    verb: Verb,
}

/// In upstream's format, for programs that parse it.
const VERSION: &str = concat!("\nVersion: \tv", env!("CARGO_PKG_VERSION"), " (Lazuli)");

#[derive(Debug, Subcommand)]
enum Verb {
    /// Show images on this node
    Fuse(Fuse),
}

#[derive(Debug, Args)]
struct Fuse {
    /// Where images appear: with --bootstrap its files, else a directory for each mount
    #[arg(long, value_name = "DIR")]
    mountpoint: PathBuf,
    /// The socket of the API
    #[arg(long, value_name = "SOCKET")]
    apisock: PathBuf,
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
    let Arguments { root, verb: Verb::Fuse(arguments) } = Arguments::parse();
    match run(root, &arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => exit::report(&error, 1),
    }
}

fn run(root: Option<PathBuf>, arguments: &Fuse) -> Result<()> {
    if let Some(path) = &arguments.log_file {
        let file = OpenOptions::new().create(true).append(true).open(path);
        let file = file.cannot("write", path)?;
        rustix::stdio::dup2_stderr(file).cannot("log to", path)?;
    }
    start_logging(&arguments.log_level)?;
    let session = Session::new(root, None, None)?;
    let mountpoint = arguments.mountpoint.canonicalize();
    let mountpoint = mountpoint.cannot("mount at", &arguments.mountpoint)?;
    let identity = Identity { id: arguments.id.clone(), supervisor: arguments.supervisor.clone() };
    let successor =
        arguments.upgrade || arguments.supervisor.is_some() && is_left(&arguments.apisock);
    let phase = if successor { Phase::Init } else { Phase::Running };
    let service = Arc::new(Service::new(session, mountpoint, identity, phase));
    if let (Some(bootstrap), Some(path), false) =
        (&arguments.bootstrap, &arguments.config, successor)
    {
        let config = backend::read(path)?;
        // Before the socket is there: clients give a mount more time to appear than to be ready.
        service.mount("/", Instance { source: bootstrap.clone(), config })?;
    }
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime?.block_on(serve(&arguments.apisock, service))
}

/// Returns whether a process that listened at `socket` died.
fn is_left(socket: &Path) -> bool {
    let connected = UnixStream::connect(socket);
    connected.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
}

/// Serves until a client or a signal ends it. A client leaves the mounts to a successor.
async fn serve(socket: &Path, service: Arc<Service>) -> Result<()> {
    let listener = api::listen(socket).cannot("listen at", socket)?;
    let (mut terminate, mut interrupt) =
        (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    tracing::info!(socket = %socket.display(), "serving");
    let unmount = tokio::select! {
        () = api::serve(listener, service.clone()) => false,
        _ = terminate.recv() => true,
        _ = interrupt.recv() => true,
    };
    // Clients take a socket without a process for a death.
    std::fs::remove_file(socket).cannot("remove", socket)?;
    if unmount {
        let unmounted = tokio::task::spawn_blocking(move || service.unmount_all()).await;
        unmounted.context("the clean-up ended early")??;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        super::Arguments::command().debug_assert();
    }
}
