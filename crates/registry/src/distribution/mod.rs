//! What the OCI distribution specification lets a client do, verb by verb.

pub(crate) mod lazy;
pub(crate) mod pull;
pub(crate) mod push;
pub mod range;
pub(crate) mod referrers;
pub(crate) mod small_blob;
pub(crate) mod tags;
