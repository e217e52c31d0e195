//! The verbs of the OCI distribution specification.

pub(crate) mod lazy;
pub(crate) mod pull;
pub(crate) mod push;
pub mod range;
pub(crate) mod referrers;
pub(crate) mod small_blob;
pub(crate) mod tags;
