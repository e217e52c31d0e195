//! Tokens, and names of secrets in files.
//!
//! A token is a login, sealed with the node's secret for one registry: a client can show it to the
//! mirror, and cannot look into it. So the mirror remembers none, and tokens stay good when its
//! process is replaced.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use aws_lc_rs::{
    aead::{AES_256_GCM, Aad, NONCE_LEN, Nonce, RandomizedNonceKey},
    hmac,
};
use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use lazuli_registry::Login;
use serde::{Deserialize, Serialize};

/// Bytes of the node's secret: a key for tokens, and one for names.
pub(crate) const SECRET: usize = 64;

/// Lifetime of a token. Clients request a new one when it has expired.
pub(crate) const LIFETIME: Duration = Duration::from_secs(300);

/// Limit of a token, in bytes: it holds a user's password, which may be a signed token.
const TOKEN_LIMIT: usize = 64 << 10;

/// The node's secret.
#[derive(Debug)]
pub(crate) struct Seal {
    tokens: RandomizedNonceKey,
    names: hmac::Key,
}

#[derive(Serialize, Deserialize)]
struct Sealed {
    login: Login,
    /// Seconds since 1970.
    until: u64,
}

impl Seal {
    pub(crate) fn new(secret: &[u8; SECRET]) -> Option<Self> {
        let (tokens, names) = secret.split_at(SECRET / 2);
        Some(Seal {
            tokens: RandomizedNonceKey::new(&AES_256_GCM, tokens).ok()?,
            names: hmac::Key::new(hmac::HMAC_SHA256, names),
        })
    }

    /// A token that stands for `login` at `registry` from `now` on.
    pub(crate) fn token(&self, registry: &str, login: &Login, now: SystemTime) -> Option<String> {
        let sealed = Sealed { login: login.clone(), until: seconds(now + LIFETIME) };
        let mut content = serde_json::to_vec(&sealed).ok()?;
        let aad = Aad::from(registry.as_bytes());
        let nonce = self.tokens.seal_in_place_append_tag(aad, &mut content).ok()?;
        let mut token = nonce.as_ref().to_vec();
        token.extend(content);
        Some(URL_SAFE_NO_PAD.encode(token))
    }

    /// The login that a token stands for at `registry`.
    pub(crate) fn login(&self, registry: &str, token: &str, now: SystemTime) -> Option<Login> {
        if token.len() > TOKEN_LIMIT {
            return None;
        }
        let mut token = URL_SAFE_NO_PAD.decode(token).ok()?;
        let (nonce, content) = token.split_at_mut_checked(NONCE_LEN)?;
        let nonce = Nonce::try_assume_unique_for_key(nonce).ok()?;
        let aad = Aad::from(registry.as_bytes());
        let content = self.tokens.open_in_place(nonce, aad, content).ok()?;
        let sealed: Sealed = serde_json::from_slice(content).ok()?;
        (seconds(now) < sealed.until).then_some(sealed.login)
    }

    /// A name for several parts together that does not reveal them.
    pub(crate) fn name(&self, parts: &[&[u8]]) -> String {
        let mut context = hmac::Context::with_key(&self.names);
        for part in parts {
            context.update(&(part.len() as u64).to_le_bytes());
            context.update(part);
        }
        let tag = context.sign();
        tag.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seal(byte: u8) -> Seal {
        Seal::new(&[byte; SECRET]).unwrap()
    }

    #[test]
    fn a_token_is_good_for_its_registry_until_it_ends() {
        let (login, now) = (Login::new("ann", "secret"), SystemTime::now());
        let token = seal(1).token("r.example", &login, now).unwrap();
        assert_eq!(seal(1).login("r.example", &token, now), Some(login));
        let end = now + LIFETIME;
        for (seal, registry, token, when) in [
            (seal(1), "r.example", token.clone(), end),
            (seal(1), "other.example", token.clone(), now),
            (seal(2), "r.example", token.clone(), now),
            (seal(1), "r.example", token[1..].to_owned(), now),
            (seal(1), "r.example", String::new(), now),
            (seal(1), "r.example", "A".repeat(TOKEN_LIMIT + 4), now),
        ] {
            assert_eq!(seal.login(registry, &token, when), None, "{registry} {}", token.len());
        }
    }

    #[test]
    fn a_token_does_not_show_the_password() {
        let token = seal(1).token("r.example", &Login::new("ann", "secret"), SystemTime::now());
        let bytes = URL_SAFE_NO_PAD.decode(token.unwrap()).unwrap();
        assert!(!bytes.windows(6).any(|part| part == b"secret"));
    }

    #[test]
    fn names_depend_on_every_part_and_the_secret() {
        let name = seal(1).name(&[b"ab", b"c"]);
        assert_eq!(name.len(), 64);
        assert_eq!(name, seal(1).name(&[b"ab", b"c"]));
        assert_ne!(name, seal(1).name(&[b"a", b"bc"]));
        assert_ne!(name, seal(2).name(&[b"ab", b"c"]));
    }
}
