//! The processes of a daemon, and their end.

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// The processes of a daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pids {
    pub(crate) keeper: u32,
    pub(crate) worker: u32,
}

/// The process ids in `status --json`.
pub(crate) fn pids(status: &Value) -> Pids {
    let pid = |key: &str| status["daemon"][key].as_u64().unwrap_or(0) as u32;
    Pids { keeper: pid("keeper_pid"), worker: pid("worker_pid") }
}

/// As system calls take it.
pub(crate) fn pid(pid: u32) -> Pid {
    i32::try_from(pid).ok().and_then(Pid::from_raw).expect("a process")
}

/// `kill -9`.
pub(crate) fn kill(pid: u32) {
    let pid = self::pid(pid);
    kill_process(pid, Signal::KILL).unwrap();
}
