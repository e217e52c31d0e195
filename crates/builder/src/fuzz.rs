//! Parsers of bytes from outside, as the fuzz targets call them.
#![allow(missing_docs)]

use lazuli_image::points::NewPoint;

/// Decodes deflate, and compares the result with another decoder's.
pub fn inflate(stored: &[u8], taken: usize, given: usize) {
    crate::index::assert_like_zlib(stored, taken, given);
}

/// The bytes of the point's window that `size` bytes decoded from `stored` refer to.
pub fn thin_window(point: &NewPoint, stored: &[u8], size: usize) -> Option<Vec<u8>> {
    crate::index::Thinner::default().used(point, stored, size).ok()
}
