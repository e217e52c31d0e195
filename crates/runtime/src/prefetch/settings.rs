//! What the operator may set.

use serde::Deserialize;

/// What is fetched when an image is mounted, ahead of its readers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Ahead {
    /// Nothing, and nothing is recorded.
    Nothing,
    /// Nothing, but what is touched is recorded: for trials, which are to see all that a start
    /// reads.
    Record,
    /// What a start most likely reads, from the image alone; nothing is recorded.
    Guess,
    /// What earlier starts read; without a trace of one, as [`Ahead::Guess`].
    #[default]
    Learn,
}

/// How much is fetched ahead of readers.
#[derive(Clone, Debug)]
pub struct Settings {
    /// What is fetched for a start.
    pub ahead: Ahead,
    /// Whether traces are put beside their images for other nodes.
    pub publish: bool,
    /// Stored bytes per second at which the rest of an image arrives after its start; 0 for never.
    pub rest_bytes_per_second: u64,
    /// Stored bytes that the misses of one start without a trace may bring beside what they ask
    /// for.
    pub escalate_bytes: u64,
}

impl Settings {
    /// Whether starts of other images say what to fetch for this one.
    pub(super) fn learns_from_others(&self) -> bool {
        self.ahead == Ahead::Learn && self.escalate_bytes > 0
    }

    /// Stored bytes that a trace may bring that came from the registry: a client that may push
    /// there has written it.
    pub(super) fn foreign_bytes(&self) -> u64 {
        match self.escalate_bytes {
            0 => Settings::default().escalate_bytes,
            bytes => bytes,
        }
    }
}

impl Default for Settings {
    fn default() -> Self {
        // An eighth of 1 Gbit/s.
        Settings {
            ahead: Ahead::default(),
            publish: false,
            rest_bytes_per_second: 16 << 20,
            escalate_bytes: 256 << 20,
        }
    }
}
