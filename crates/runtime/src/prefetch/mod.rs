//! Bytes that a container will need, fetched before it asks.

#[allow(dead_code, reason = "the prefetcher is what calls it")]
pub(crate) mod guess;
