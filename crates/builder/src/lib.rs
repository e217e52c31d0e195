//! Converts images to lazy ones.
//!
//! [`build`] converts the layers of an image, lowest first, to data blobs and a bootstrap.
//! [`merge`] stops at the tree and the digests of its chunks, to compare an image with its source.
//! [`build_with`] stores only chunks that no blob of a [`Dictionary`] has, skips layers that have
//! [`LayerContents`], and adds layers to a stored image with a [`Base`]. [`bake`] reorders the
//! chunks of a finished image so that those of a start come first. [`index`] makes parts of an
//! unmodified image readable. [`combine`] overlays finished images, including those of single
//! layers from [`build_layer`]. [`unpack`] converts a lazy image back to a tar, a directory or an
//! ordinary image.
//!
//! ```text
//! layer ─ stream ─ tar ─┐                  ┌─ overlay ─ tree ─────────────────┐
//!                       ├─ entries, chunks ┤                                  ├─ bootstrap
//! directory ────────────┘                  └─ dedup ─ compress ─ layer file ─ pack ─ blobs
//! ```
//!
//! The same layers, options and dictionary give the same bytes, on any machine and with any number
//! of threads.
#![forbid(unsafe_code)]

pub mod bake;
mod base;
mod bootstrap_layer;
mod build;
mod built_blob;
mod chunk;
mod combine;
mod dedup;
mod dictionary;
mod embedded;
mod entry;
mod error;
#[cfg(fuzzing)]
pub mod fuzz;
pub mod index;
mod layer_contents;
mod layer_file;
mod options;
mod overlay;
mod pack;
mod pipeline;
mod read_layer;
mod report;
mod scratch;
pub mod source;
mod unit;
pub mod unpack;
mod whiteout;

pub use base::Base;
pub use bootstrap_layer::{BootstrapLayer, bootstrap_layer, pack_bootstrap};
pub use build::{Built, Merged, build, build_with, merge};
pub use built_blob::BuiltBlob;
pub use combine::{Combined, SourceImage, combine};
pub use dictionary::{Dictionary, KnownBlob};
pub use embedded::{LayerBlob, Whiteouts, build_layer};
pub use entry::{Entry, EntryKind, EntryPath, InvalidPath};
pub use error::{BuildError, OverlayProblem, SourceError};
pub use layer_contents::LayerContents;
pub use options::Options;
pub use read_layer::ReadLayer;
pub use report::{Progress, Report};
pub use source::{Layer, LayerSource, image::TreeOf};
