//! Trusted authorities of a server, and client certificates for it.

use std::{
    fmt,
    sync::{Arc, LazyLock},
    thread,
};

use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme,
    client::{
        ResolvesClientCert,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
        verify_server_name,
    },
    crypto::{CryptoProvider, aws_lc_rs, verify_tls12_signature, verify_tls13_signature},
    pki_types::{
        CertificateDer, PrivateKeyDer, ServerName, UnixTime,
        pem::{self, PemObject as _},
    },
    server::ParsedCertificate,
    sign::CertifiedKey,
};
use rustls_platform_verifier::Verifier;

/// TLS settings of a server. The default has none.
#[derive(Clone, Default, PartialEq, Eq)]
pub(crate) struct Tls {
    /// Certificates that are trusted beside the system's: of authorities, or the server's own.
    pub(crate) authorities: Vec<CertificateDer<'static>>,
    /// Client certificates, for servers that request one.
    pub(crate) identities: Vec<Identity>,
    /// Whether to accept any certificate.
    pub(crate) skip_verify: bool,
}

/// A certificate with the key that belongs to it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    /// The certificate itself comes first, then those between it and its authority.
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
}

impl Clone for Identity {
    fn clone(&self) -> Self {
        Identity { chain: self.chain.clone(), key: self.key.clone_key() }
    }
}

/// Parses the certificates in a PEM file.
///
/// # Errors
/// The problem, without the file's name.
pub(crate) fn certificates(text: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(text).collect();
    match all {
        Ok(all) if all.is_empty() => Err("expected certificates in PEM, found none".to_owned()),
        Ok(all) => {
            // An authority that cannot be read would only be noticed when everything is refused.
            let mut roots = RootCertStore::empty();
            let mut add = |certificate: &CertificateDer<'static>| roots.add(certificate.clone());
            all.iter().try_for_each(&mut add).map_err(|error| problem(&error))?;
            Ok(all)
        }
        Err(error) => Err(format!("expected certificates in PEM: {error}")),
    }
}

impl Identity {
    /// Parses a certificate's PEM file and that of its key, which may be the same.
    ///
    /// # Errors
    /// The problem, without the files' names.
    pub(crate) fn new(certificate: &[u8], key: &[u8]) -> Result<Self, String> {
        let chain = certificates(certificate)?;
        let key = PrivateKeyDer::from_pem_slice(key).map_err(|error| match error {
            pem::Error::NoItemsFound => "expected a private key in PEM, found none".to_owned(),
            error => format!("expected a private key in PEM: {error}"),
        })?;
        let identity = Identity { chain, key };
        identity.certified(&provider()).map_err(|error| problem(&error))?;
        Ok(identity)
    }

    fn certified(&self, provider: &CryptoProvider) -> Result<CertifiedKey, Error> {
        CertifiedKey::from_der(self.chain.clone(), self.key.clone_key(), provider)
    }
}

fn provider() -> CryptoProvider {
    aws_lc_rs::default_provider()
}

/// The user's form of an error.
fn problem(error: &Error) -> String {
    match error {
        Error::InconsistentKeys(_) => "the private key is another certificate's".to_owned(),
        Error::General(text) => text.clone(),
        error => error.to_string(),
    }
}

/// The remedy for a system without authorities.
const ADVICE: &str = "install the system's certificate authorities (Debian: ca-certificates) or name them in SSL_CERT_FILE";

/// When the system's authorities are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Loading {
    /// At once, in a thread: a server with TLS is about to be asked.
    Ahead,
    /// At the first handshake.
    OnDemand,
}

impl Tls {
    /// Returns whether any setting is present, all of which need TLS.
    pub(crate) fn is_set(&self) -> bool {
        *self != Tls::default()
    }

    /// For the HTTP client.
    ///
    /// # Errors
    /// The library dislikes a key.
    pub(crate) fn config(&self, loading: Loading) -> Result<ClientConfig, Error> {
        let provider = Arc::new(provider());
        let verifier: Arc<dyn ServerCertVerifier> = if self.skip_verify {
            Arc::new(AnyServer(provider.clone()))
        } else {
            let named = Arc::new(Named::new(&self.authorities, &provider));
            if loading == Loading::Ahead {
                let ahead = named.clone();
                // If there is no thread to be had, the first handshake reads them.
                let _ = thread::Builder::new().name("authorities".to_owned()).spawn(move || {
                    LazyLock::force(&ahead.system);
                });
            }
            named
        };
        let builder = ClientConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()?
            .dangerous()
            .with_custom_certificate_verifier(verifier);
        let certified = |identity: &Identity| Ok(Arc::new(identity.certified(&provider)?));
        let keys = self.identities.iter().map(certified).collect::<Result<Vec<_>, Error>>()?;
        let mut config = builder.with_client_cert_resolver(Arc::new(Keys(keys)));
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(config)
    }
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (authorities, identities) = (self.authorities.len(), self.identities.len());
        write!(f, "Tls({authorities} authorities, {identities} identities)")
    }
}

/// The verifier with the system's authorities, or the reason why there is none.
type System = Result<Verifier, Error>;

/// Trusts the system's authorities and further certificates, including self-signed ones.
#[derive(Debug)]
struct Named {
    /// Loaded lazily. On Debian some three hundred files, which take 15 to 20 ms of a processor,
    /// and longer from a disk; plain HTTP never needs them.
    system: LazyLock<System, Box<dyn FnOnce() -> System + Send>>,
    known: Vec<CertificateDer<'static>>,
    provider: Arc<CryptoProvider>,
}

impl Named {
    fn new(known: &[CertificateDer<'static>], provider: &Arc<CryptoProvider>) -> Self {
        let (roots, known, provider) = (known.to_vec(), known.to_vec(), provider.clone());
        let shared = provider.clone();
        let read = move || {
            Verifier::new_with_extra_roots(roots, shared)
                .map_err(|error| Error::General(format!("{}; {ADVICE}", problem(&error))))
        };
        Named { system: LazyLock::new(Box::new(read)), known, provider }
    }
}

impl ServerCertVerifier for Named {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let system = self.system.as_ref().map_err(Clone::clone)?;
        let checked =
            system.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now);
        match checked {
            // `openssl req -x509` makes certificates that are at once a server's and their own
            // authority, which the specification forbids. Such a certificate is trusted itself; its
            // dates have been checked already.
            Err(Error::InvalidCertificate(CertificateError::Other(_)))
                if self.known.iter().any(|known| known == end_entity) =>
            {
                verify_server_name(&ParsedCertificate::try_from(end_entity)?, server_name)?;
                Ok(ServerCertVerified::assertion())
            }
            other => other,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// Trusts any server that has the key of its certificate.
#[derive(Debug)]
struct AnyServer(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyServer {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, cert, dss, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, cert, dss, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

/// The certificates that can be shown.
#[derive(Debug)]
struct Keys(Vec<Arc<CertifiedKey>>);

impl ResolvesClientCert for Keys {
    /// The first one from an authority that the server names, or else the first.
    fn resolve(
        &self,
        root_hint_subjects: &[&[u8]],
        schemes: &[SignatureScheme],
    ) -> Option<Arc<CertifiedKey>> {
        let fits = |key: &&Arc<CertifiedKey>| key.key.choose_scheme(schemes).is_some();
        // A certificate holds its issuer's name as the server spells it.
        let named = |key: &&Arc<CertifiedKey>| {
            let holds = |der: &[u8], name: &[u8]| {
                !name.is_empty() && der.windows(name.len()).any(|part| part == name)
            };
            root_hint_subjects.iter().any(|name| key.cert.iter().any(|der| holds(der, name)))
        };
        let mut usable = self.0.iter().filter(fits);
        usable.clone().find(named).or_else(|| usable.next()).cloned()
    }

    fn has_certs(&self) -> bool {
        !self.0.is_empty()
    }
}
