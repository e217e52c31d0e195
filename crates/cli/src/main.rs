//! The `lazuli` command: the only part of the project that prints.
#![forbid(unsafe_code)]
#![allow(rustdoc::broken_intra_doc_links, reason = "comments on arguments are the help text")]

#[macro_use]
mod output;

mod bounded_file;
mod commands;
mod config;
mod container;
mod containerd;
mod containerd_dropin;
mod convert;
mod daemon;
mod doctor;
mod exit;
mod image;
mod image_args;
mod interrupt;
mod kubernetes;
mod metrics;
mod mirror;
mod nydus_image;
mod nydusd;
mod path_context;
mod progress;
mod serve_convert;

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
};

use anyhow::{Context, Result};
use clap::Parser;
use config::Config;

/// Starts containers before their images have arrived.
#[derive(Debug, Parser)]
#[command(name = "lazuli", version, propagate_version = true, max_term_width = 100)]
struct Arguments {
    /// State directory: cache, mounts, socket [default: /var/lib/lazuli, or
    /// ~/.local/state/lazuli for other users than root]
    #[arg(long, value_name = "DIR")]
    root: Option<PathBuf>,

    /// Configuration file [default: /etc/lazuli/config.toml if it exists]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// Log level: error, warn, info, debug, trace, or per part as in `info,lazuli_runtime=debug`
    #[arg(long, value_name = "LEVEL")]
    log: Option<String>,

    #[command(subcommand)]
    verb: commands::Verb,
}

/// The context of every command.
#[derive(Clone, Debug)]
pub(crate) struct Session {
    /// State directory, absolute.
    pub(crate) root: PathBuf,
    /// The configuration.
    pub(crate) config: Arc<Config>,
    /// `--config`, absolute, to hand on to a daemon.
    pub(crate) config_path: Option<PathBuf>,
    /// `--log`, to hand on to a daemon.
    pub(crate) log: Option<String>,
}

impl Session {
    /// # Errors
    /// The configuration, which is `config_path` or the machine's own, is wrong, or `root` cannot
    /// be the state directory.
    pub(crate) fn new(
        root: Option<PathBuf>,
        config_path: Option<PathBuf>,
        log: Option<String>,
    ) -> Result<Self> {
        let config = Config::load(config_path.as_deref())?;
        let root = root.or_else(|| config.root.clone()).map_or_else(default_root, Ok)?;
        let root = real_path(&root)?;
        config.check_root(&root)?;
        let config_path = config_path.map(std::path::absolute).transpose()?;
        Ok(Session { root, config: Arc::new(config), config_path, log })
    }
}

fn main() -> ExitCode {
    if nydus_image::is_called() {
        return nydus_image::main();
    }
    if nydusd::is_called() {
        return nydusd::main();
    }
    let arguments = commands::verify_image::translated(std::env::args_os());
    let arguments = Arguments::parse_from(arguments);
    let failed = arguments.verb.failure_code();
    match run(arguments) {
        Ok(code) => code,
        Err(error) => exit::report(&error, failed),
    }
}

fn run(arguments: Arguments) -> Result<ExitCode> {
    let Arguments { root, config, log, verb } = arguments;
    let session = Session::new(root, config, log)?;
    let level = session.log.as_deref().or(session.config.log.as_deref());
    start_logging(level.unwrap_or(verb.default_log_level()))?;
    verb.run(&session)
}

fn start_logging(level: &str) -> Result<()> {
    use tracing_subscriber::{filter::Targets, layer::SubscriberExt, util::SubscriberInitExt};
    let targets: Targets =
        level.parse().with_context(|| format!("`{level}` is not a log level or filter"))?;
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()));
    tracing_subscriber::registry().with(targets).with(lines).init();
    Ok(())
}

/// Resolves symbolic links of a path, as the kernel and runc name it. A path that doesn't exist yet
/// stays unchanged.
fn real_path(path: &Path) -> Result<PathBuf> {
    let path = std::path::absolute(path)?;
    let real = path.ancestors().find_map(|ancestor| {
        let rest = path.strip_prefix(ancestor).ok()?;
        Some(ancestor.canonicalize().ok()?.join(rest))
    });
    // Without a slash at the end.
    Ok(real.unwrap_or(path).components().collect())
}

fn default_root() -> Result<PathBuf> {
    if rustix::process::geteuid().is_root() {
        return Ok("/var/lib/lazuli".into());
    }
    let state = std::env::var_os("XDG_STATE_HOME")
        .map(PathBuf::from)
        .or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".local/state")));
    Ok(state.context("neither XDG_STATE_HOME nor HOME is set: say --root DIR")?.join("lazuli"))
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        super::Arguments::command().debug_assert();
    }
    #[test]
    fn every_verb_is_in_the_documentation() {
        use clap::CommandFactory;
        let document = include_str!("../../../docs/cli.md");
        let command = super::Arguments::command();
        for verb in command.get_subcommands().filter(|verb| !verb.is_hide_set()) {
            let name = format!("`lazuli {}", verb.get_name());
            assert!(document.contains(&name), "docs/cli.md does not list {}", verb.get_name());
        }
    }
}
