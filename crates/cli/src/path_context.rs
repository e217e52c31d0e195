//! Contexts of errors that name the failed action and its path.

use std::path::Path;

use anyhow::{Context as _, Result};

/// Adds the failed action and its path to errors: `cannot write /run/x`.
pub(crate) trait PathContext<T> {
    /// The same, with errors that say that this process cannot do `action` to `path`.
    fn cannot(self, action: &str, path: impl AsRef<Path>) -> Result<T>;
}

impl<T, E> PathContext<T> for Result<T, E>
where
    Result<T, E>: anyhow::Context<T, E>,
{
    fn cannot(self, action: &str, path: impl AsRef<Path>) -> Result<T> {
        self.with_context(|| format!("cannot {action} {}", path.as_ref().display()))
    }
}
