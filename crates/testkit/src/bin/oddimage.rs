//! Writes the odd image as an OCI layout, for tools that are not tests of this workspace.
#![allow(clippy::print_stderr, reason = "a command-line tool")]

use std::{path::Path, process::ExitCode};

use lazuli_testkit::{oci::Compression, odd};

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let (dir, image) = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [dir, "mixed"] => (dir, odd::image()),
        [dir, "gzip"] => (dir, odd::image().compressed_with(Compression::Gzip)),
        _ => {
            eprintln!("usage: oddimage DIR mixed|gzip");
            return ExitCode::from(2);
        }
    };
    match image.write_layout(Path::new(dir), "latest") {
        Ok(_) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("oddimage: {dir}: {error}");
            ExitCode::FAILURE
        }
    }
}
