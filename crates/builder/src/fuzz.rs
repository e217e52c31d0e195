//! Parsers of bytes from outside, as the fuzz targets call them.
#![allow(missing_docs)]

/// Decodes deflate, and compares the result with another decoder's.
pub fn inflate(stored: &[u8], taken: usize, given: usize) {
    crate::index::assert_like_zlib(stored, taken, given);
}
