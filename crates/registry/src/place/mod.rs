//! The places where images live, each a [`Repository`](crate::Repository).

pub(crate) mod bundled;
pub(crate) mod layout;
pub(crate) mod mirrored;
pub(crate) mod remote;
