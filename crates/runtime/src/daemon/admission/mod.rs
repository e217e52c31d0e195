//! From the name in a request to an image that may run: resolve, fetch its metadata once, ask the
//! policy.

pub(super) mod expected;
pub(super) mod fetch_locks;
pub(super) mod logins;
pub(super) mod pins;
pub(super) mod policy;
pub(super) mod recent;
pub(super) mod resolve;
