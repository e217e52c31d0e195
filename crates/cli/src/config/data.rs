//! The tables of how data is fetched and kept.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use lazuli_registry::ImageName;
use lazuli_runtime::{cache::KeepFree, prefetch};
use serde::Deserialize;

use super::check;

/// The `[fetch]` table.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Fetch {
    /// Stored bytes fetched around a miss.
    pub(crate) amplify_bytes: Option<u64>,
    /// Seconds after which a blocked reader gets EIO.
    pub(crate) deadline_seconds: Option<u64>,
}

/// The `[cache]` table.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Cache {
    /// Bytes on the disk that decoded data may take.
    pub(crate) max_bytes: Option<u64>,
    /// Whether the kernel may read decoded data with direct I/O, whatever its release.
    pub(crate) direct_io: Option<bool>,
    /// Space that unused blobs leave free on the disk: bytes, or a percentage as in `20%`.
    keep_free: Option<Amount>,
}

/// A number of bytes, or a percentage as text.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Amount {
    Bytes(u64),
    Part(String),
}

/// More than the 15 % at which a kubelet evicts pods.
const KEEP_FREE: KeepFree = KeepFree::Percent(20);

/// The `[prefetch]` table.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Prefetch {
    /// What to fetch for a start.
    ahead: prefetch::Mode,
    /// Whether to publish traces beside their images.
    publish: bool,
    /// Maximum of stored bytes per second at which the rest of images arrives; 0 for never.
    rest_bytes_per_second: Option<u64>,
    /// Stored bytes that the misses of one start may cause beyond their own chunks.
    escalate_bytes: Option<u64>,
    /// Images that are fetched whole when the daemon starts.
    pub(crate) images: Vec<String>,
}

impl Prefetch {
    pub(super) fn check(&self) -> Result<()> {
        for (number, image) in self.images.iter().enumerate() {
            image
                .parse::<ImageName>()
                .map_err(anyhow::Error::from)
                .with_context(|| format!("prefetch.images[{number}]"))?;
        }
        // A chunk has up to 16 MiB: with less it could take hours.
        let least = 64 << 10;
        match self.rest_bytes_per_second {
            Some(rate @ 1..) if rate < least => {
                bail!("prefetch.rest_bytes_per_second is {rate}, expected 0 or at least {least}")
            }
            _ => Ok(()),
        }
    }

    /// The settings of the runtime.
    pub(crate) fn settings(&self) -> prefetch::Settings {
        let defaults = prefetch::Settings::default();
        let rest_bytes_per_second =
            self.rest_bytes_per_second.unwrap_or(defaults.rest_bytes_per_second);
        // Where the rest of an image is not wanted, a guess at it is not.
        let escalate = if rest_bytes_per_second == 0 { 0 } else { defaults.escalate_bytes };
        prefetch::Settings {
            mode: self.ahead,
            publish: self.publish,
            rest_bytes_per_second,
            escalate_bytes: self.escalate_bytes.unwrap_or(escalate),
        }
    }
}

impl Cache {
    pub(super) fn check(&self) -> Result<()> {
        // Less than a few of the largest chunks (16 MiB) would be evicted as fast as it arrives.
        check("cache.max_bytes", self.max_bytes, 64 << 20..=1 << 50)?;
        self.keep_free().map(drop)
    }

    /// Space to keep free, as far as evicting unused blobs achieves it.
    pub(crate) fn keep_free(&self) -> Result<KeepFree> {
        match &self.keep_free {
            None => Ok(KEEP_FREE),
            Some(Amount::Bytes(bytes)) => Ok(KeepFree::Bytes(*bytes)),
            Some(Amount::Part(text)) => {
                let percent = text.strip_suffix('%').and_then(|number| number.parse().ok());
                let percent = percent.filter(|percent| *percent <= 90);
                percent.map(KeepFree::Percent).with_context(|| {
                    format!("cache.keep_free is `{text}`, expected a number of bytes, or \"0%\" to \"90%\"")
                })
            }
        }
    }
}

impl Fetch {
    pub(super) fn check(&self) -> Result<()> {
        check("fetch.deadline_seconds", self.deadline_seconds, 1..=86_400)?;
        check("fetch.amplify_bytes", self.amplify_bytes, 0..=64 << 20)
    }

    /// The deadline, if the file sets one.
    pub(crate) fn deadline(&self) -> Option<Duration> {
        self.deadline_seconds.map(Duration::from_secs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    #[test]
    fn unknown_keys_are_refused() {
        let config: Config = toml::from_str("[fetch]\ndeadline_seconds = 5\n").unwrap();
        assert_eq!(config.fetch.deadline(), Some(Duration::from_secs(5)));
        let error = toml::from_str::<Config>("[fetch]\ndeadline = 5\n").unwrap_err();
        assert!(error.to_string().contains("deadline_seconds"), "{error}");
        let config: Config = toml::from_str("[fetch]\ndeadline_seconds = 0\n").unwrap();
        assert!(config.fetch.check().unwrap_err().to_string().contains("1 to 86400"));
        let config: Config = toml::from_str("[prefetch]\nahead = 'guess'\n").unwrap();
        assert_eq!(config.prefetch.settings().mode, prefetch::Mode::Guess);
        for (text, expected) in [
            ("images = ['a.example/b:1', 'A/B/']", "images[1]"),
            ("rest_bytes_per_second = 1000", "at least 65536"),
        ] {
            let config: Config = toml::from_str(&format!("[prefetch]\n{text}\n")).unwrap();
            let error = format!("{:#}", config.prefetch.check().unwrap_err());
            assert!(error.contains(expected), "{error}");
        }
        let config: Config = toml::from_str("[cache]\nmax_bytes = 1000\n").unwrap();
        assert!(config.cache.check().unwrap_err().to_string().contains("cache.max_bytes"));
    }

    #[test]
    fn keep_free_is_a_percentage_or_bytes() {
        let keep_free = |value: &str| {
            toml::from_str::<Config>(&format!("[cache]\n{value}\n")).unwrap().cache.keep_free()
        };
        for (text, expected) in [
            ("", KeepFree::Percent(20)),
            ("keep_free = 0", KeepFree::Bytes(0)),
            ("keep_free = 1073741824", KeepFree::Bytes(1 << 30)),
            ("keep_free = '5%'", KeepFree::Percent(5)),
        ] {
            assert_eq!(keep_free(text).unwrap(), expected);
        }
        for text in ["keep_free = '91%'", "keep_free = '20'", "keep_free = '1 GiB'"] {
            let error = keep_free(text).unwrap_err().to_string();
            assert!(error.contains("cache.keep_free is") && error.contains("90%"), "{error}");
        }
    }
}
