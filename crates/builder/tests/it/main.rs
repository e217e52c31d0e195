//! Tests of the build crate through its public API.

mod archives;
mod bake;
mod batches;
mod directories;
mod images;
mod index;
mod malformed;
mod reuse;
mod seekable;
mod tarball;
mod whiteouts;
mod writers;
