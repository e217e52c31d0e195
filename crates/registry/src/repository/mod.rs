//! The interfaces of a place where an image lives.
//!
//! ```text
//! Repository = Pull + Push + Referrers
//!               └ request_policy() ─▶ RequestPolicy: whether, when and how patiently to ask
//! ```
//!
//! - A digest names the same bytes for ever; what a tag names can change between two calls.
//! - Everything that is read is bounded, and checked against the digest that it was asked by,
//!   except by [`Pull::read`]: parts of a blob are checked by the caller, which knows its chunks.
//! - Dropping a future abandons the transfer. An abandoned push leaves nothing visible.
//! - All methods may be called at the same time, from any task.

mod pull;
mod push;
mod referrers;
mod request_policy;

pub use self::{
    pull::{Pull, SmallBlob, TAGS, config},
    push::{BlobContent, Push, PushBy},
    referrers::Referrers,
    request_policy::RequestPolicy,
};

/// One place where one image lives, and the blobs beside it.
pub trait Repository: Pull + Push + Referrers {}

impl<T: Pull + Push + Referrers> Repository for T {}
