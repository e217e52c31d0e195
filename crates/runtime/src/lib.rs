//! Serves images: sources, fetch, cache, kernel drivers, daemon.
#![forbid(unsafe_code)]

pub mod cache;
pub mod daemon;
pub mod error;
mod fetch;
#[cfg(fuzzing)]
pub mod fuzz;
pub mod image;
pub mod keeper;
pub mod kernel;
pub mod metrics;
pub mod prefetch;
mod request_sizes;
mod sharing;
pub mod source;
mod sync;

pub use cache::{BlobStats, Cache, CachedBlob, Settings};
pub use error::ReadError;
pub use sharing::{Account, Owner};
