//! Decides which images a node may run: signatures, statements, and the policy that requires them.
//!
//! ```text
//! policy.toml ─▶ rules ─┐
//!                       ├─▶ verify ─▶ Verified ─▶ served
//! registry ─▶ evidence ─┘      ▲
//!              search          └── verdicts: verified before
//! ```
//!
//! A digest proves which bytes arrived, not who made them. Evidence comes from registries, so from
//! any client that may push: sizes are bounded, and only what a key of the operator's policy has
//! signed counts.
#![forbid(unsafe_code)]

pub mod bundle;
pub mod dsse;
mod error;
mod evidence;
mod external_verifier;
#[cfg(fuzzing)]
pub mod fuzz;
mod gate;
mod indexing;
pub mod key;
mod keyless;
mod layer_indexing;
pub mod media_type;
mod name;
pub mod payload;
mod question;
mod rules;
mod search;
pub mod sign;
pub mod statement;
mod verdicts;
mod verify;

pub use bundle::Bundle;
pub use dsse::Envelope;
pub use error::DocumentError;
pub use evidence::{Evidence, SimpleSignature};
pub use external_verifier::DESCRIPTOR;
pub use gate::{DEFAULT_PATH, Gate, GateError};
pub use indexing::{INDEXED, Indexing, SignedIndex, StatedLayer};
pub use key::{KeyError, PublicKey};
pub use layer_indexing::{LAYER_INDEXED, LayerDigests, LayerIndexing, SignedLayer};
pub use payload::Payload;
pub use question::{Question, manifest_descriptor};
pub use rules::{Policy, PolicyError, ReadFile};
pub use statement::{Conversion, Converter, Source, Statement, Subject};
pub use verify::{Claim, Refused, Verified, verify};
