//! A data blob that was made.

use std::path::PathBuf;

use lazuli_image::rafs::BlobRecord;

use crate::scratch::Scratch;

/// One data blob in a temporary file.
#[derive(Debug)]
pub struct BuiltBlob {
    /// The bootstrap's description of the blob.
    pub record: BlobRecord,
    /// The temporary file, removed on drop; `None` if the blob is stored already, see
    /// [`Dictionary`](crate::Dictionary).
    pub file: Option<PathBuf>,
    /// The content of `<blob id>.blob.meta`, which travels beside the bootstrap.
    pub meta_file: Vec<u8>,
    /// Stored bytes at its beginning that a start reads, if that is known.
    pub hot_bytes: Option<u64>,
    pub(crate) scratch: Scratch,
}
