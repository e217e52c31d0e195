//! Parsers of bytes from outside, as the fuzz targets call them.
#![allow(missing_docs)]

pub use crate::{
    daemon::container_groups,
    image::fuzz::bootstrap_layer,
    keeper::fuzz::message,
    prefetch::fuzz::{constants, elf, imports, settings},
};
