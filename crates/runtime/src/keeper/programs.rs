//! The processes that this program runs as.

use std::{process::Command, sync::Arc};

/// What a program is started as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Serves readers; its standard input is the connection to its keeper.
    Worker,
    /// Holds descriptors; its standard input is the connection to a worker that has lost its
    /// keeper.
    Keeper,
    /// Finds out whether this program could serve here, and ends.
    Check,
    /// Makes system calls for the worker that wait for the worker; its standard input is where it
    /// is told.
    Helper,
}

/// How this program is started in another role.
pub type Programs = Arc<dyn Fn(Role) -> Command + Send + Sync>;
