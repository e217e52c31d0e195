//! Certificates of the mirror and of its clients, which exist on this node alone.
//!
//! ```text
//! ROOT/mirror/
//!   ca.pem         signs the two below; its key is thrown away once it has
//!   server.pem     shown by the mirror
//!   client.pem     shown by containerd, and other clients that the operator gives it to
//!   secret         what tokens are sealed with
//! ```
//!
//! The authority cannot sign another certificate, because its key does not exist any more. A
//! process that binds the mirror's port while it is free has none to show, and one that connects to
//! the mirror has none either, unless it may read root's files.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    path::{Path, PathBuf},
    sync::Arc,
};

use aws_lc_rs::rand;
use lazuli_sys::path_error::At as _;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair, KeyUsagePurpose, SanType,
};
use tokio_rustls::rustls::{
    RootCertStore, ServerConfig,
    crypto::aws_lc_rs as provider,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
    server::WebPkiClientVerifier,
};

use crate::{
    error::MirrorError,
    files,
    seal::{SECRET, Seal},
};

/// Biggest file that is read, in bytes. A certificate with its key has about one KiB.
const FILE_LIMIT: u64 = 64 << 10;

/// The authority's certificate, `ca` in hosts.toml.
const CA: &str = "ca.pem";

/// The mirror's certificate with its key.
const SERVER: &str = "server.pem";

/// The clients' certificate with its key, `client` in hosts.toml.
const CLIENT: &str = "client.pem";

/// The secret that seals tokens. Written last: if it exists, the other files do too.
const SECRET_FILE: &str = "secret";

/// The certificates of a node, in a directory of its state.
#[derive(Debug)]
pub struct Identity {
    directory: PathBuf,
}

impl Identity {
    /// Opens the certificates in `directory`, and makes them first if there are none.
    ///
    /// # Errors
    /// The directory cannot be written.
    pub fn open(directory: &Path) -> Result<Self, MirrorError> {
        let identity = Identity { directory: directory.to_owned() };
        if !identity.path(SECRET_FILE).exists() {
            files::directory(directory).at(directory)?;
            // The daemon and `lazuli setup mirror` may both be the first.
            let lock = files::lock(directory).at(directory)?;
            if !identity.path(SECRET_FILE).exists() {
                identity.make()?;
            }
            drop(lock);
        }
        Ok(identity)
    }

    /// The authority's certificate.
    pub fn ca(&self) -> PathBuf {
        self.path(CA)
    }

    /// Certificate and key that clients show.
    pub fn client(&self) -> PathBuf {
        self.path(CLIENT)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    fn make(&self) -> Result<(), MirrorError> {
        let failed = |error: rcgen::Error| MirrorError::Certificates { problem: error.to_string() };
        let authority = authority().map_err(failed)?;
        let (server, client) =
            (ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth);
        self.write(SERVER, sign(&authority, server).map_err(failed)?.as_bytes())?;
        self.write(CLIENT, sign(&authority, client).map_err(failed)?.as_bytes())?;
        self.write(CA, authority.pem().as_bytes())?;
        let mut secret = [0; SECRET];
        rand::fill(&mut secret).map_err(|_| {
            let problem = "the system has no random numbers".to_owned();
            MirrorError::Certificates { problem }
        })?;
        self.write(SECRET_FILE, &secret)
    }

    fn write(&self, name: &str, content: &[u8]) -> Result<(), MirrorError> {
        let path = self.path(name);
        Ok(files::write(&path, content).at(path)?)
    }

    fn read(&self, name: &str) -> Result<Vec<u8>, MirrorError> {
        let path = self.path(name);
        Ok(files::read(&path, FILE_LIMIT).at(path)?)
    }

    /// Returns the seal of tokens.
    pub(crate) fn seal(&self) -> Result<Seal, MirrorError> {
        let secret = self.read(SECRET_FILE)?;
        let wrong = || MirrorError::damaged(self.path(SECRET_FILE), "it is no secret");
        let secret: [u8; SECRET] = secret.try_into().map_err(|_| wrong())?;
        Seal::new(&secret).ok_or_else(wrong)
    }

    /// How the mirror speaks TLS: with its certificate, and only with clients that show theirs.
    pub(crate) fn tls(&self) -> Result<ServerConfig, MirrorError> {
        let text = self.read(SERVER)?;
        let damaged = |problem: String| MirrorError::damaged(self.path(SERVER), problem);
        let chain = CertificateDer::pem_slice_iter(&text).collect::<Result<Vec<_>, _>>();
        let chain = chain.map_err(|error| damaged(error.to_string()))?;
        let key = PrivateKeyDer::from_pem_slice(&text).map_err(|e| damaged(e.to_string()))?;
        let provider = Arc::new(provider::default_provider());
        let clients = self.clients()?;
        let clients = WebPkiClientVerifier::builder_with_provider(clients.into(), provider.clone());
        let clients = clients.build().map_err(|error| damaged(error.to_string()))?;
        let builder = ServerConfig::builder_with_provider(provider);
        let builder = builder.with_safe_default_protocol_versions();
        let builder = builder.map_err(|error| damaged(error.to_string()))?;
        let config = builder.with_client_cert_verifier(clients).with_single_cert(chain, key);
        let mut config = config.map_err(|error| damaged(error.to_string()))?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(config)
    }

    fn clients(&self) -> Result<RootCertStore, MirrorError> {
        let text = self.read(CA)?;
        let damaged = |problem: String| MirrorError::damaged(self.path(CA), problem);
        let ca = CertificateDer::from_pem_slice(&text).map_err(|e| damaged(e.to_string()))?;
        let mut roots = RootCertStore::empty();
        roots.add(ca).map_err(|error| damaged(error.to_string()))?;
        Ok(roots)
    }
}

fn parameters(name: &str) -> CertificateParams {
    let mut parameters = CertificateParams::default();
    parameters.distinguished_name.push(DnType::CommonName, name);
    parameters
}

fn authority() -> Result<CertifiedIssuer<'static, KeyPair>, rcgen::Error> {
    let mut parameters = parameters("the mirror of this node");
    parameters.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    parameters.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    CertifiedIssuer::self_signed(parameters, KeyPair::generate()?)
}

/// A certificate for this machine's loopback interface, and its key.
fn sign(
    authority: &CertifiedIssuer<'static, KeyPair>,
    purpose: ExtendedKeyUsagePurpose,
) -> Result<String, rcgen::Error> {
    let mut parameters = parameters("lazuli");
    parameters.subject_alt_names = vec![
        SanType::IpAddress(IpAddr::V4(Ipv4Addr::LOCALHOST)),
        SanType::IpAddress(IpAddr::V6(Ipv6Addr::LOCALHOST)),
        SanType::DnsName("localhost".try_into()?),
    ];
    parameters.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    parameters.extended_key_usages = vec![purpose];
    let key = KeyPair::generate()?;
    let signed = parameters.signed_by(&key, authority)?;
    Ok(signed.pem() + &key.serialize_pem())
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt as _};

    use super::*;

    #[test]
    fn certificates_are_made_once_and_are_for_their_owner_alone() {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("mirror");
        let content = |identity: &Identity| fs::read(identity.client()).unwrap();
        let first = content(&Identity::open(&directory).unwrap());
        assert_eq!(content(&Identity::open(&directory).unwrap()), first);
        let second = root.path().join("second");
        let openings: Vec<_> = std::thread::scope(|scope| {
            let open = || content(&Identity::open(&second).unwrap());
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(open)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(openings.iter().all(|one| *one == openings[0]));
        for entry in fs::read_dir(&directory).unwrap() {
            let entry = entry.unwrap();
            let mode = entry.metadata().unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600, "{:?}", entry.path());
        }
        let mode = fs::metadata(&directory).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
    }

    #[test]
    fn a_damaged_file_is_named_with_what_to_do() {
        let root = tempfile::tempdir().unwrap();
        let identity = Identity::open(root.path()).unwrap();
        identity.tls().unwrap();
        for (name, expected) in [(SERVER, "server.pem"), (CA, "ca.pem")] {
            let kept = fs::read(identity.path(name)).unwrap();
            fs::write(identity.path(name), "-----BEGIN NOTHING-----").unwrap();
            let error = identity.tls().unwrap_err().to_string();
            assert!(error.contains(expected) && error.contains("lazuli setup mirror"), "{error}");
            fs::write(identity.path(name), kept).unwrap();
        }
        fs::write(identity.path(SECRET_FILE), "short").unwrap();
        let error = identity.seal().unwrap_err().to_string();
        assert!(error.contains("secret"), "{error}");
    }
}
