//! Parsers of bytes from outside, as the fuzz targets call them.
#![allow(missing_docs)]

/// The request of a client, and the address to listen on.
pub fn request(bytes: &[u8]) {
    // The server stops reading after one request, and a write beyond a pipe's capacity would block.
    crate::server::request(&bytes[..bytes.len().min(1 << 16)]);
    if let Ok(text) = std::str::from_utf8(bytes)
        && let Ok(address) = text.parse::<crate::Address>()
    {
        assert_eq!(address.to_string().parse(), Ok(address));
    }
}
