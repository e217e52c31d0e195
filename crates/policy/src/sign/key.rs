//! Private keys.

use std::fmt;

use aws_lc_rs::{
    encoding::{AsDer as _, PublicKeyX509Der},
    rand::SystemRandom,
    signature::{
        ECDSA_P256_SHA256_ASN1_SIGNING, ECDSA_P384_SHA384_ASN1_SIGNING, EcdsaKeyPair, KeyPair as _,
        RSA_PKCS1_SHA256, RsaKeyPair,
    },
};
use zeroize::Zeroizing;

use super::encrypted::{self, EncryptedKey};
use crate::key::{KEY_LIMIT, PublicKey};

/// The PEM label of a PKCS#8 key that is not encrypted.
const PKCS8: &str = "PRIVATE KEY";

/// Why a file is not a private key that can sign.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SigningKeyError {
    /// It is bigger than [`KEY_LIMIT`].
    #[error("it has {0} bytes, expected a private key of at most {KEY_LIMIT}")]
    TooBig(usize),
    /// It is no PEM.
    #[error("expected PEM with -----BEGIN PRIVATE KEY----- or a cosign.key: {0}")]
    Pem(String),
    /// It is PEM of something else.
    #[error(
        "it is a {0:?}, expected a \"PRIVATE KEY\" (PKCS#8, as `openssl pkcs8 -topk8 -nocrypt` writes it) or \
         the cosign.key of `cosign generate-key-pair`"
    )]
    Label(String),
    /// It is cosign's, and damaged or unknown.
    #[error("the encrypted key cannot be read: {0}")]
    Encrypted(String),
    /// It is encrypted, and there is no password.
    #[error("it is encrypted: put its password into the environment variable COSIGN_PASSWORD")]
    NoPassword,
    /// The password does not open it.
    #[error("the password in COSIGN_PASSWORD is not that of this key, or the file is damaged")]
    WrongPassword,
    /// Its key is of a kind that does not sign.
    #[error("expected a PKCS#8 key of ECDSA P-256 or P-384, or RSA with 2048 to 8192 bits")]
    Kind,
}

/// The key could not sign.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot sign with the private key")]
pub struct SigningError;

/// A private key.
pub struct SigningKey {
    pair: Pair,
    public: PublicKey,
}

enum Pair {
    Ecdsa(EcdsaKeyPair),
    Rsa(RsaKeyPair),
}

impl SigningKey {
    /// Parses the private key in `pem`: PKCS#8, or the output of `cosign generate-key-pair`, which
    /// `password` decrypts.
    ///
    /// # Errors
    /// There is none, `password` does not open it, or its kind cannot sign.
    pub fn from_pem(pem: &[u8], password: Option<&[u8]>) -> Result<Self, SigningKeyError> {
        if pem.len() > KEY_LIMIT {
            return Err(SigningKeyError::TooBig(pem.len()));
        }
        let section = pem::parse(pem).map_err(|error| SigningKeyError::Pem(error.to_string()))?;
        let label = section.tag().to_owned();
        let content = Zeroizing::new(section.into_contents());
        if label == PKCS8 {
            return Self::from_pkcs8(&content);
        }
        if !encrypted::LABELS.contains(&label.as_str()) {
            return Err(SigningKeyError::Label(label));
        }
        let key = EncryptedKey::parse(&content).map_err(SigningKeyError::Encrypted)?;
        let password = password.ok_or(SigningKeyError::NoPassword)?;
        Self::from_pkcs8(&key.decrypt(password).ok_or(SigningKeyError::WrongPassword)?)
    }

    fn from_pkcs8(der: &[u8]) -> Result<Self, SigningKeyError> {
        let curves = [&ECDSA_P256_SHA256_ASN1_SIGNING, &ECDSA_P384_SHA384_ASN1_SIGNING];
        let ecdsa = curves.iter().find_map(|curve| EcdsaKeyPair::from_pkcs8(curve, der).ok());
        let pair = ecdsa.map(Pair::Ecdsa);
        let pair = pair.or_else(|| RsaKeyPair::from_pkcs8(der).ok().map(Pair::Rsa));
        let pair = pair.ok_or(SigningKeyError::Kind)?;
        let public = pair.public_der().ok_or(SigningKeyError::Kind)?;
        let public = PublicKey::from_der(public.as_ref()).map_err(|_| SigningKeyError::Kind)?;
        Ok(SigningKey { pair, public })
    }

    /// The public key of this private key.
    pub fn public(&self) -> &PublicKey {
        &self.public
    }

    /// Signs `message`: ECDSA with SHA-256 or, for P-384, SHA-384; RSA with SHA-256 and PKCS#1 1.5.
    ///
    /// # Errors
    /// The system has no random numbers, or the key is not consistent.
    pub fn sign(&self, message: &[u8]) -> Result<Vec<u8>, SigningError> {
        let random = SystemRandom::new();
        match &self.pair {
            Pair::Ecdsa(pair) => {
                let signature = pair.sign(&random, message).map_err(|_| SigningError)?;
                Ok(signature.as_ref().to_vec())
            }
            Pair::Rsa(pair) => {
                let mut signature = vec![0; pair.public_modulus_len()];
                let signed = pair.sign(&RSA_PKCS1_SHA256, &random, message, &mut signature);
                signed.map(|()| signature).map_err(|_| SigningError)
            }
        }
    }
}

impl Pair {
    fn public_der(&self) -> Option<PublicKeyX509Der<'static>> {
        match self {
            Pair::Ecdsa(pair) => pair.public_key().as_der(),
            Pair::Rsa(pair) => pair.public_key().as_der(),
        }
        .ok()
    }
}

impl fmt::Debug for SigningKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "private key of {:?}", self.public)
    }
}
