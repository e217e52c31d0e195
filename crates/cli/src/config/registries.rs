//! How registries are reached: mirrors, peers, and trusted repositories.

use std::path::PathBuf;

use anyhow::{Context as _, Result, anyhow, bail};
use lazuli_registry::{
    Dragonfly, Hosts, Mirrors, Options, PeerCredentials, TrustedReferrers,
    hosts::DEFAULT_DIRECTORIES,
};
use serde::Deserialize;

use super::Config;

/// The `[images]` table.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Images {
    /// Repositories in which a lazy image replaces the ordinary one that it refers to.
    referrers: Vec<String>,
}

impl Images {
    fn trusted(&self) -> Result<TrustedReferrers> {
        let trusted = TrustedReferrers::parse(&self.referrers);
        trusted.map_err(|(number, error)| anyhow!("images.referrers[{number}]: {error}"))
    }
}

/// One `[[registry]]` table.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Registry {
    /// The registry as images name it.
    host: String,
    /// Servers that are asked before it, in this order.
    mirrors: Vec<String>,
}

/// The peer-to-peer engine between nodes.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Engine {
    Dragonfly,
}

/// The `[p2p]` table.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PeerToPeer {
    engine: Engine,
    /// The proxy of this node's daemon.
    #[serde(default = "PeerToPeer::usual_proxy")]
    proxy: String,
    /// URL of its health probe.
    health: Option<String>,
    /// Its Unix socket, and a directory on the file system of its storage, in which links to its
    /// files can be made.
    socket: Option<PathBuf>,
    links: Option<PathBuf>,
    /// Whether it may see the node's registry credentials.
    #[serde(default)]
    credentials: bool,
}

impl PeerToPeer {
    /// dfdaemon's usual address.
    fn usual_proxy() -> String {
        "http://127.0.0.1:4001".to_owned()
    }

    fn open(&self) -> Result<Dragonfly> {
        let PeerToPeer { engine: Engine::Dragonfly, proxy, health, socket, links, credentials } =
            self;
        let credentials = match credentials {
            true => PeerCredentials::Shown,
            false => PeerCredentials::Withheld,
        };
        let daemon = Dragonfly::new(proxy, health.as_deref(), credentials);
        let daemon = daemon.context("p2p.proxy or p2p.health")?;
        Ok(match (socket, links) {
            (None, None) => daemon,
            (Some(socket), Some(links)) if socket.is_absolute() && links.is_absolute() => {
                daemon.with_socket(socket, links)
            }
            _ => bail!("p2p.socket and p2p.links: expected absolute paths, both or none"),
        })
    }
}

impl Config {
    /// How the node's daemon reaches registries: as other commands, and with peers for blobs.
    pub(crate) fn node_registries(&self) -> Result<Options> {
        let dragonfly = self.p2p.as_ref().map(PeerToPeer::open).transpose()?;
        Ok(Options { dragonfly, ..self.registries()? })
    }

    /// How registries are reached.
    pub(crate) fn registries(&self) -> Result<Options> {
        let hosts = Hosts::new(self.hosts_directories());
        let (mirrors, referrers) = (self.mirrors()?, self.images.trusted()?);
        let own_mirror = self.mirror.as_ref().map(|mirror| mirror.listen);
        let indexes = self.index.trust.into();
        Ok(Options { mirrors, hosts, referrers, indexes, own_mirror, ..Options::default() })
    }

    /// The proxy of the node's Dragonfly daemon, if it is used.
    pub(crate) fn dragonfly_proxy(&self) -> Option<&str> {
        self.p2p.as_ref().map(|p2p| &*p2p.proxy)
    }

    /// The mirrors of all registries.
    fn mirrors(&self) -> Result<Mirrors> {
        let mut all = Mirrors::default();
        for (table, registry) in self.registry.iter().enumerate() {
            let key = |key: &str| format!("registry[{table}].{key}");
            let parse = |(number, text): (usize, &String)| {
                text.parse().with_context(|| key(&format!("mirrors[{number}]")))
            };
            let mirrors = registry.mirrors.iter().enumerate().map(parse).collect::<Result<_>>()?;
            all.set(&registry.host, mirrors).with_context(|| key("host"))?;
        }
        Ok(all)
    }

    /// containerd's directories of `hosts.toml` files, separated by colons.
    pub(crate) fn hosts_directories(&self) -> &str {
        self.hosts_dir.as_deref().unwrap_or(DEFAULT_DIRECTORIES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registries_are_not_asked_through_the_nodes_own_mirror() {
        let config: Config = toml::from_str("[mirror]\nlisten = '127.0.0.1:5000'\n").unwrap();
        let own = config.registries().unwrap().own_mirror;
        assert_eq!(own, Some("127.0.0.1:5000".parse().unwrap()));
    }

    #[test]
    fn the_engine_of_nodes_that_share_is_named() {
        let config = |text: &str| toml::from_str::<Config>(&format!("[p2p]\n{text}\n"));
        let usual = config("engine = 'dragonfly'").unwrap().node_registries().unwrap();
        let usual = usual.dragonfly.unwrap().to_string();
        assert_eq!(usual, "dragonfly at http://127.0.0.1:4001");
        assert!(config("engine = 'dragonfly'").unwrap().registries().unwrap().dragonfly.is_none());
        for (text, expected) in [
            ("proxy = 'http://a.example:1'", "engine"),
            ("engine = 'bittorrent'", "`dragonfly`"),
            ("engine = 'dragonfly'\nproxy = '/run/dfdaemon.sock'", "p2p.proxy"),
            ("engine = 'dragonfly'\nsocket = '/run/dfdaemon.sock'", "p2p.links"),
        ] {
            let config = config(text).map_err(anyhow::Error::from);
            let error = format!("{:#}", config.and_then(|c| c.node_registries()).unwrap_err());
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn referrers_are_trusted_by_repository() {
        let config =
            |text: &str| toml::from_str::<Config>(&format!("[images]\nreferrers = {text}\n"));
        config("['a.example/team/app', 'debian']").unwrap().registries().unwrap();
        for text in ["['a.example/b', 'a.example/app:1']", "['a.example/b', 'https://a.example']"] {
            let error = config(text).unwrap().registries().unwrap_err();
            assert!(error.to_string().contains("images.referrers[1]"), "{error}");
        }
    }

    #[test]
    fn invalid_mirrors_are_refused_with_their_key() {
        let good = "[[registry]]\nhost = 'docker.io'\nmirrors = ['http://127.0.0.1:5001', 'https://mirror.example']\n";
        toml::from_str::<Config>(good).unwrap().mirrors().unwrap();
        for (text, key) in [
            (
                "host = 'docker.io'\nmirrors = ['https://a.example', 'b.example']",
                "registry[0].mirrors[1]",
            ),
            ("host = 'https://docker.io'\nmirrors = []", "registry[0].host"),
            ("host = 'docker.io'", "mirrors"),
            ("host = 'docker.io'\nmirrors = []\nmirror = 1", "mirror"),
            (
                "host = 'a.example'\nmirrors = []\n[[registry]]\nhost = 'a.example'\nmirrors = []",
                "registry[1].host",
            ),
        ] {
            let config = toml::from_str::<Config>(&format!("[[registry]]\n{text}\n"));
            let error = config.map_err(anyhow::Error::from).and_then(|c| c.mirrors()).unwrap_err();
            assert!(format!("{error:#}").contains(key), "{error:#}");
        }
    }
}
