//! The `.blob.meta` files of a bootstrap layer.
//!
//! They repeat the places of chunks for readers that don't use the chunk table: the decoded CI
//! table, zeros up to a block border, the CI header. Lazuli goes by the chunk table alone, which
//! has the digests. But upstream's reader goes by these files. If one contradicts the bootstrap,
//! the two would read different images: the image was made to deceive one of them.

use std::io::{self, Read};

use lazuli_image::{
    BLOCK_SIZE, BlobIndex, FormatError,
    rafs::{Bootstrap, check_ci_entries, check_ci_header, check_ci_units, layout},
};

use super::error::UnpackError;

/// Bytes of the CI table that are processed together: a whole number of entries.
const STEP: u64 = 64 << 10;

/// The blob that the file `name` belongs to, if it is a `.blob.meta` file.
pub(super) fn blob_of(name: &[u8]) -> Option<&str> {
    let name = name.strip_prefix(b"image/").unwrap_or(name);
    std::str::from_utf8(name.strip_suffix(b".blob.meta")?).ok()
}

/// Compares `file`, the `.blob.meta` of the blob `id`, with the bootstrap. Blobs that the bootstrap
/// does not use may have one, too. No reader of RAFS v5 looks at one. A CI table of version 2,
/// which may be needed to place chunks, is returned, and is not compared.
pub(super) fn check<B: AsRef<[u8]>>(
    file: impl Read,
    id: &str,
    bootstrap: &Bootstrap<B>,
) -> Result<Option<(BlobIndex, Vec<u8>)>, UnpackError> {
    let index = bootstrap.blobs().iter().position(|blob| *blob.id.hex() == *id);
    let Some(index) = index.filter(|_| bootstrap.version() == 6) else { return Ok(None) };
    let (blob, tail) = (&bootstrap.blobs()[index], &bootstrap.tails()[index]);
    let is_v2 = tail.features & layout::features::CHUNK_INFO_V2 != 0;
    let mut rest = Rest { file, id, at: 0 };
    // Only as much as was read: all of an image's tables of version 2 have at most `MAX_CI_V2`
    // bytes.
    let mut table = Vec::new();
    while rest.at < tail.ci_size {
        let first = (rest.at / layout::CI_ENTRY_SIZE) as u32;
        let entries = rest.take(STEP.min(tail.ci_size - rest.at))?;
        if is_v2 {
            table.extend_from_slice(&entries);
        } else {
            check_ci_entries(blob, first, &entries).map_err(|error| rest.contradicts(error))?;
        }
    }
    rest.take(rest.at.next_multiple_of(BLOCK_SIZE) - rest.at)?;
    let header = rest.take(layout::CI_HEADER_SIZE)?;
    check_ci_header(tail, &header).map_err(|error| rest.contradicts(error))?;
    if is_v2 {
        check_ci_units(tail, &table, &header).map_err(|error| rest.contradicts(error))?;
    }
    if io::copy(&mut rest.file, &mut io::sink())? > 0 {
        return Err(rest.contradicts(FormatError::new("CI header", rest.at, "it is not the end")));
    }
    // There are fewer blobs than 256.
    Ok(is_v2.then_some((BlobIndex(index as u8), table)))
}

/// The rest of a file.
struct Rest<'a, R> {
    file: R,
    id: &'a str,
    at: u64,
}

impl<R: Read> Rest<'_, R> {
    /// The next `len` bytes, at most [`STEP`].
    fn take(&mut self, len: u64) -> Result<Vec<u8>, UnpackError> {
        let mut bytes = vec![0; len as usize];
        match self.file.read_exact(&mut bytes) {
            Ok(()) => {
                self.at += len;
                Ok(bytes)
            }
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                Err(self.contradicts(FormatError::new("CI table", self.at, "the file ends early")))
            }
            Err(error) => Err(error.into()),
        }
    }

    fn contradicts(&self, source: FormatError) -> UnpackError {
        UnpackError::Meta { blob: self.id.to_owned(), source }
    }
}
