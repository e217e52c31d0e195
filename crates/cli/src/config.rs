//! The configuration file.

use std::{
    io,
    ops::RangeInclusive,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

/// Where the configuration is unless `--config` says otherwise.
pub(crate) const DEFAULT_PATH: &str = "/etc/lazuli/config.toml";

/// The file's content. Every key may be left out; unknown keys are refused, because a misspelt one
/// would silently do nothing.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Config {
    /// State directory, as `--root`.
    pub(crate) root: Option<PathBuf>,
    /// What is logged, as `--log`.
    pub(crate) log: Option<String>,
    /// How data is fetched.
    pub(crate) fetch: Fetch,
}

/// The `[fetch]` table.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Fetch {
    /// Stored bytes fetched around a miss.
    pub(crate) amplify_bytes: Option<u64>,
    /// Seconds after which a blocked reader gets EIO.
    pub(crate) deadline_seconds: Option<u64>,
}

impl Config {
    /// Reads `path`, or the default path if there is a file.
    pub(crate) fn load(path: Option<&Path>) -> Result<Self> {
        let file = path.unwrap_or(Path::new(DEFAULT_PATH));
        match std::fs::read_to_string(file) {
            Ok(text) => {
                let config = toml::from_str::<Self>(&text).map_err(anyhow::Error::from);
                config
                    .and_then(|config| config.fetch.check().map(|()| config))
                    .with_context(|| format!("{} is not valid", file.display()))
            }
            Err(error) if path.is_none() && error.kind() == io::ErrorKind::NotFound => {
                Ok(Self::default())
            }
            Err(error) => Err(error).with_context(|| format!("cannot read {}", file.display())),
        }
    }
}

impl Fetch {
    fn check(&self) -> Result<()> {
        let check = |key: &str, value: Option<u64>, range: RangeInclusive<u64>| match value {
            Some(value) if !range.contains(&value) => {
                bail!("fetch.{key} is {value}, expected {} to {}", range.start(), range.end())
            }
            _ => Ok(()),
        };
        check("deadline_seconds", self.deadline_seconds, 1..=86_400)?;
        check("amplify_bytes", self.amplify_bytes, 0..=64 << 20)
    }

    /// The deadline, if the file sets one.
    pub(crate) fn deadline(&self) -> Option<Duration> {
        self.deadline_seconds.map(Duration::from_secs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_keys_are_refused() {
        let config: Config = toml::from_str("[fetch]\ndeadline_seconds = 5\n").unwrap();
        assert_eq!(config.fetch.deadline(), Some(Duration::from_secs(5)));
        let error = toml::from_str::<Config>("[fetch]\ndeadline = 5\n").unwrap_err();
        assert!(error.to_string().contains("deadline_seconds"), "{error}");
        let config: Config = toml::from_str("[fetch]\ndeadline_seconds = 0\n").unwrap();
        assert!(config.fetch.check().unwrap_err().to_string().contains("1 to 86400"));
    }
}
