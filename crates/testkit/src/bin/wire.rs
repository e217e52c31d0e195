//! A long and narrow way to a server on this machine, for scripts. Prints the address of its near end, and goes on until it is ended.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command-line tool")]

use std::{
    env, error::Error, io, net::ToSocketAddrs as _, process::ExitCode, thread, time::Duration,
};

use lazuli_testkit::wire::Wire;

fn main() -> ExitCode {
    let arguments: Vec<_> = env::args().skip(1).collect();
    match &arguments[..] {
        [server, round_trip, milliseconds, breadth, megabits]
            if round_trip == "--round-trip" && breadth == "--megabits" =>
        {
            match forward(server, milliseconds, megabits) {
                Ok(()) => ExitCode::SUCCESS,
                Err(error) => {
                    eprintln!("wire: {error}");
                    ExitCode::FAILURE
                }
            }
        }
        _ => {
            eprintln!("usage: wire HOST:PORT --round-trip MILLISECONDS --megabits NUMBER");
            ExitCode::from(2)
        }
    }
}

fn forward(server: &str, milliseconds: &str, megabits: &str) -> Result<(), Box<dyn Error>> {
    let address = server.to_socket_addrs()?.next().ok_or_else(|| io::Error::other("no address"))?;
    let round_trip = Duration::from_secs_f64(milliseconds.parse::<f64>()? / 1000.0);
    let bytes_per_second = megabits.parse::<u64>()? * 1_000_000 / 8;
    let wire = Wire::narrow(address, round_trip, bytes_per_second)?;
    println!("{}", wire.host());
    loop {
        thread::park();
    }
}
