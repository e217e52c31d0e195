//! RAFS v5, the format before EROFS, which upstream wrote by default until 2.1.
//!
//! A v5 bootstrap becomes one of v6 where it arrives, and everything else knows v6 only. Chunks,
//! digests and stored places stay as they are; where decoded chunks lie is no business of the image
//! but of the node's cache, so they get places on block borders. The result is for this node:
//! upstream's readers of v6 would look for tables in the blobs that are not there. `docs/format.md`
//! has the bytes.

pub mod layout;

mod blobs;
mod inode;
mod tables;
mod tree;

pub use layout::is_v5;

use super::{BootstrapOptions, layout::V5_LABEL, writer};
use crate::FormatError;

/// Largest v5 bootstrap in bytes; a name takes some 200 of them. The tree that it becomes takes
/// four times as much memory, and up to nine times if somebody means it to.
const LIMIT: usize = 128 << 20;

/// The v6 bootstrap that shows the same tree, made of the same chunks of the same blobs. Blobs that
/// no file uses are left out. Equal input gives equal bytes. Takes memory in the size of `bytes`,
/// also of hostile ones.
pub fn translate(bytes: &[u8]) -> Result<Vec<u8>, FormatError> {
    if bytes.len() > LIMIT {
        let problem = format!("{} bytes; the limit for RAFS v5 is {LIMIT}", bytes.len());
        return Err(FormatError::new("bootstrap", 0, problem));
    }
    let tables = tables::parse(bytes)?;
    let (mut tree, blobs) = tree::read(bytes, &tables)?;
    let records = blobs.place(&mut tree)?;
    let options = BootstrapOptions { chunk_size: tables.chunk_size, digest: tables.digest };
    writer::write(&tree, &records, &options, &[], V5_LABEL)
}
