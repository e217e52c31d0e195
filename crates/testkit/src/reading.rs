//! Input and output of the program `reader`: files with known [content](crate::content), and one
//! JSON object per line about the reads of them.

use std::{
    path::PathBuf,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use serde::{Deserialize, Serialize};

use crate::content::Wrong;

/// A read that took longer is reported on its own: no read of a healthy daemon with a registry
/// nearby does.
pub const LONG: Duration = Duration::from_millis(20);

/// Bytes of the program `selfcheck` that are replaced by content of a seed of their own.
pub const PAYLOAD: usize = 1 << 20;

/// The initial value of these bytes.
pub const PLACEHOLDER: u8 = 0x5a;

/// How a reader accesses the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// pread(2).
    Read,
    /// Page faults in a mapping.
    Mmap,
    /// Programs that are started and check themselves.
    Execve,
}

/// A file to read.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Readable {
    /// Its path.
    pub path: PathBuf,
    /// The seed of its content; for a program, of its payload.
    pub seed: u64,
    /// Its size.
    pub size: u64,
}

/// Instructions for a reader: one line of JSON on its standard input. It ends with the input.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Task {
    /// How it reads.
    pub mode: Mode,
    /// The files to read, at random.
    pub files: Vec<Readable>,
    /// The seed of its choices.
    pub seed: u64,
    /// The number of threads that read at the same time.
    pub threads: u64,
    /// For programs: digest of their machine code.
    pub code: String,
    /// Whether to stop after every file was read once from end to end, in order.
    pub once: bool,
}

/// Reports of a reader, one per line.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "lowercase")]
pub enum Report {
    /// One access took longer than [`LONG`].
    Wait(Access),
    /// It got other bytes than the file has.
    Wrong {
        /// The access.
        access: Access,
        /// The wrong bytes.
        wrong: Wrong,
    },
    /// It got an error.
    Failed {
        /// The access.
        access: Access,
        /// The system's error.
        error: String,
    },
    /// The totals of all threads so far.
    Total {
        /// Bytes that were compared.
        bytes: u64,
        /// Accesses.
        accesses: u64,
    },
}

/// One access: a read, a walk over some mapped pages, or a run of a program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Access {
    /// The file.
    pub path: PathBuf,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// When it began, see [`now`].
    pub began: u64,
    /// When it ended.
    pub ended: u64,
}

impl Access {
    /// The time that it took.
    pub fn took(&self) -> Duration {
        Duration::from_micros(self.ended.saturating_sub(self.began))
    }
}

/// Microseconds since 1970, the same in all processes.
pub fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}
