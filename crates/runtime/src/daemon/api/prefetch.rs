//! A request to fetch a whole image, and how far that is.

use serde::{Deserialize, Serialize};

/// A request to fetch a whole image.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PrefetchRequest {
    /// A registry reference or `oci:DIR[:TAG]` with an absolute directory.
    pub image: String,
    /// `os/arch[/variant]`; this machine's when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub platform: Option<String>,
    /// Talk HTTP to the registry.
    #[serde(default)]
    pub plain_http: bool,
}

/// The progress of a prefetch.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct PrefetchStatus {
    /// Bytes of the chunks present, as stored.
    pub bytes_here: u64,
    /// Bytes of all chunks, as stored; 0 until the image's metadata is present.
    pub bytes_total: u64,
    /// Whether everything is present and on the disk.
    pub done: bool,
}
