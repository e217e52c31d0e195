//! The command under the name `nydus-image`, which upstream's tools (nydus-snapshotter's converter,
//! and so nydusify, nerdctl, BuildKit and acceld) call to make images. It has exactly the verbs and
//! options that they pass, and `-D`, which people type; the command line refuses all others.
//!
//! ```text
//! create  one layer ─▶ a blob that holds its own bootstrap, or a blob and a bootstrap
//! merge   the bootstraps of layers, or of images ─▶ the bootstrap of an image
//! check, inspect, unpack   a bootstrap, as a file
//! ```

mod bootstrap;
mod check;
mod create;
mod directory;
mod inspect;
mod merge;
mod output;
mod prefetch;
mod unpack;

use std::{ffi::OsStr, path::Path, process::ExitCode};

use anyhow::Result;
use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::{exit, start_logging};

/// Returns whether the command was called by upstream's name.
pub(crate) fn is_called() -> bool {
    let name = std::env::args_os().next();
    name.as_deref().and_then(|name| Path::new(name).file_name()) == Some(OsStr::new("nydus-image"))
}

/// Make and look at RAFS v6 images as upstream's builder does
#[derive(Debug, Parser)]
#[command(name = "nydus-image", version = VERSION, max_term_width = 100)]
struct Arguments {
    #[command(subcommand)]
    verb: Verb,
}

/// In upstream's format, for programs that parse it: acceld notes what begins with `v`.
const VERSION: &str = concat!("\nVersion: \tv", env!("CARGO_PKG_VERSION"), " (Lazuli)");

#[derive(Debug, Subcommand)]
enum Verb {
    Create(create::Arguments),
    Merge(merge::Arguments),
    Check(check::Arguments),
    Inspect(inspect::Arguments),
    Unpack(unpack::Arguments),
}

/// Options of every verb.
#[derive(Debug, Args)]
struct Common {
    /// What is logged
    #[arg(
        short,
        long,
        value_name = "log-level",
        value_parser = ["trace", "debug", "info", "warn", "error"],
        default_value = "info"
    )]
    log_level: String,
}

/// Whether upstream's readers get a prefetch table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum PrefetchPolicy {
    /// The files and directories that standard input names, one in each line
    Fs,
    None,
}

pub(crate) fn main() -> ExitCode {
    match run(Arguments::parse().verb) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => exit::report(&error, 1),
    }
}

fn run(verb: Verb) -> Result<()> {
    let (Verb::Create(create::Arguments { common, .. })
    | Verb::Merge(merge::Arguments { common, .. })
    | Verb::Check(check::Arguments { common, .. })
    | Verb::Inspect(inspect::Arguments { common, .. })
    | Verb::Unpack(unpack::Arguments { common, .. })) = &verb;
    start_logging(&common.log_level)?;
    match verb {
        Verb::Create(arguments) => create::run(&arguments),
        Verb::Merge(arguments) => merge::run(&arguments),
        Verb::Check(arguments) => check::run(&arguments),
        Verb::Inspect(arguments) => inspect::run(&arguments),
        Verb::Unpack(arguments) => unpack::run(&arguments),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        super::Arguments::command().debug_assert();
    }
}
