//! Prints every entry of a directory tree, one line each, so that scripts can compare trees.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command-line tool")]

use std::{io::Write as _, path::Path, process::ExitCode};

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    let (Some(root), None) = (arguments.next(), arguments.next()) else {
        eprintln!("usage: treelist DIR");
        return ExitCode::from(2);
    };
    let listed = lazuli_testkit::listing::list(Path::new(&root));
    match listed.and_then(|listing| write!(std::io::stdout().lock(), "{listing}")) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("treelist: {error}");
            ExitCode::FAILURE
        }
    }
}
