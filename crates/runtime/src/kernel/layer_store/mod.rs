//! The file system of the layer store: what containers/storage, which podman is made
//! with, calls an *additional layer store*.
//!
//! ```text
//! DIRECTORY/BASE64(image)/DIGEST/
//!   diff   symbolic link to the mounted layer, a lower directory of overlayfs
//!   info   the layer's record in containers/storage, JSON
//!   blob   the layer as stored
//! ```
//!
//! containers/storage 1.54 and later name a layer by the digest of its table of contents, earlier
//! ones by its digest as stored.
//!
//! Nothing can be listed: a name exists while it is looked up. To count users of a layer, a client
//! creates `use` in its directory, and removes the directory; both are answered with ENOENT. Only
//! root may enter. Readers of a container never come here: overlayfs follows the link when it
//! mounts.

mod filesystem;
mod names;
mod session;

use std::{io, ops::Range, path::PathBuf};

use bytes::Bytes;
pub use names::LayerName;
pub use session::{KIND, Left, Session};

/// Answers the questions of clients. Every method may block.
pub trait Layers: Send + Sync + 'static {
    /// The layers that were found before, also by an earlier worker.
    fn known(&self) -> Vec<LayerName>;

    /// Returns whether the layer can be shown.
    fn exists(&self, layer: &LayerName) -> bool;

    /// Where the layer is mounted, after it has been mounted; `None` if it may not be shown.
    fn diff(&self, layer: &LayerName) -> Option<PathBuf>;

    /// The content of `info`, of a layer that exists.
    fn info(&self, layer: &LayerName) -> Option<Vec<u8>>;

    /// Bytes of the layer as stored.
    fn stored_size(&self, layer: &LayerName) -> Option<u64>;

    /// A part of the layer as stored, not checked.
    fn read(&self, layer: &LayerName, range: Range<u64>) -> io::Result<Bytes>;

    /// Counts one more user of a layer.
    fn acquire(&self, layer: &LayerName);

    /// Counts one user less.
    fn release(&self, layer: &LayerName);
}
