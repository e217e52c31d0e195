//! The processes that this program runs as.

use std::{process::Command, sync::Arc};

/// The role of a process of this program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Serves readers; its standard input is the connection to its keeper.
    Worker,
    /// Holds descriptors; its standard input is the connection to a worker that has lost its
    /// keeper.
    Keeper,
    /// Checks whether this program could serve here, and ends.
    Check,
    /// Makes system calls for the worker that wait for the worker; its standard input is the source
    /// of its orders.
    Helper,
}

/// How this program is started in another role.
pub type Programs = Arc<dyn Fn(Role) -> Command + Send + Sync>;
