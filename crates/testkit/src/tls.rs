//! Certificates, and TLS in front of plain servers.

use std::{io, net::SocketAddr, sync::Arc, thread};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair,
};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::{
    TlsAcceptor,
    rustls::{
        RootCertStore, ServerConfig,
        crypto::aws_lc_rs,
        pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
        server::WebPkiClientVerifier,
    },
};

/// A certificate and its key, in PEM.
#[derive(Clone, Debug)]
pub struct Certificate {
    /// The certificate.
    pub certificate: String,
    /// Its private key.
    pub key: String,
}

/// A certificate authority.
#[derive(Debug)]
pub struct Authority(CertifiedIssuer<'static, KeyPair>);

fn parameters(name: &str) -> CertificateParams {
    let mut parameters = CertificateParams::new(vec![name.to_owned()]).expect("a name");
    parameters.distinguished_name.push(DnType::CommonName, name);
    parameters
}

fn key() -> KeyPair {
    KeyPair::generate().expect("randomness")
}

impl Authority {
    /// A new authority with this name.
    pub fn new(name: &str) -> Self {
        let mut parameters = parameters(name);
        parameters.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Authority(CertifiedIssuer::self_signed(parameters, key()).expect("an authority"))
    }

    /// Its certificate in PEM.
    pub fn certificate(&self) -> String {
        self.0.pem()
    }

    /// A certificate of a server with this host name or address.
    pub fn server(&self, host: &str) -> Certificate {
        self.sign(host, ExtendedKeyUsagePurpose::ServerAuth)
    }

    /// A certificate of a client.
    pub fn client(&self, name: &str) -> Certificate {
        self.sign(name, ExtendedKeyUsagePurpose::ClientAuth)
    }

    fn sign(&self, name: &str, purpose: ExtendedKeyUsagePurpose) -> Certificate {
        let (mut parameters, key) = (parameters(name), key());
        parameters.extended_key_usages = vec![purpose];
        let signed = parameters.signed_by(&key, &self.0).expect("a certificate");
        Certificate { certificate: signed.pem(), key: key.serialize_pem() }
    }
}

/// A certificate of a server that is its own authority, as `openssl req -x509` makes it.
pub fn self_signed(host: &str) -> Certificate {
    let (mut parameters, key) = (parameters(host), key());
    parameters.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let signed = parameters.self_signed(&key).expect("a certificate");
    Certificate { certificate: signed.pem(), key: key.serialize_pem() }
}

/// Listens with TLS on a port of its own and hands everything on to `server`, as long as the
/// process lives. With `clients`, only clients with a certificate of that authority are accepted.
///
/// # Errors
/// No port can be had.
pub fn in_front_of(
    server: SocketAddr,
    shown: &Certificate,
    clients: Option<&Authority>,
) -> io::Result<SocketAddr> {
    let provider = Arc::new(aws_lc_rs::default_provider());
    let builder = ServerConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(io::Error::other)?;
    let builder = match clients {
        None => builder.with_no_client_auth(),
        Some(authority) => {
            let mut roots = RootCertStore::empty();
            roots.add(authority.0.der().clone()).map_err(io::Error::other)?;
            let verifier = WebPkiClientVerifier::builder_with_provider(roots.into(), provider);
            builder.with_client_cert_verifier(verifier.build().map_err(io::Error::other)?)
        }
    };
    let chain = CertificateDer::pem_slice_iter(shown.certificate.as_bytes());
    let chain = chain.collect::<Result<_, _>>().map_err(io::Error::other)?;
    let key = PrivateKeyDer::from_pem_slice(shown.key.as_bytes()).map_err(io::Error::other)?;
    let config = builder.with_single_cert(chain, key).map_err(io::Error::other)?;
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
    listener.set_nonblocking(true)?;
    let address = listener.local_addr()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    thread::spawn(move || {
        runtime.block_on(async {
            let Ok(listener) = TcpListener::from_std(listener) else { return };
            while let Ok((stream, _)) = listener.accept().await {
                let acceptor = acceptor.clone();
                tokio::spawn(async move {
                    let mut stream = acceptor.accept(stream).await?;
                    let mut behind = TcpStream::connect(server).await?;
                    tokio::io::copy_bidirectional(&mut stream, &mut behind).await
                });
            }
        });
    });
    Ok(address)
}
