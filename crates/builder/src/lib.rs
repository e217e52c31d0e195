//! Converts images to lazy ones.
//!
//! [`build`] takes the layers of an image, lowest first, and makes data blobs and a bootstrap;
//! [`merge`] takes the same way only as far as the tree and the digests of its chunks, to compare
//! an image with what it was made from. [`build_with`] stores only what a [`Dictionary`] of stored
//! blobs does not have, and takes layers that were read before from their [`LayerRecord`]; with a
//! [`Base`], layers on top of a stored image. [`bake`] moves the chunks of a finished image to
//! where a start finds them soon; [`index`] makes an image that stays as it is readable in places;
//! [`combine`] lays finished images over each other, also those of single layers that
//! [`build_layer`] makes; [`unpack`] makes something plain of an image.
//!
//! ```text
//! layer ─ stream ─ tar ─┐                     ┌─ overlay ─ tree ──────────────┐
//!                       ├─ entries, chunks ───┤                               ├─ bootstrap
//! directory ────────────┘                     └─ dedup ─ compress ─ spool ─ pack ─ blobs
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
pub mod index;
mod options;
mod overlay;
mod pack;
mod pipeline;
mod read_layer;
mod record;
mod report;
mod scratch;
pub mod source;
mod spool;
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
pub use options::Options;
pub use read_layer::ReadLayer;
pub use record::LayerRecord;
pub use report::{Progress, Report};
pub use source::{Layer, LayerSource, image::TreeOf};
