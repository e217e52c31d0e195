//! Ordinary images that containerd does not unpack: their layers are shown by indexes.
//!
//! containerd names a layer by the digests of tars that the image's configuration claims, trusts a
//! snapshotter that claims to have a layer, and gives it to every image that claims the same. So a
//! layer counts only if this node has hashed all of it, its stored bytes and its tar, or if a key
//! that the policy trusts for the image has stated both with the layer's index.
//!
//! The tree of any number of lower layers is made here, of the layers' skeletons.
//!
//! ```text
//! layers ─┬─ claimed_layer   what an image says of its layers
//!         ├─ known_parts     configuration, statements and indexes of an image
//!         ├─ store           records of layers and images
//!         ├─ access          which clients may read a layer
//!         ├─ begin ─ pull    layers without an index
//!         ├─ whole_image ─ pull_progress   the same for commands
//!         ├─ index_unpacked  layers that containerd has pulled
//!         ├─ bundle          layers that a node is delivered with
//!         ├─ publish         for other nodes
//!         │  └─ layer_content
//!         └─ lower_layers    mounts for containerd
//!            └─ make_image   one image of several layers
//!               └─ made_images
//! toc_layer                  layers by their tables of contents
//! restore_layer              layers that have become complete
//! whole_file                 files of artifacts that have become complete
//! ```

mod access;
mod background;
mod begin;
pub(super) mod bundle;
mod checks;
mod claimed_layer;
mod content_store;
pub(super) mod index_unpacked;
mod known_parts;
mod layer_content;
pub(super) mod layers;
mod lower_layers;
mod made_images;
mod make_image;
mod publish;
mod pull;
pub(super) mod pull_progress;
mod pulls;
pub(super) mod restore_layer;
mod spool;
pub(super) mod state;
mod store;
pub(super) mod toc_layer;
mod vouched;
pub(super) mod whole_file;
pub(super) mod whole_image;
mod whole_layer;
