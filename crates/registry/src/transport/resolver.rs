//! Names of hosts, resolved without the C library.
//!
//! glibc leaves names to libraries that nsswitch.conf(5) lists, and a static program cannot load
//! those of another C library. So a static Lazuli reads hosts(5) and asks the servers of
//! resolv.conf(5) itself.

use std::{
    fs, io,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use hickory_resolver::{
    Hosts, Resolver, TokioResolver,
    config::{ResolveHosts, ResolverConfig},
    lookup_ip::LookupIp,
    net::runtime::TokioRuntimeProvider,
    proto::{
        op::Query,
        rr::{Name as Domain, RecordType},
    },
    system_conf::parse_resolv_conf,
};
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use tokio::time::timeout;

use crate::file_version::FileVersion;

/// Patience with one server. A connection has five, in which three servers can be asked,
/// and containerd leaves the mirror after two.
const PATIENCE: Duration = Duration::from_millis(1500);

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Resolves names as the machine's files say now: a node's servers change with its network.
#[derive(Clone)]
pub(crate) struct FileResolver {
    hosts: PathBuf,
    servers: PathBuf,
    current: Arc<Mutex<Option<Current>>>,
}

struct Current {
    versions: [Option<FileVersion>; 2],
    hosts: Arc<Hosts>,
    servers: Servers,
}

/// In the order in which they are asked. A server is asked when the one before is silent or fails,
/// but not when that knows no such name: a public one may know less of internal names.
type Servers = Arc<[TokioResolver]>;

impl Default for FileResolver {
    fn default() -> Self {
        FileResolver::of("/etc/hosts".into(), "/etc/resolv.conf".into())
    }
}

impl FileResolver {
    fn of(hosts: PathBuf, servers: PathBuf) -> Self {
        FileResolver { hosts, servers, current: Arc::default() }
    }

    async fn addresses(&self, host: &str) -> Result<Vec<SocketAddr>> {
        let (hosts, servers) = self.current()?;
        // Where the file has one kind of address, servers are not asked for the other.
        let domain = Domain::from_utf8(host)?;
        let found: Vec<_> = [RecordType::AAAA, RecordType::A]
            .into_iter()
            .filter_map(|kind| hosts.lookup_static_host(&Query::query(domain.clone(), kind)))
            .flat_map(|found| LookupIp::from(found).into_iter())
            .collect();
        let found = match found.is_empty() {
            true => ask(&servers, host).await?.into_iter().collect(),
            false => found,
        };
        // The port is the caller's.
        Ok(found.into_iter().map(|address| SocketAddr::new(address, 0)).collect())
    }

    fn current(&self) -> Result<(Arc<Hosts>, Servers)> {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        let versions = [&self.hosts, &self.servers].map(|path| FileVersion::of(path));
        if current.as_ref().is_none_or(|current| current.versions != versions) {
            let (hosts, servers) = (read_hosts(&self.hosts)?, read_servers(&self.servers)?);
            *current = Some(Current { versions, hosts: Arc::new(hosts), servers });
        }
        let current = current.as_ref().expect("it was read");
        Ok((current.hosts.clone(), current.servers.clone()))
    }
}

impl Resolve for FileResolver {
    fn resolve(&self, name: Name) -> Resolving {
        let resolver = self.clone();
        Box::pin(async move {
            let addresses = resolver.addresses(name.as_str()).await?;
            Ok(Box::new(addresses.into_iter()) as Addrs)
        })
    }
}

fn read_hosts(path: &Path) -> Result<Hosts> {
    let mut hosts = Hosts::default();
    hosts.read_hosts_conf(read(path)?.as_bytes())?;
    Ok(hosts)
}

async fn ask(servers: &[TokioResolver], host: &str) -> Result<LookupIp> {
    let mut problem = "no name server".into();
    for server in servers {
        match timeout(PATIENCE, server.lookup_ip(host)).await {
            Ok(Ok(found)) => return Ok(found),
            Ok(Err(error)) if error.is_no_records_found() => return Err(error.into()),
            Ok(Err(error)) => problem = error.into(),
            Err(_) => problem = format!("no name server answers within {PATIENCE:?}").into(),
        }
    }
    Err(problem)
}

fn read_servers(path: &Path) -> Result<Servers> {
    let mut text = read(path)?;
    // resolv.conf(5): without a server, the one of this machine is asked.
    if !text.lines().any(|line| line.starts_with("nameserver")) {
        text.push_str("\nnameserver 127.0.0.1\n");
    }
    let (config, mut options) =
        parse_resolv_conf(text).map_err(|error| format!("{}: {error}", path.display()))?;
    options.use_hosts_file = ResolveHosts::Never;
    let (domain, search) = (config.domain().cloned(), config.search());
    let server = |server| {
        let config = ResolverConfig::from_parts(domain.clone(), search.to_vec(), vec![server]);
        let mut builder = Resolver::builder_with_config(config, TokioRuntimeProvider::default());
        *builder.options_mut() = options.clone();
        Ok(builder.build()?)
    };
    config.name_servers().iter().cloned().map(server).collect()
}

/// The file's text; nothing if it does not exist.
fn read(path: &Path) -> Result<String> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(text),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
        Err(error) => Err(format!("cannot read {}: {error}", path.display()).into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_name_follows_the_files_of_the_machine() {
        let etc = tempfile::tempdir().unwrap();
        let (hosts, servers) = (etc.path().join("hosts"), etc.path().join("resolv.conf"));
        let resolver = FileResolver::of(hosts.clone(), servers.clone());
        for address in ["192.0.2.1", "192.0.2.77"] {
            fs::write(&hosts, format!("{address} registry.test registry # ours\n")).unwrap();
            for name in ["registry.test", "registry"] {
                let found = resolver.addresses(name).await.unwrap();
                assert_eq!(found, [SocketAddr::new(address.parse().unwrap(), 0)]);
            }
        }
        fs::write(&servers, "search ..\nnameserver 127.0.0.1\n").unwrap();
        let error = resolver.addresses("registry").await.unwrap_err().to_string();
        assert!(error.contains("resolv.conf"), "{error}");
    }
}
