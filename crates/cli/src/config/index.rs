//! The `[index]` table.

use std::path::PathBuf;

use anyhow::{Result, bail};
use lazuli_registry::{ImageName, IndexTrust, TrustedReferrers};
use lazuli_runtime::daemon::IndexSettings;
use serde::{Deserialize, Deserializer, de::Error as _};

/// The `[index]` table.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Index {
    /// The indexes that are used.
    pub(super) trust: Trust,
    /// How to pull layers without an index.
    pub(crate) first: FirstPull,
    /// Whether to publish the node's indexes beside their images.
    publish: bool,
    /// The private key that signs statements about them.
    key: Option<PathBuf>,
    /// containerd's content store.
    content_store: Option<PathBuf>,
    /// Has indexes by the digests of their layers.
    #[serde(deserialize_with = "repository")]
    repository: Option<ImageName>,
}

/// A repository, without tag and digest.
fn repository<'de, D: Deserializer<'de>>(from: D) -> Result<Option<ImageName>, D::Error> {
    let text = String::deserialize(from)?;
    let is_one = TrustedReferrers::parse(std::slice::from_ref(&text));
    is_one.map_err(|(_, error)| D::Error::custom(error))?;
    text.parse().map(Some).map_err(D::Error::custom)
}

/// containerd's default content store.
const CONTENT_STORE: &str = "/var/lib/containerd/io.containerd.content.v1.content";

impl Index {
    pub(super) fn check(&self) -> Result<()> {
        match &self.key {
            Some(key) if !key.is_absolute() => {
                bail!("index.key is {}, expected an absolute path", key.display())
            }
            Some(_) if !self.publish => bail!("index.key is for index.publish = true"),
            _ => self.check_content_store(),
        }
    }

    fn check_content_store(&self) -> Result<()> {
        match &self.content_store {
            Some(path) if !path.is_absolute() => {
                bail!("index.content_store is {}, expected an absolute path", path.display())
            }
            Some(_) if !self.first.indexes_afterwards() => {
                bail!("index.content_store is for index.first = \"leave\"")
            }
            _ => Ok(()),
        }
    }

    /// The settings of the runtime.
    pub(crate) fn settings(&self) -> IndexSettings {
        let content = || self.content_store.clone().unwrap_or_else(|| CONTENT_STORE.into());
        let content = self.first.indexes_afterwards().then(content);
        let (key, repository) = (self.key.clone(), self.repository.clone());
        IndexSettings { publish: self.publish, key, content, repository }
    }
}

/// The program that pulls an ordinary image whose layers have no index.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum FirstPull {
    /// This node, in containerd's namespace for Kubernetes; elsewhere containerd: `export`, `push`
    /// and builds need the layers.
    #[default]
    #[serde(skip)]
    Kubernetes,
    /// This node.
    Pull,
    /// containerd; this node indexes them afterwards.
    Leave,
}

impl FirstPull {
    /// Returns whether this node indexes images after containerd has pulled them. Not by default:
    /// where images are built and pushed, it would make each of them lazy at its second pull.
    fn indexes_afterwards(self) -> bool {
        matches!(self, FirstPull::Leave)
    }

    /// Returns whether this node pulls for a namespace of containerd.
    pub(crate) fn pulls_in(self, namespace: &str) -> bool {
        match self {
            FirstPull::Kubernetes => namespace == "k8s.io",
            FirstPull::Pull => true,
            FirstPull::Leave => false,
        }
    }
}

/// The indexes that are trusted.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Trust {
    /// No indexes.
    Nothing,
    /// Indexes of layers that this node has hashed whole.
    Proven,
    /// These, and indexes that a key states which the policy trusts for the image.
    #[default]
    Signed,
    /// Any that the image's repository has. For `run` and `mount` alone.
    Repository,
}

impl From<Trust> for IndexTrust {
    fn from(trust: Trust) -> Self {
        match trust {
            Trust::Nothing => IndexTrust::Nothing,
            Trust::Proven => IndexTrust::Proven,
            Trust::Signed => IndexTrust::Signed,
            Trust::Repository => IndexTrust::Repository,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    #[test]
    fn the_default_trusts_stated_indexes_and_pulls_for_kubernetes() {
        let index = |text: &str| toml::from_str::<Config>(&format!("[index]\n{text}\n"));
        let usual = index("").unwrap().index;
        assert_eq!(IndexTrust::from(usual.trust), IndexTrust::Signed);
        for (text, kubernetes, others) in
            [("", true, false), ("first = 'pull'", true, true), ("first = 'leave'", false, false)]
        {
            let first = index(text).unwrap().index.first;
            assert_eq!(first.pulls_in("k8s.io"), kubernetes, "{text}");
            assert_eq!(first.pulls_in("default"), others, "{text}");
        }
        for text in [
            "first = 'kubernetes'",
            "trust = 'everybody'",
            "more = 1",
            "repository = 'r.example/indexes:1'",
            "repository = 'oci:/srv'",
        ] {
            assert!(index(text).is_err(), "{text}");
        }
        index("publish = true\nkey = '/k'").unwrap().index.check().unwrap();
        for (text, problem) in [
            ("publish = true\nkey = 'k'", "absolute path"),
            ("key = '/k'", "index.publish"),
            ("first = 'leave'\ncontent_store = 'c'", "absolute path"),
            ("content_store = '/c'", "index.first"),
        ] {
            let error = index(text).unwrap().index.check().unwrap_err().to_string();
            assert!(error.contains(problem), "{error}");
        }
    }
}
