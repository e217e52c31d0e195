//! Parsers of bytes from outside, as the fuzz targets call them.
#![allow(missing_docs)]

use crate::{
    authorization::{Shown, TokenRequest},
    range::Wanted,
    request_path::Target,
    seal::{SECRET, Seal},
};

/// Parses a client's input: path and query, Range and Authorization headers, and a form.
pub fn request(text: &str) {
    let (path, query) = text.split_once('?').map_or((text, None), |(p, q)| (p, Some(q)));
    let _ = Target::parse(path, query);
    for size in [0, 20, u64::MAX] {
        if let Wanted::Part(range) = Wanted::parse(Some(text), size) {
            assert!(range.start < range.end && range.end <= size);
        }
    }
    if let Some(seal) = Seal::new(&[1; SECRET]) {
        let _ = Shown::read(Some(text), "registry.example", &seal);
    }
    let _ = TokenRequest::parse(text.as_bytes(), Some(text));
}
