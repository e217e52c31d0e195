//! A long and narrow way to a server on this machine, for scripts. Prints the address of its near end, and goes on until it is ended.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command-line tool")]

use std::{
    env, error::Error, io, net::ToSocketAddrs as _, process::ExitCode, thread, time::Duration,
};

use lazuli_testkit::wire::{Distance, Wire};

fn main() -> ExitCode {
    let arguments: Vec<_> = env::args().skip(1).collect();
    match &arguments[..] {
        [server, round_trip, milliseconds, breadth, megabits, rest @ ..]
            if round_trip == "--round-trip"
                && breadth == "--megabits"
                && (rest.is_empty() || rest == ["--no-slow-start"]) =>
        {
            match forward(server, milliseconds, megabits, rest.is_empty()) {
                Ok(()) => ExitCode::SUCCESS,
                Err(error) => {
                    eprintln!("wire: {error}");
                    ExitCode::FAILURE
                }
            }
        }
        _ => {
            eprintln!(
                "usage: wire HOST:PORT --round-trip MILLISECONDS --megabits NUMBER [--no-slow-start]"
            );
            ExitCode::from(2)
        }
    }
}

fn forward(
    server: &str,
    milliseconds: &str,
    megabits: &str,
    slow_start: bool,
) -> Result<(), Box<dyn Error>> {
    let address = server.to_socket_addrs()?.next().ok_or_else(|| io::Error::other("no address"))?;
    let round_trip = Duration::from_secs_f64(milliseconds.parse::<f64>()? / 1000.0);
    let bytes_per_second = megabits.parse::<u64>()? * 1_000_000 / 8;
    let bytes_per_second = Some(bytes_per_second);
    let wire = Wire::through(address, Distance { round_trip, bytes_per_second, slow_start })?;
    println!("{}", wire.host());
    loop {
        thread::park();
    }
}
