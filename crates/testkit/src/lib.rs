//! Odd trees, tree comparison, a faulty registry and Dragonfly, private networks and daemons and a
//! client of containerd for tests. Never shipped.

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
