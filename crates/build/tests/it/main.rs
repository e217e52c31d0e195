//! Tests of the build crate through its public API.

mod archives;
mod bake;
mod directories;
mod images;
mod malformed;
mod tarball;
mod writers;
