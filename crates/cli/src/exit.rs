//! Errors for people, and exit codes.
//!
//! 0: done. 1: not done. 2: the command line is wrong (clap). 3: `lazuli daemon` found another
//! daemon at work. `lazuli diff` exits as diff(1) does: 1 for images that differ, 2 for failures.
//! `lazuli run` passes on the exit code of its command and, as `docker run` does, uses 125 for
//! failures of its own, 126 for a command that cannot be executed, and 127 for one that is not
//! there.

use std::process::ExitCode;

use lazuli_runtime::keeper::KeeperError;

/// `lazuli daemon`: another one serves the state directory.
pub(crate) const LOCKED: u8 = 3;

/// Prints `error` with its causes and returns `code`.
pub(crate) fn report(error: &anyhow::Error, code: u8) -> ExitCode {
    let mut message = String::new();
    for cause in error.chain() {
        let text = cause.to_string();
        // Many errors repeat their source; print each text once.
        if !message.contains(&text) {
            if !message.is_empty() {
                message.push_str(": ");
            }
            message.push_str(&text);
        }
    }
    eprintln!("lazuli: {message}");
    let locked = matches!(error.downcast_ref(), Some(KeeperError::Locked { .. }));
    ExitCode::from(if locked { LOCKED } else { code })
}
