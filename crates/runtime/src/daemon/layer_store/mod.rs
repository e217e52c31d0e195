//! The layer store: podman finds layers of ordinary images there, and mounts them instead
//! of pulling them. [`crate::kernel::layer_store`] has the file system.
//!
//! A layer is shown, and its DiffID said, under the conditions on which containerd's layers are
//! reported as present (see `ordinary`). In every other case the name does not exist, and the
//! client pulls the layer itself.
//!
//! ```text
//! ROOT/layers/
//!   KEY.json   a layer that was found: its image's manifest, its digests, and how many use it
//!   KEY/diff   the layer, mounted
//! ```
//!
//! A layer is found once, and its image pinned: a container starts from it after its tag was moved,
//! or while its registry is away. It is mounted whenever a client looks at it and it is not.

mod answers;
mod blob;
mod find;
mod held;
mod recent;
pub(super) mod serve;
pub(super) mod state;
mod window;
