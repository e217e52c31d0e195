//! Public keys, and the signatures that they verify.

use std::fmt;

use aws_lc_rs::signature::{
    ECDSA_P256_SHA256_ASN1, ECDSA_P384_SHA256_ASN1, ECDSA_P384_SHA384_ASN1, ED25519,
    ParsedPublicKey, RSA_PKCS1_2048_8192_SHA256, VerificationAlgorithm,
};
use lazuli_image::{Algorithm, Digest};
use rustls_pki_types::{SubjectPublicKeyInfoDer, pem::PemObject as _};

/// Maximum size of a public key file in bytes. An RSA key of 8192 bits has 1.5 kB.
pub const KEY_LIMIT: usize = 64 << 10;

/// Kinds of keys, each with the algorithms that signers use. Older versions of cosign hash with
/// SHA-256 for every curve, newer ones with the hash of the curve's size.
const KINDS: [(&str, &[&dyn VerificationAlgorithm]); 4] = [
    ("ECDSA P-256", &[&ECDSA_P256_SHA256_ASN1]),
    ("ECDSA P-384", &[&ECDSA_P384_SHA384_ASN1, &ECDSA_P384_SHA256_ASN1]),
    ("RSA", &[&RSA_PKCS1_2048_8192_SHA256]),
    ("Ed25519", &[&ED25519]),
];

/// Why a text is not a public key that can be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// It is bigger than [`KEY_LIMIT`].
    #[error("it has {0} bytes, expected a public key of at most {KEY_LIMIT}")]
    TooBig(usize),
    /// It has no such section, or a damaged one.
    #[error("expected PEM with -----BEGIN PUBLIC KEY-----: {0}")]
    Pem(String),
    /// Its key is of another kind.
    #[error("expected a key of ECDSA P-256 or P-384, RSA with 2048 to 8192 bits, or Ed25519")]
    Kind,
}

/// A public key.
pub struct PublicKey {
    kind: &'static str,
    der: Vec<u8>,
    ways: Vec<ParsedPublicKey>,
}

impl PublicKey {
    /// Parses the first public key in `pem`.
    ///
    /// # Errors
    /// There is none, or of a kind that is not known.
    pub fn from_pem(pem: &[u8]) -> Result<Self, KeyError> {
        if pem.len() > KEY_LIMIT {
            return Err(KeyError::TooBig(pem.len()));
        }
        let der = SubjectPublicKeyInfoDer::from_pem_slice(pem);
        Self::from_der(&der.map_err(|error| KeyError::Pem(error.to_string()))?)
    }

    /// Parses a `SubjectPublicKeyInfo`.
    ///
    /// # Errors
    /// The text is not a public key, or one of an unknown kind.
    pub fn from_der(der: &[u8]) -> Result<Self, KeyError> {
        for (kind, ways) in KINDS {
            let parsed = ways.iter().map(|way| ParsedPublicKey::new(*way, der));
            if let Ok(ways) = parsed.collect::<Result<Vec<_>, _>>() {
                return Ok(PublicKey { kind, der: der.to_vec(), ways });
            }
        }
        Err(KeyError::Kind)
    }

    /// Returns whether `signature` is this key's signature of `message`.
    pub fn verifies(&self, message: &[u8], signature: &[u8]) -> bool {
        self.ways.iter().any(|way| way.verify_sig(message, signature).is_ok())
    }

    /// SHA-256 of the key's `SubjectPublicKeyInfo`: its name in messages, and the hint in bundles.
    pub fn fingerprint(&self) -> Digest {
        Algorithm::Sha256.digest(&self.der)
    }
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} key {}", self.kind, self.fingerprint())
    }
}

impl PartialEq for PublicKey {
    fn eq(&self, other: &Self) -> bool {
        self.der == other.der
    }
}

impl Eq for PublicKey {}
