//! The cost of a fetch.

/// The cost of a fetch.
#[derive(Clone, Copy, Debug, Default)]
pub struct Fetched {
    /// Bytes.
    pub bytes: u64,
    /// Requests.
    pub requests: u64,
}
