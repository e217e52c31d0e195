//! RAFS v5, the format before EROFS, which upstream wrote by default until 2.1.
//!
//! A v5 bootstrap is translated to v6 on arrival; all other code knows only v6. Chunks, digests and
//! stored places stay as they are. Decoded offsets matter only to the node's cache, so chunks get
//! new ones at block borders. The result is for this node only: upstream's v6 readers would look
//! for tables in the blobs that don't exist. `docs/format.md` has the bytes.

pub mod layout;

mod blobs;
mod inode;
mod tables;
mod tree;

pub use layout::is_v5;

use super::{BootstrapOptions, layout::Origin, writer};
use crate::FormatError;

/// Largest v5 bootstrap in bytes; a name takes some 200 of them. The tree that it becomes takes
/// four times as much memory, and up to nine times for a hostile one.
const LIMIT: usize = 128 << 20;

/// Translates a bootstrap to v6, with the same tree made of the same chunks of the same blobs.
/// Blobs that no file uses are left out. Equal input gives equal bytes. Memory use is proportional
/// to `bytes`, even for hostile input.
pub fn translate(bytes: &[u8]) -> Result<Vec<u8>, FormatError> {
    if bytes.len() > LIMIT {
        let problem = format!("{} bytes; the limit for RAFS v5 is {LIMIT}", bytes.len());
        return Err(FormatError::new("bootstrap", 0, problem));
    }
    let tables = tables::parse(bytes)?;
    let (mut tree, blobs) = tree::read(bytes, &tables)?;
    let records = blobs.place(&mut tree)?;
    let options = BootstrapOptions { chunk_size: tables.chunk_size, digest: tables.digest };
    writer::write(&tree, &records, &options, &[], Origin::V5)
}
