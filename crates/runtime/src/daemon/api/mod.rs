//! The protocol of the control socket.
//!
//! One JSON object per line in each direction over the Unix socket `daemon.sock` in the root
//! directory. `lazuli status --json` prints [`Status`]: fields are added over time, never renamed
//! or removed.

mod driver;
mod prefetch;
mod scrub;
mod status;

use std::path::PathBuf;

use lazuli_image::Digest;
use lazuli_registry::Login;
use serde::{Deserialize, Serialize};

pub use self::{
    driver::DriverChoice,
    prefetch::{PrefetchRequest, PrefetchStatus},
    scrub::{ScrubBlob, ScrubPlan, ScrubStep, ScrubbedChunk, UnusedBlob},
    status::{
        CacheStatus, DaemonStatus, FailedReadStatus, MirrorStatus, MountStatus, ServerStatus,
        SnapshotStatus, SnapshotsStatus, Status,
    },
};

/// A request, one per line.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "lowercase")]
pub enum Request {
    /// Answer [`Response::Done`]: a liveness check.
    Ping,
    /// Mount an image.
    Mount(MountRequest),
    /// Mount an image whose bootstrap the client has in a file, and answer [`Response::Done`], also
    /// if it is mounted there already.
    MountBootstrap {
        /// The request, with a [`MountRequest::bootstrap`].
        request: MountRequest,
        /// What the registry wants to see; kept until the image is unmounted.
        #[serde(default)]
        login: Option<Login>,
    },
    /// Take a mount away.
    Umount {
        /// An absolute path.
        mountpoint: PathBuf,
        /// Also if it is in use, when open files are served until they are closed, and if there is
        /// none.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        lazy: bool,
    },
    /// Report the mounts and the daemon's state.
    Status,
    /// Fetch everything that an image has, and report how far that is. The same request again
    /// reports again. The layers of an image without an index are pulled and indexed.
    Prefetch(PrefetchRequest),
    /// List the blobs in the cache, for [`Request::Scrub`].
    ScrubPlan,
    /// Read some chunks of a blob back and check them.
    Scrub {
        /// The manifest of an image that has the blob.
        image: Digest,
        /// The blob's position in the image's blob table.
        position: usize,
        /// Position: 0, or the one that the previous step returned.
        from: usize,
    },
    /// End the daemon.
    Stop {
        /// Also while images are mounted: their mounts are detached first.
        force: bool,
    },
}

/// An image to mount, and its mountpoint.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MountRequest {
    /// A registry reference or `oci:DIR[:TAG]` with an absolute directory.
    pub image: String,
    /// The client's name for the image, if `image` is resolved already: the policy covers this
    /// name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asked: Option<String>,
    /// An absolute path to an existing directory.
    pub mountpoint: PathBuf,
    /// The driver.
    #[serde(default)]
    pub driver: DriverChoice,
    /// `os/arch[/variant]`; this machine's when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub platform: Option<String>,
    /// Talk HTTP to the registry.
    #[serde(default)]
    pub plain_http: bool,
    /// Ordinary layers on top of the lazy ones are the client's matter.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub base: bool,
    /// The number of layers of an ordinary image, from the lowest on, that are shown unconverted,
    /// for containerd.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layers: Option<u32>,
    /// The layer of an ordinary image that is shown alone, for overlayfs: by its digest as stored,
    /// or by that of its table of contents.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layer: Option<Digest>,
    /// The image's bootstrap, an absolute path: `image` has no manifest to ask for, only blobs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bootstrap: Option<PathBuf>,
    /// Set-user-id programs and file capabilities of the image have no effect.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub nosuid: bool,
}

impl MountRequest {
    /// A request about `image` that names no mount point.
    pub fn of(image: String) -> Self {
        MountRequest {
            image,
            asked: None,
            mountpoint: PathBuf::new(),
            driver: DriverChoice::Auto,
            platform: None,
            plain_http: false,
            base: false,
            layers: None,
            layer: None,
            bootstrap: None,
            nosuid: true,
        }
    }

    /// The client's name for the image.
    pub fn name(&self) -> &str {
        self.asked.as_deref().unwrap_or(&self.image)
    }
}

/// An answer, one per line.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "result", rename_all = "lowercase")]
pub enum Response {
    /// The image is mounted.
    Mounted(Mounted),
    /// Done, without a result.
    Done,
    /// The daemon's state.
    Status(Status),
    /// The progress of a prefetch.
    Prefetch(PrefetchStatus),
    /// The blobs in the cache.
    ScrubPlan(ScrubPlan),
    /// The result of a scrub step.
    Scrubbed(ScrubStep),
    /// Nothing was done, because another worker is taking over: ask again.
    Again,
    /// It was not done.
    Error {
        /// Why, for people.
        message: String,
        /// Whether the image has no index, which [`Request::Prefetch`] makes if it can.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        no_index: bool,
    },
}

/// Answer to [`Request::Mount`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Mounted {
    /// The mount as `status` shows it, right after mounting.
    pub mount: MountStatus,
    /// The image's config, as the registry holds it.
    pub config: serde_json::Value,
}
