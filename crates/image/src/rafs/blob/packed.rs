//! The order of chunks in blobs that this crate writes.

use crate::{Chunk, FormatError, offset::round_up_to_block};

/// Checks that `chunks` are numbered from 0 and lie back to back in both address spaces. Upstream
/// searches them by either offset and refuses gaps between decoded chunks.
pub(super) fn validate_packed(chunks: &[Chunk]) -> Result<(), FormatError> {
    let (mut stored, mut decoded) = (0, Some(0));
    // Bytes of the last batch, or chunk, that chunks account for.
    let mut filled = 0;
    let error = |problem: String| Err(FormatError::new("blob", 0, problem));
    for (number, chunk) in chunks.iter().enumerate() {
        let before = number.checked_sub(1).map(|before| &chunks[before]);
        let goes_on = before.is_some_and(|before| before.shares_unit(chunk));
        // A new unit begins right behind the previous one, whose last chunk must reach its end.
        let begins =
            chunk.stored.0 == stored && before.is_none_or(|before| before.unit_size() == filled);
        let offset = if goes_on { filled } else { 0 };
        if chunk.number as usize != number
            || !(goes_on || begins)
            || chunk.part.map_or(0, |batch| batch.offset) != offset
            || !chunk.is_within_unit()
            || Some(chunk.decoded.0) != decoded
        {
            return error(format!("expected number {number} at stored byte {stored}: {chunk:?}"));
        }
        filled = offset + chunk.decoded_size;
        stored = chunk.stored_end().0;
        decoded = round_up_to_block(chunk.decoded_end().0);
    }
    match chunks.last() {
        Some(last) if last.unit_size() != filled => error("its last batch is not whole".into()),
        _ => Ok(()),
    }
}
