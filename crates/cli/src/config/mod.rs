//! The configuration file.

mod convert;
mod data;
mod index;
mod registries;
mod services;

use std::{
    io,
    ops::RangeInclusive,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, bail};
use serde::Deserialize;

use convert::Convert;
use data::{Cache, Fetch, Prefetch};
use registries::{Images, PeerToPeer, Registry};

use crate::{metrics::Metrics, path_context::PathContext as _};

pub(crate) use index::{FirstPull, Index};
pub(crate) use services::{Layers, Mirror, Snapshotter};

/// Path of the configuration without `--config`.
pub(crate) const DEFAULT_PATH: &str = "/etc/lazuli/config.toml";

/// The file's content. Every key may be left out; unknown keys are refused, because a misspelt one
/// would silently do nothing.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Config {
    /// State directory, as `--root`.
    pub(crate) root: Option<PathBuf>,
    /// Log level, as in `--log`.
    pub(crate) log: Option<String>,
    /// How data is fetched.
    pub(crate) fetch: Fetch,
    /// The cache.
    pub(crate) cache: Cache,
    /// Mirrors of registries.
    pub(crate) registry: Vec<Registry>,
    /// Fetching ahead of readers.
    pub(crate) prefetch: Prefetch,
    /// Lazy images that replace ordinary ones.
    images: Images,
    /// The rules for indexes of ordinary images.
    pub(crate) index: Index,
    /// The engine that shares blobs between nodes.
    p2p: Option<PeerToPeer>,
    /// containerd's directories of `hosts.toml` files, separated by colons.
    pub(crate) hosts_dir: Option<String>,
    /// The policy file, see `docs/policy.md`; it has to exist if it is named.
    pub(crate) policy: Option<PathBuf>,
    /// The snapshotter for containerd, if enabled.
    pub(crate) snapshotter: Option<Snapshotter>,
    /// The layer store for podman, if enabled.
    pub(crate) layers: Option<Layers>,
    /// The mirror for pulls, if enabled.
    pub(crate) mirror: Option<Mirror>,
    /// The metrics server, if enabled.
    pub(crate) metrics: Option<Metrics>,
    /// What `serve-convert` does, if it is set up.
    pub(crate) convert: Option<Convert>,
}

impl Config {
    /// Relative ones would mean something else to the daemon.
    fn check_hosts_dir(&self) -> Result<()> {
        for directory in self.hosts_dir.iter().flat_map(|all| all.split(':')) {
            if !directory.is_empty() && !Path::new(directory).is_absolute() {
                bail!("hosts_dir has {directory}, expected absolute paths, separated by colons");
            }
        }
        Ok(())
    }

    /// Checks the policy in the same way.
    fn check_policy(&self) -> Result<()> {
        match &self.policy {
            Some(policy) if !policy.is_absolute() => {
                bail!("policy is {}, expected an absolute path", policy.display())
            }
            _ => Ok(()),
        }
    }

    /// Checks what depends on the state directory.
    pub(crate) fn check_root(&self, root: &Path) -> Result<()> {
        self.layers.as_ref().map_or(Ok(()), |layers| layers.settings(root).map(drop))
    }

    /// Reads `path`, or the default path if there is a file.
    pub(crate) fn load(path: Option<&Path>) -> Result<Self> {
        let file = path.unwrap_or(Path::new(DEFAULT_PATH));
        match std::fs::read_to_string(file) {
            Ok(text) => {
                let config = toml::from_str::<Self>(&text).map_err(anyhow::Error::from);
                config
                    .and_then(|config| config.fetch.check().map(|()| config))
                    .and_then(|config| config.cache.check().map(|()| config))
                    .and_then(|config| config.prefetch.check().map(|()| config))
                    .and_then(|config| config.index.check().map(|()| config))
                    .and_then(|config| config.node_registries().map(|_| config))
                    .and_then(|config| config.check_hosts_dir().map(|()| config))
                    .and_then(|config| config.check_policy().map(|()| config))
                    .and_then(|config| {
                        config.snapshotter.as_ref().map_or(Ok(()), Snapshotter::check)?;
                        config.layers.as_ref().map_or(Ok(()), Layers::check)?;
                        config.mirror.as_ref().map_or(Ok(()), Mirror::check)?;
                        config.metrics.as_ref().map(Metrics::address).transpose()?;
                        config.convert.as_ref().map_or(Ok(()), Convert::check)?;
                        Ok(config)
                    })
                    .with_context(|| format!("{} is not valid", file.display()))
            }
            Err(error) if path.is_none() && error.kind() == io::ErrorKind::NotFound => {
                Ok(Self::default())
            }
            Err(error) => Err(error).cannot("read", file),
        }
    }
}

fn check(key: &str, value: Option<u64>, range: RangeInclusive<u64>) -> Result<()> {
    match value {
        Some(value) if !range.contains(&value) => {
            bail!("{key} is {value}, expected {} to {}", range.start(), range.end())
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_of_hosts_are_absolute() {
        for (text, right) in [("/a", true), ("/a:/b", true), ("", true), ("/a:b", false)] {
            let config: Config = toml::from_str(&format!("hosts_dir = '{text}'\n")).unwrap();
            assert_eq!(config.check_hosts_dir().is_ok(), right, "{text}");
        }
    }

    #[test]
    fn metrics_are_off_unless_an_address_is_given() {
        assert!(toml::from_str::<Config>("").unwrap().metrics.is_none());
        assert!(toml::from_str::<Config>("[metrics]\n").is_err());
        let metrics = |listen: &str| {
            let config: Config =
                toml::from_str(&format!("[metrics]\nlisten = '{listen}'\n")).unwrap();
            config.metrics.unwrap().address()
        };
        metrics("0.0.0.0:9445").unwrap();
        let error = format!("{:#}", metrics("localhost:9445").unwrap_err());
        assert!(error.contains("metrics.listen"), "{error}");
    }
}
