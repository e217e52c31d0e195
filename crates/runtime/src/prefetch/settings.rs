//! The operator's settings.

use serde::Deserialize;

/// What to fetch ahead of readers when an image is mounted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Nothing, and nothing is recorded.
    Nothing,
    /// Nothing, but touched chunks are recorded: for trials, which must see all reads of a start.
    Record,
    /// A guess from the image alone of what a start reads; nothing is recorded.
    Guess,
    /// The reads of earlier starts; without a trace, as [`Mode::Guess`].
    #[default]
    Learn,
}

/// How much is fetched ahead of readers.
#[derive(Clone, Debug)]
pub struct Settings {
    /// What to fetch for a start.
    pub mode: Mode,
    /// Whether to publish traces beside their images for other nodes.
    pub publish: bool,
    /// Maximum rate, in stored bytes per second, at which the rest of images arrives after their
    /// starts: 0 for never, `u64::MAX` for what the link has left.
    pub rest_bytes_per_second: u64,
    /// Stored bytes that the misses of a start without a trace may cause beyond their own chunks.
    pub escalate_bytes: u64,
}

impl Settings {
    /// Returns whether lessons of other images are used.
    pub(super) fn learns_from_others(&self) -> bool {
        self.mode == Mode::Learn && self.escalate_bytes > 0
    }

    /// Limit of the stored bytes to fetch for a trace from the registry, or a guess in a manifest:
    /// a client that may push there has written it.
    pub(super) fn foreign_bytes(&self) -> u64 {
        match self.escalate_bytes {
            0 => Settings::default().escalate_bytes,
            bytes => bytes,
        }
    }
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            mode: Mode::default(),
            publish: false,
            rest_bytes_per_second: u64::MAX,
            escalate_bytes: 256 << 20,
        }
    }
}
