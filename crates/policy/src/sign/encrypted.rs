//! cosign's private key file: a PKCS#8 key, encrypted under a password.
//!
//! ```text
//! -----BEGIN ENCRYPTED SIGSTORE PRIVATE KEY-----    (COSIGN instead of SIGSTORE before cosign 2)
//! base64 of {"kdf": {"name": "scrypt", "params": {"N": 65536, "r": 8, "p": 1}, "salt": "…"},
//!            "cipher": {"name": "nacl/secretbox", "nonce": "…"}, "ciphertext": "…"}
//! ```
//! `nacl/secretbox` is XSalsa20 with Poly1305: the first 32 bytes of the key stream are the key of
//! the tag, which covers the ciphertext and precedes it; the text begins with the bytes that
//! follow.

use aws_lc_rs::constant_time::verify_slices_are_equal;
use poly1305::{Poly1305, universal_hash::KeyInit as _};
use salsa20::{
    XSalsa20,
    cipher::{KeyIvInit as _, StreamCipher as _},
};
use serde::Deserialize;
use zeroize::Zeroizing;

use crate::error;

/// Labels of such a file's PEM section.
pub(super) const LABELS: [&str; 2] =
    ["ENCRYPTED SIGSTORE PRIVATE KEY", "ENCRYPTED COSIGN PRIVATE KEY"];

/// Costs that cosign accepts, as powers of two; the key derivation takes 2^17 × 1 KiB of memory at
/// most. A file that asks for more is not cosign's, and could take any amount.
const COSTS: [u8; 3] = [15, 16, 17];

const SALT_LIMIT: usize = 1024;
const TAG: usize = 16;

#[derive(Deserialize)]
struct Document {
    kdf: Kdf,
    cipher: Cipher,
    ciphertext: String,
}

#[derive(Deserialize)]
struct Kdf {
    name: String,
    params: Params,
    salt: String,
}

#[derive(Deserialize, PartialEq, Eq)]
struct Params {
    #[serde(rename = "N")]
    cost: u64,
    r: u32,
    p: u32,
}

#[derive(Deserialize)]
struct Cipher {
    name: String,
    nonce: String,
}

/// A key file, decoded and not decrypted.
#[derive(Debug)]
pub(super) struct EncryptedKey {
    log_cost: u8,
    salt: Vec<u8>,
    nonce: [u8; 24],
    ciphertext: Vec<u8>,
}

impl EncryptedKey {
    /// Parses the content of the PEM section; the error says what is wrong.
    pub(super) fn parse(raw: &[u8]) -> Result<Self, String> {
        let document: Document = serde_json::from_slice(raw).map_err(|error| error.to_string())?;
        let decode =
            |text: &str| error::base64("key file", text).map_err(|error| error.to_string());
        let Document { kdf, cipher, ciphertext } = document;
        if kdf.name != "scrypt" || cipher.name != "nacl/secretbox" {
            let (kdf, cipher) = (kdf.name, cipher.name);
            return Err(format!(
                "it is made with {kdf:?} and {cipher:?}, expected scrypt and nacl/secretbox"
            ));
        }
        let costs = |log_cost: &u8| kdf.params == Params { cost: 1 << log_cost, r: 8, p: 1 };
        let log_cost = COSTS.into_iter().find(costs).ok_or_else(|| {
            let Params { cost, r, p } = kdf.params;
            format!(
                "its scrypt parameters are N={cost}, r={r}, p={p}, expected N=65536, r=8, p=1 as cosign writes them"
            )
        })?;
        let (salt, nonce) = (decode(&kdf.salt)?, decode(&cipher.nonce)?);
        if salt.len() > SALT_LIMIT {
            return Err(format!(
                "its salt has {} bytes, expected at most {SALT_LIMIT}",
                salt.len()
            ));
        }
        let nonce = nonce.try_into().map_err(|nonce: Vec<u8>| {
            format!("its nonce has {} bytes, expected 24", nonce.len())
        })?;
        Ok(EncryptedKey { log_cost, salt, nonce, ciphertext: decode(&ciphertext)? })
    }

    /// The PKCS#8 key; `None` if the password is wrong or the file was changed.
    pub(super) fn decrypt(&self, password: &[u8]) -> Option<Zeroizing<Vec<u8>>> {
        let params = scrypt::Params::new(self.log_cost, 8, 1).ok()?;
        let mut key = Zeroizing::new([0; 32]);
        scrypt::scrypt(password, &self.salt, &params, &mut *key).ok()?;
        open(&key, &self.nonce, &self.ciphertext)
    }
}

/// Opens a `secretbox`.
fn open(key: &[u8; 32], nonce: &[u8; 24], sealed: &[u8]) -> Option<Zeroizing<Vec<u8>>> {
    let (tag, text) = sealed.split_at_checked(TAG)?;
    let mut cipher = XSalsa20::new(key.into(), nonce.into());
    let mut tag_key = Zeroizing::new([0; 32]);
    cipher.apply_keystream(&mut *tag_key);
    let expected = Poly1305::new((&*tag_key).into()).compute_unpadded(text);
    verify_slices_are_equal(&expected, tag).ok()?;
    let mut text = Zeroizing::new(text.to_vec());
    cipher.apply_keystream(&mut text);
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(text: &str) -> Vec<u8> {
        let digits: String = text.split_whitespace().collect();
        (0..digits.len())
            .step_by(2)
            .map(|at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap())
            .collect()
    }

    /// The example of the NaCl paper ("Cryptography in NaCl", section 10).
    #[test]
    fn secretbox_opens_the_published_example_and_nothing_else() {
        let key = hex("1b27556473e985d462cd51197a9a46c7 6009549eac6474f206c4ee0844f68389");
        let nonce = hex("69696ee955b62b73cd62bda875fc73d6 8219e0036b7a0b37");
        let text = hex("be075fc53c81f2d5cf141316ebeb0c7b 5228c52a4c62cbd44b66849b64244ffc
             e5ecbaaf33bd751a1ac728d45e6c6129 6cdc3c01233561f41db66cce314adb31
             0e3be8250c46f06dceea3a7fa1348057 e2f6556ad6b1318a024a838f21af1fde
             048977eb48f59ffd4924ca1c60902e52 f0a089bc76897040e082f93776384864
             5e0705");
        let mut sealed = hex("f3ffc7703f9400e52a7dfb4b3d3305d9
             8e993b9f48681273c29650ba32fc76ce 48332ea7164d96a4476fb8c531a1186a
             c0dfc17c98dce87b4da7f011ec48c972 71d2c20f9b928fe2270d6fb863d51738
             b48eeee314a7cc8ab932164548e526ae 90224368517acfeabd6bb3732bc0e9da
             99832b61ca01b6de56244a9e88d5f9b3 7973f622a43d14a6599b1f654cb45a74
             e355a5");
        let (key, nonce) = (key.try_into().unwrap(), nonce.try_into().unwrap());
        assert_eq!(open(&key, &nonce, &sealed).unwrap().as_slice(), text);
        for at in 0..sealed.len() {
            sealed[at] ^= 1;
            assert!(open(&key, &nonce, &sealed).is_none(), "byte {at} may be changed");
            sealed[at] ^= 1;
        }
        assert!(open(&key, &nonce, &sealed[..15]).is_none());
    }
}
