//! containerd's registry configuration: directories of `hosts.toml` files.
//!
//! ```text
//! /etc/containerd/certs.d/
//!   registry.example_5000_/      for registry.example:5000; also with the colon
//!     hosts.toml                 servers to ask, and how
//!   docker.io/
//!     ca.crt client.cert client.key    as docker has it, where there is no hosts.toml
//!   _default/                    for all others
//! ```
//!
//! Files are read when an image is opened, as in containerd; an error in one is reported when an
//! image of its registry is used.

mod file;

use std::{
    collections::HashSet,
    fs, io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use reqwest::{Url, header::HeaderMap};
use rustls::pki_types::CertificateDer;

use crate::{
    error::HostsError,
    name::Reference,
    route::{
        api::api,
        server::{Capabilities, Server},
    },
    transport::tls::{self, Identity, Tls},
};

/// The directories that containerd and docker read.
pub const DEFAULT_DIRECTORIES: &str = "/etc/containerd/certs.d:/etc/docker/certs.d";

/// Biggest file that is read, in bytes. A bundle of all public authorities has a quarter of that.
const FILE_LIMIT: u64 = 1 << 20;

/// The configuration found for one registry.
#[derive(Default)]
struct Configured {
    /// Servers to ask before the registry itself.
    hosts: Vec<Server>,
    /// The registry's address, if not the one in its name.
    root: Option<Url>,
    /// Settings of the registry itself.
    settings: Settings,
}

/// A server's settings, without its address.
struct Settings {
    may: Capabilities,
    tls: Arc<Tls>,
    headers: HeaderMap,
    connect: Option<Duration>,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            may: Capabilities::ALL,
            tls: Arc::default(),
            headers: HeaderMap::new(),
            connect: None,
        }
    }
}

impl Settings {
    fn at(self, root: Url) -> Server {
        let Settings { may, tls, headers, connect } = self;
        Server { may, tls, headers, connect, ..Server::new(root) }
    }
}

/// The directories.
#[derive(Clone, Debug, Default)]
pub struct Hosts {
    directories: Vec<PathBuf>,
    /// Warnings that were logged already.
    warned: Arc<Mutex<HashSet<String>>>,
}

impl Hosts {
    /// Directories as containerd's `config_path` has them: separated by colons, the first one
    /// counts that has something for a registry. Nothing is read yet.
    pub fn new(directories: &str) -> Self {
        let directories = directories.split(':').filter(|directory| !directory.is_empty());
        Hosts { directories: directories.map(PathBuf::from).collect(), warned: Arc::default() }
    }

    /// Returns the servers to ask for `reference` in their order, the registry itself last.
    pub(crate) fn servers(
        &self,
        reference: &Reference,
        plain_http: bool,
    ) -> Result<Vec<Server>, HostsError> {
        let found = self.directory(reference.registry())?;
        let found = found.map_or_else(|| Ok(Configured::default()), |found| self.read(&found))?;
        let Configured { hosts: mut servers, root, settings } = found;
        servers.push(match root {
            Some(root) => settings.at(root),
            None => registry(reference, settings, plain_http)?,
        });
        Ok(servers)
    }

    /// Finds the directory of a registry.
    fn directory(&self, registry: &str) -> Result<Option<PathBuf>, HostsError> {
        // Some file systems cannot have a colon in a name.
        let spelled = registry.rsplit_once(':').filter(|(_, port)| !port.contains(']'));
        let spelled = spelled.map(|(host, port)| format!("{host}_{port}_"));
        let names = spelled.iter().map(String::as_str).chain([registry, "_default"]);
        let names: Vec<_> = names.collect();
        for path in self.directories.iter().flat_map(|d| names.iter().map(|name| d.join(name))) {
            match fs::metadata(&path) {
                Ok(_) => return Ok(Some(path)),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(HostsError::new(&path, error.to_string())),
            }
        }
        Ok(None)
    }

    fn read(&self, directory: &Path) -> Result<Configured, HostsError> {
        let path = directory.join("hosts.toml");
        let text = read(&path)?.unwrap_or_default();
        if text.is_empty() {
            return certificates_only(directory);
        }
        let (configured, unknown) = file::parse(&path, &text)?;
        for key in unknown {
            self.warn(format!("{}: {key} is not known here, and ignored", path.display()));
        }
        Ok(configured)
    }

    /// Logs a warning once: files are read for each image.
    fn warn(&self, text: String) {
        let mut warned = self.warned.lock().unwrap_or_else(PoisonError::into_inner);
        if !warned.contains(&text) {
            tracing::warn!("{text}");
            warned.insert(text);
        }
    }
}

/// The registry itself, at the host in its name.
fn registry(
    reference: &Reference,
    settings: Settings,
    plain_http: bool,
) -> Result<Server, HostsError> {
    let name = reference.registry();
    let loopback = reference.is_loopback();
    let port = name.rsplit_once(':').map(|(_, port)| port).filter(|port| !port.contains(']'));
    // Registries on this machine usually have no certificate, or a self-signed one at port 443.
    let usual_port = matches!(port, None | Some("443"));
    let plain = plain_http || loopback && !usual_port && !settings.tls.is_set();
    let root = api(if plain { "http" } else { "https" }, name);
    let mut server =
        settings.at(root.map_err(|problem| HostsError::new(Path::new(name), problem))?);
    if loopback && usual_port && !server.tls.is_set() {
        server.tls = Arc::new(Tls { skip_verify: true, ..Tls::default() });
    }
    Ok(server)
}

/// Reads a directory in docker's form: `*.crt` are authorities, `*.cert` with `*.key` is a client
/// certificate.
fn certificates_only(directory: &Path) -> Result<Configured, HostsError> {
    let io = |error: io::Error| HostsError::new(directory, error.to_string());
    let entries = fs::read_dir(directory).map_err(io)?;
    let paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>, _>>();
    let mut paths = paths.map_err(io)?;
    paths.sort();
    let mut tls = Tls::default();
    for path in paths {
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("crt") => tls.authorities.extend(authorities(&path)?),
            Some("cert") => {
                let key = path.with_extension("key");
                tls.identities.push(identity(&path, Some(key).filter(|key| key.exists()))?);
            }
            _ => {}
        }
    }
    let settings = Settings { tls: Arc::new(tls), ..Settings::default() };
    Ok(Configured { settings, ..Configured::default() })
}

/// The certificates in a file.
fn authorities(path: &Path) -> Result<Vec<CertificateDer<'static>>, HostsError> {
    tls::certificates(&read_all(path)?).map_err(|problem| HostsError::new(path, problem))
}

/// A certificate with its key, which is in the same file unless it has its own.
fn identity(certificate: &Path, key: Option<PathBuf>) -> Result<Identity, HostsError> {
    let key = key.as_deref().unwrap_or(certificate);
    let identity = Identity::new(&read_all(certificate)?, &read_all(key)?);
    identity.map_err(|problem| HostsError::new(key, problem))
}

fn read_all(path: &Path) -> Result<Vec<u8>, HostsError> {
    read(path)?.ok_or_else(|| HostsError::new(path, "there is no such file"))
}

/// A file's content, if there is one.
fn read(path: &Path) -> Result<Option<Vec<u8>>, HostsError> {
    let found = match fs::metadata(path) {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(HostsError::new(path, error.to_string())),
    };
    // Opening a pipe must not block.
    if !found.is_file() {
        return Err(HostsError::new(path, "expected a file"));
    }
    if found.len() > FILE_LIMIT {
        let problem = format!("{} bytes are too many, at most {FILE_LIMIT} are read", found.len());
        return Err(HostsError::new(path, problem));
    }
    fs::read(path).map(Some).map_err(|error| HostsError::new(path, error.to_string()))
}

/// Reads a file's text.
#[cfg(fuzzing)]
pub(crate) fn fuzz(text: &[u8]) {
    let _ = file::parse(Path::new("hosts.toml"), text);
}

#[cfg(test)]
mod tests;
