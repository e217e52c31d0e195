//! The file of `--output-json`.

use std::{fs, path::Path};

use anyhow::Result;
use lazuli_image::Digest;
use serde::Serialize;

use crate::path_context::PathContext as _;

/// The fields that upstream's tools read.
#[derive(Debug, Serialize)]
pub(super) struct Output {
    version: String,
    bootstrap: String,
    /// Ids, in the order of the blob table.
    blobs: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    fs_version: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    compressor: Option<String>,
}

impl Output {
    /// The result; `bootstrap` is its path, unless it is in its blob.
    pub(super) fn new(bootstrap: Option<&Path>, blobs: impl IntoIterator<Item = Digest>) -> Self {
        let bootstrap = bootstrap.map(|path| path.display().to_string()).unwrap_or_default();
        let blobs = blobs.into_iter().map(|id| id.hex()).collect();
        let version = format!("lazuli-{}", env!("CARGO_PKG_VERSION"));
        Output { version, bootstrap, blobs, fs_version: None, compressor: None }
    }

    /// Logs what was made, and where.
    pub(super) fn made(self) -> Self {
        tracing::info!(bootstrap = self.bootstrap, blobs = ?self.blobs, "made");
        self
    }

    /// Adds the findings of `check`.
    pub(super) fn of(self, fs_version: u8, compressor: Option<String>) -> Self {
        Output { fs_version: Some(fs_version.to_string()), compressor, ..self }
    }

    /// Writes it where it is wanted, if anywhere.
    pub(super) fn write(&self, path: Option<&Path>) -> Result<()> {
        let Some(path) = path else { return Ok(()) };
        fs::write(path, serde_json::to_vec_pretty(self)?).cannot("write", path)
    }
}
