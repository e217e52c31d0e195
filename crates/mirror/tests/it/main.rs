//! The mirror from outside: a client with its certificate, and a registry that fails on demand.

mod attacks;
mod blobs;
mod bundled;
mod faults;
mod logins;
mod manifests;
mod scene;
