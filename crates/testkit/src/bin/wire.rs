//! A slow, narrow connection to a server on this machine, for scripts. Prints its local address,
//! and runs until it is killed.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command-line tool")]

use std::{
    env,
    error::Error,
    io,
    net::{Ipv4Addr, SocketAddr, ToSocketAddrs as _},
    process::ExitCode,
    thread,
    time::Duration,
};

use lazuli_testkit::wire::{Distance, Wire};

const USAGE: &str = "usage: wire HOST:PORT --round-trip MILLISECONDS --megabits NUMBER [--no-slow-start] [--at HOST:PORT]";

fn main() -> ExitCode {
    let arguments: Vec<_> = env::args().skip(1).collect();
    let [server, round_trip, milliseconds, bandwidth, megabits, rest @ ..] = &arguments[..] else {
        return usage();
    };
    let (slow_start, rest) = match rest {
        [no, rest @ ..] if no == "--no-slow-start" => (false, rest),
        rest => (true, rest),
    };
    let near = match rest {
        [] => Ok(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))),
        [at, near] if at == "--at" => address(near),
        _ => return usage(),
    };
    if round_trip != "--round-trip" || bandwidth != "--megabits" {
        return usage();
    }
    match near.and_then(|near| forward(near, server, milliseconds, megabits, slow_start)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("wire: {error}");
            ExitCode::FAILURE
        }
    }
}

fn usage() -> ExitCode {
    eprintln!("{USAGE}");
    ExitCode::from(2)
}

fn address(text: &str) -> Result<SocketAddr, Box<dyn Error>> {
    Ok(text.to_socket_addrs()?.next().ok_or_else(|| io::Error::other("no address"))?)
}

fn forward(
    near: SocketAddr,
    server: &str,
    milliseconds: &str,
    megabits: &str,
    slow_start: bool,
) -> Result<(), Box<dyn Error>> {
    let round_trip = Duration::from_secs_f64(milliseconds.parse::<f64>()? / 1000.0);
    let bytes_per_second = Some(megabits.parse::<u64>()? * 1_000_000 / 8);
    let distance = Distance { round_trip, bytes_per_second, slow_start };
    let wire = Wire::between(near, address(server)?, distance)?;
    println!("{}", wire.host());
    loop {
        thread::park();
    }
}
