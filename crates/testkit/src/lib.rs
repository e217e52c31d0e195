//! Test support: odd images and tree comparison, a fake registry and a fake Dragonfly that fail on
//! demand, isolated networks, and clients of containerd. No shipped crate depends on it.

pub mod content;
pub mod cri;
pub mod dragonfly;
pub mod ext4;
pub mod freezer;
mod http;
pub mod kernel;
pub mod listing;
pub mod mutation;
pub mod network;
pub mod oci;
pub mod odd;
pub mod packed;
pub mod pause;
pub mod powercut;
pub mod reading;
pub mod registry;
pub mod seekable;
mod serving;
pub mod sigstore;
pub mod tarball;
pub mod tls;
pub mod v5;
pub mod wire;
