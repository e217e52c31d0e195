//! The configuration file.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    ops::RangeInclusive,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, anyhow, bail};
use lazuli_mirror::LazyNames;
use lazuli_registry::{
    Dragonfly, Hosts, ImageName, IndexTrust, Mirrors, Options, PeerCredentials, TrustedReferrers,
    hosts::DEFAULT_DIRECTORIES,
};
use lazuli_runtime::{
    cache::KeepFree,
    daemon::{DriverChoice, IndexSettings},
    prefetch,
};
use serde::{Deserialize, Deserializer, de::Error as _};

use crate::{metrics::Metrics, path_context::PathContext as _};

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
    /// Which indexes make ordinary images lazy ones.
    pub(crate) index: Index,
    /// The engine that shares blobs between nodes.
    p2p: Option<PeerToPeer>,
    /// containerd's directories of `hosts.toml` files, separated by colons.
    pub(crate) hosts_dir: Option<String>,
    /// Which images may run, see `docs/policy.md`; has to be there if it is named.
    pub(crate) policy: Option<PathBuf>,
    /// The snapshotter for containerd, if enabled.
    pub(crate) snapshotter: Option<Snapshotter>,
    /// The mirror for pulls, if enabled.
    pub(crate) mirror: Option<Mirror>,
    /// The metrics server, if enabled.
    pub(crate) metrics: Option<Metrics>,
}

/// The `[mirror]` table.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Mirror {
    /// A port of the loopback interface.
    pub(crate) listen: SocketAddr,
    /// Repositories whose tags are answered with the lazy form of their image.
    lazy: Vec<String>,
    /// How long manifests are answered after a registry went away; 0 for never.
    stale_while_down_hours: u64,
}

impl Default for Mirror {
    fn default() -> Self {
        let listen = SocketAddr::from((Ipv4Addr::LOCALHOST, 5444));
        Mirror { listen, lazy: Vec::new(), stale_while_down_hours: 24 }
    }
}

impl Mirror {
    fn check(&self) -> Result<()> {
        let Mirror { listen, stale_while_down_hours: hours, .. } = self;
        if !listen.ip().is_loopback() || listen.port() == 0 {
            bail!("mirror.listen is {listen}, expected a port of 127.0.0.1 or [::1]");
        }
        check("mirror.stale_while_down_hours", Some(*hours), 0..=24)?;
        self.lazy().map(drop)
    }

    /// Tags that are answered with the lazy form of their image.
    pub(crate) fn lazy(&self) -> Result<LazyNames> {
        LazyNames::parse(&self.lazy).context("mirror.lazy")
    }

    /// How long manifests are answered after a registry went away.
    pub(crate) fn stale(&self) -> Duration {
        Duration::from_secs(3600 * self.stale_while_down_hours)
    }
}

/// The `[snapshotter]` table.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Snapshotter {
    /// The Unix socket that containerd connects to.
    pub(crate) address: PathBuf,
    /// The driver for containers' images.
    pub(crate) driver: DriverChoice,
}

impl Default for Snapshotter {
    fn default() -> Self {
        let address = "/run/lazuli/snapshotter.sock".into();
        Snapshotter { address, driver: DriverChoice::Auto }
    }
}

impl Snapshotter {
    fn check(&self) -> Result<()> {
        let path = self.address.display();
        if !self.address.is_absolute() {
            bail!("snapshotter.address is {path}, expected an absolute path");
        }
        // Bytes that fit into `sun_path` before the final NUL.
        if self.address.as_os_str().len() > 107 {
            bail!("snapshotter.address is {path}, expected at most 107 bytes");
        }
        Ok(())
    }
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
    ahead: prefetch::Ahead,
    /// Whether to publish traces beside their images.
    publish: bool,
    /// Stored bytes per second at which the rest of an image arrives after its start; 0 for never.
    rest_bytes_per_second: Option<u64>,
    /// Stored bytes that the misses of one start may cause beyond their own chunks.
    escalate_bytes: Option<u64>,
    /// Images that are fetched whole when the daemon starts.
    pub(crate) images: Vec<String>,
}

impl Prefetch {
    fn check(&self) -> Result<()> {
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
            ahead: self.ahead,
            publish: self.publish,
            rest_bytes_per_second,
            escalate_bytes: self.escalate_bytes.unwrap_or(escalate),
        }
    }
}

/// The `[images]` table.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Images {
    /// Repositories in which a lazy image replaces the ordinary one that it refers to.
    referrers: Vec<String>,
}

impl Images {
    fn trusted(&self) -> Result<TrustedReferrers> {
        let trusted = TrustedReferrers::parse(&self.referrers);
        trusted.map_err(|(number, error)| anyhow!("images.referrers[{number}]: {error}"))
    }
}

/// The `[index]` table.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Index {
    /// Which are used.
    trust: Trust,
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
    fn check(&self) -> Result<()> {
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

/// Which indexes are trusted.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Trust {
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
struct PeerToPeer {
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
    /// Where dfdaemon listens.
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
                        config.mirror.as_ref().map_or(Ok(()), Mirror::check)?;
                        config.metrics.as_ref().map(Metrics::address).transpose()?;
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

impl Cache {
    fn check(&self) -> Result<()> {
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
    fn check(&self) -> Result<()> {
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

    #[test]
    fn unknown_keys_are_refused() {
        let config: Config = toml::from_str("[fetch]\ndeadline_seconds = 5\n").unwrap();
        assert_eq!(config.fetch.deadline(), Some(Duration::from_secs(5)));
        let error = toml::from_str::<Config>("[fetch]\ndeadline = 5\n").unwrap_err();
        assert!(error.to_string().contains("deadline_seconds"), "{error}");
        let config: Config = toml::from_str("[fetch]\ndeadline_seconds = 0\n").unwrap();
        assert!(config.fetch.check().unwrap_err().to_string().contains("1 to 86400"));
        let config: Config = toml::from_str("[prefetch]\nahead = 'guess'\n").unwrap();
        assert_eq!(config.prefetch.settings().ahead, prefetch::Ahead::Guess);
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

    #[test]
    fn drivers_have_names() {
        let driver = |text: &str| toml::from_str::<Config>(&format!("[snapshotter]\n{text}\n"));
        assert_eq!(driver("").unwrap().snapshotter.unwrap().driver, DriverChoice::Auto);
        let fuse = driver("driver = 'fuse'").unwrap().snapshotter.unwrap();
        assert_eq!(fuse.driver, DriverChoice::Fuse);
        let error = driver("driver = 'erofs'").unwrap_err().to_string();
        assert!(error.contains("`auto`, `fanotify`, `loop`, `fuse`"), "{error}");
    }

    #[test]
    fn directories_of_hosts_are_absolute() {
        for (text, right) in [("/a", true), ("/a:/b", true), ("", true), ("/a:b", false)] {
            let config: Config = toml::from_str(&format!("hosts_dir = '{text}'\n")).unwrap();
            assert_eq!(config.check_hosts_dir().is_ok(), right, "{text}");
        }
    }

    #[test]
    fn the_table_turns_the_snapshotter_on() {
        assert!(toml::from_str::<Config>("").unwrap().snapshotter.is_none());
        let config: Config = toml::from_str("[snapshotter]\n").unwrap();
        let address = config.snapshotter.unwrap().address;
        assert_eq!(address, Path::new("/run/lazuli/snapshotter.sock"));
        for address in ["relative.sock".to_owned(), format!("/{}", "x".repeat(107))] {
            let error = Snapshotter { address: address.into(), ..Snapshotter::default() }
                .check()
                .unwrap_err();
            assert!(error.to_string().contains("snapshotter.address"), "{error}");
        }
    }

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

    #[test]
    fn the_mirror_is_on_the_loopback_interface() {
        let mirror = |text: &str| {
            let config = toml::from_str::<Config>(&format!("[mirror]\n{text}\n")).unwrap();
            config.mirror.unwrap()
        };
        assert!(toml::from_str::<Config>("").unwrap().mirror.is_none());
        let usual = mirror("");
        usual.check().unwrap();
        assert_eq!(usual.listen.to_string(), "127.0.0.1:5444");
        assert_eq!(usual.stale(), Duration::from_secs(24 * 3600));
        mirror("listen = '[::1]:5000'\nlazy = ['*', 'r.example/a']").check().unwrap();
        for (text, key) in [
            ("listen = '0.0.0.0:5444'", "mirror.listen"),
            ("listen = '10.0.0.1:5444'", "mirror.listen"),
            ("listen = '127.0.0.1:0'", "mirror.listen"),
            ("stale_while_down_hours = 25", "mirror.stale_while_down_hours"),
            ("lazy = ['r.example/a:1']", "mirror.lazy"),
        ] {
            let error = format!("{:#}", mirror(text).check().unwrap_err());
            assert!(error.contains(key), "{error}");
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
    fn mirrors_are_checked() {
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
