use std::{fs, path::PathBuf};

use anyhow::Result;
use clap::{Args, CommandFactory as _};
use clap_complete::Shell;

use crate::path_context::PathContext as _;

/// Write the man pages and shell completions that a package installs
///
/// They are made from the very definitions that the command line is read with.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Where to; it is made. Man pages: lazuli.1 and one per verb. Completions: as each shell names
    /// them
    #[arg(value_name = "DIR")]
    directory: PathBuf,
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let directory = &arguments.directory;
    write(directory).cannot("write to", directory)
}

fn write(directory: &PathBuf) -> std::io::Result<()> {
    fs::create_dir_all(directory)?;
    // The pager wraps lines.
    let mut command =
        crate::Arguments::command().term_width(usize::MAX).disable_help_subcommand(true);
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        clap_complete::generate_to(shell, &mut command, "lazuli", directory)?;
    }
    clap_mangen::generate_to(command, directory)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_verb_has_a_page_and_a_completion() {
        let scratch = tempfile::tempdir().unwrap();
        let directory = scratch.path().join("new");
        run(&Arguments { directory: directory.clone() }).unwrap();
        let completions = fs::read_to_string(directory.join("lazuli.bash")).unwrap();
        for verb in crate::Arguments::command().get_subcommands().filter(|verb| !verb.is_hide_set())
        {
            let name = verb.get_name();
            let page = fs::read_to_string(directory.join(format!("lazuli-{name}.1"))).unwrap();
            assert!(page.contains(".SH SYNOPSIS"), "{name}: {page}");
            assert!(completions.contains(&format!("lazuli,{name})")), "{name}");
        }
        assert!(!directory.join("lazuli-manual.1").exists(), "a page of a hidden verb");
    }
}
