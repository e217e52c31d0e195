//! Making signatures: private keys, and the documents that cosign, podman and nodes verify.
//!
//! ```text
//! .sig tag ─▶ manifest ─▶ simple signing payload    cosign 2, podman, admission controllers
//! referrer ─▶ bundle ─▶ envelope ─▶ statement       cosign 3; what an image was made from
//! ```
//! All but [`attach`] is pure: the caller decides where to store the bytes.

mod attach;
mod bundle;
mod encrypted;
mod key;
mod payload;

pub use attach::{AttachError, attach};
pub use bundle::{BundleReferrer, sign_statement};
pub use key::{SigningError, SigningKey, SigningKeyError};
pub use payload::{SignatureManifest, SignedPayload};

#[cfg(test)]
mod tests;
