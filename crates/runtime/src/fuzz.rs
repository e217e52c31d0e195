//! Parsers of bytes from outside, as the fuzz targets call them.
#![allow(missing_docs)]

pub use crate::{
    image::fuzz::bootstrap_layer,
    keeper::fuzz::message,
    prefetch::fuzz::{elf, imports},
};
