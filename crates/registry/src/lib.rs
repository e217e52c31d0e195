//! Moves images: names, credentials, registries and OCI layout directories.
//!
//! A [`Repository`] is one place where one image lives, opened by its [name](name::ImageName):
//!
//! ```text
//!                       open(name)
//!                           │
//!          ┌────────────────┴───────────┐
//!   remote::Registry               layout::Layout
//!   HTTP, tokens, redirects        a directory
//!          │
//!   mirrored::Mirrored: several of them, when the registry has mirrors, or nodes share blobs
//!          │
//!   bundled::Bundled: beside a layout of images that the node was delivered with
//! ```
//!
//! Only expired access tokens and interrupted uploads are retried here: the caller knows how long a
//! read may take, see [`RegistryError::is_transient`].
#![forbid(unsafe_code)]

pub mod blob;
pub mod copy;
mod distribution;
pub mod docker_archive;
pub mod error;
mod file_version;
#[cfg(fuzzing)]
pub mod fuzz;
pub mod hedge;
pub mod manifest;
pub mod name;
mod open;
mod place;
mod repository;
mod route;
mod transport;

pub use blob::{BlobReader, Growing, Growth, Progress, Pushed, Urgency, into_blocking};
pub use copy::{Copied, Copy};
pub use distribution::{
    lazy::{Found, fetch_index, lazy_form, lazy_manifest, listed_indexes},
    range,
    referrers::is_beside_image,
};
pub use docker_archive::DockerArchive;
pub use error::{HostsError, RegistryError, from_reader};
pub use lazuli_image::oci::Platform;
pub use manifest::{Document, Manifest, Parsed};
pub use name::{ImageName, InvalidName, LayoutName, Reference, Selector, Source};
pub use open::{Route, open, open_shared};
pub use place::{layout::Layout, mirrored::Mirrored, remote::Registry};
pub use repository::{
    BlobContent, Pull, Push, PushBy, Referrers, Repository, RequestPolicy, SmallBlob, TAGS, config,
};
pub use route::{
    bundle::Bundle,
    dragonfly::{Dragonfly, PeerCredentials},
    hosts::{self, Hosts},
    mirror::{self, Mirror, Mirrors},
    options::Options,
    trusted::{IndexTrust, Replacement, SeekableLayers, TrustedReferrers},
};
pub use transport::{
    CONNECTIONS,
    client_pool::ClientPool,
    credentials::{self, Login},
    health::{self, Health},
    keyring::Keyring,
    preconnect::Preconnect,
    protocol::Timeouts,
    traffic::{Failure, ServerKind, ServerTraffic, Traffic, TrafficCounts},
};
