//! A worker, seen from its keeper.

use std::{
    io,
    os::{fd::OwnedFd, unix::process::ExitStatusExt as _},
    process::{Child, ExitStatus},
    time::Instant,
};

use rustix::{
    event::{PollFd, PollFlags, poll},
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};

use super::wire::{Channel, Kind};

/// A worker that runs.
pub(super) struct Worker {
    pub(super) channel: Channel,
    /// `None` when another keeper started it.
    child: Option<Child>,
    pub(super) pid: u32,
    handle: OwnedFd,
    pub(super) started: Instant,
    pub(super) settled: bool,
    pub(super) stopped: bool,
    /// When to kill the worker unless it has exited.
    pub(super) leave_before: Option<Instant>,
}

impl Worker {
    pub(super) fn new(channel: Channel, child: Child) -> io::Result<Self> {
        let pid = child.id();
        let mut worker = Self::adopt(channel, process(pid)?)?;
        worker.child = Some(child);
        Ok(worker)
    }

    pub(super) fn adopt(channel: Channel, pid: Pid) -> io::Result<Self> {
        Ok(Worker {
            channel,
            child: None,
            pid: pid.as_raw_nonzero().get().cast_unsigned(),
            handle: pidfd_open(pid, PidfdFlags::empty())?,
            started: Instant::now(),
            settled: false,
            stopped: false,
            leave_before: None,
        })
    }

    pub(super) fn tell(&self, kind: Kind) {
        if let Err(error) = self.channel.send(kind, "", None) {
            tracing::debug!(%error, ?kind, "the worker is gone");
        }
    }

    pub(super) fn kill(&self) {
        // Fails when it is gone already.
        let _ = pidfd_send_signal(&self.handle, Signal::KILL);
    }

    /// Waits for the end of a worker whose connection is closed. Returns a description of its exit.
    pub(super) fn reap(&mut self) -> String {
        let status = match &mut self.child {
            Some(child) => child.wait().ok(),
            // Not our child: only its parent gets its status.
            None => {
                let mut fds = [PollFd::new(&self.handle, PollFlags::IN)];
                let _ = rustix::io::retry_on_intr(|| poll(&mut fds, None));
                None
            }
        };
        status.map_or_else(|| "it ended".to_owned(), describe)
    }
}

fn describe(status: ExitStatus) -> String {
    match status.signal() {
        Some(signal) => format!("killed by signal {signal}"),
        None => format!("it ended with code {}", status.code().unwrap_or(-1)),
    }
}

fn process(pid: u32) -> io::Result<Pid> {
    i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or_else(|| io::Error::other("no such pid"))
}
