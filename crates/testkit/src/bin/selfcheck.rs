//! A program that checks its own bytes: the megabyte of content inside it and its machine code, as
//! mapped. It reports wrong pages in a running program that would otherwise only crash it.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command-line tool")]

use std::{fs, hint::black_box, io, os::unix::fs::FileExt as _, process::ExitCode};

use lazuli_image::Algorithm;
use lazuli_testkit::{
    content,
    reading::{PAYLOAD, PLACEHOLDER},
};

/// Replaced in the file by content made from the program's seed argument.
static CONTENT: [u8; PAYLOAD] = [PLACEHOLDER; PAYLOAD];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let result = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["code"] => code().map(|digest| println!("{digest}")).map_err(|error| error.to_string()),
        [seed, digest] => check(seed, digest),
        _ => Err("usage: selfcheck code | SEED DIGEST".to_owned()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            eprintln!("{problem}");
            ExitCode::FAILURE
        }
    }
}

fn check(seed: &str, digest: &str) -> Result<(), String> {
    let seed = seed.parse().map_err(|_| format!("{seed} is no seed"))?;
    let wrong = content::check(seed, 0, black_box(&CONTENT));
    if wrong.bytes > 0 {
        return Err(format!("wrong content: {} bytes, {} of them 0", wrong.bytes, wrong.zeros));
    }
    match code() {
        Ok(found) if found == digest => Ok(()),
        Ok(found) => Err(format!("wrong code: {found} instead of {digest}")),
        Err(error) => Err(format!("unreadable code: {error}")),
    }
}

/// Digest of the pages with machine code of this program.
fn code() -> io::Result<String> {
    let own = fs::read_link("/proc/self/exe")?;
    let memory = fs::File::open("/proc/self/mem")?;
    let mut hasher = Algorithm::Blake3.hasher();
    for line in fs::read_to_string("/proc/self/maps")?.lines() {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [range, "r-xp", _, _, _, path] = fields[..] else { continue };
        if own.to_str() != Some(path) {
            continue;
        }
        let address = |text: &str| u64::from_str_radix(text, 16).map_err(io::Error::other);
        let (start, end) = range.split_once('-').unwrap_or_default();
        let start = address(start)?;
        let mut bytes = vec![0; (address(end)? - start) as usize];
        memory.read_exact_at(&mut bytes, start)?;
        hasher.update(&bytes);
    }
    Ok(hasher.finish().to_string())
}
