//! Digests: parsed once at the edge, never carried around as strings.

use std::{fmt, str::FromStr};

use aws_lc_rs::digest::{Context, SHA256};
use serde::{Deserialize, Serialize};

/// A digest algorithm with 32 bytes of output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Algorithm {
    /// BLAKE3 with its default 32-byte output; the default for chunks.
    Blake3,
    /// SHA-256, used by OCI for blobs and manifests.
    Sha256,
}

impl Algorithm {
    /// The name used in `algorithm:hex`.
    pub const fn name(self) -> &'static str {
        match self {
            Algorithm::Blake3 => "blake3",
            Algorithm::Sha256 => "sha256",
        }
    }

    /// Computes the digest of `data`.
    pub fn digest(self, data: &[u8]) -> Digest {
        let mut hasher = self.hasher();
        hasher.update(data);
        hasher.finish()
    }

    /// Starts an incremental computation.
    pub fn hasher(self) -> Hasher {
        match self {
            Algorithm::Blake3 => Hasher(HasherState::Blake3(Box::default())),
            Algorithm::Sha256 => Hasher(HasherState::Sha256(Context::new(&SHA256))),
        }
    }
}

/// An algorithm and its 32 bytes of output.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest {
    /// The algorithm that computed [`Digest::hash`].
    pub algorithm: Algorithm,
    /// The output.
    pub hash: [u8; 32],
}

impl Digest {
    /// Wraps 32 bytes of SHA-256 output.
    pub const fn sha256(hash: [u8; 32]) -> Self {
        Digest { algorithm: Algorithm::Sha256, hash }
    }

    /// Wraps 32 bytes of BLAKE3 output.
    pub const fn blake3(hash: [u8; 32]) -> Self {
        Digest { algorithm: Algorithm::Blake3, hash }
    }

    /// The 64 lower-case hex digits without the algorithm.
    pub fn hex(&self) -> String {
        use fmt::Write as _;
        self.hash.iter().fold(String::with_capacity(64), |mut hex, byte| {
            let _ = write!(hex, "{byte:02x}");
            hex
        })
    }

    /// Parses 64 lower-case hex digits.
    pub fn from_hex(algorithm: Algorithm, hex: &str) -> Option<Self> {
        let digits = hex.as_bytes();
        let lower = |b: &u8| b.is_ascii_digit() || (b'a'..=b'f').contains(b);
        if digits.len() != 64 || !digits.iter().all(lower) {
            return None;
        }
        let mut hash = [0; 32];
        for (byte, pair) in hash.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
        }
        Some(Digest { algorithm, hash })
    }

    /// Returns whether `data` has this digest.
    pub fn matches(&self, data: &[u8]) -> bool {
        self.algorithm.digest(data) == *self
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.algorithm.name(), self.hex())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A string that is not `sha256:` or `blake3:` followed by 64 lower-case hex digits.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a digest: expected sha256: or blake3: followed by 64 lower-case hex digits")]
pub struct InvalidDigest(pub String);

impl FromStr for Digest {
    type Err = InvalidDigest;

    fn from_str(text: &str) -> Result<Self, InvalidDigest> {
        let parsed = text.split_once(':').and_then(|(name, hex)| {
            let known = [Algorithm::Blake3, Algorithm::Sha256];
            let algorithm = known.into_iter().find(|a| a.name() == name)?;
            Digest::from_hex(algorithm, hex)
        });
        parsed.ok_or_else(|| InvalidDigest(text.chars().take(100).collect()))
    }
}

impl Serialize for Digest {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// An incremental digest computation, see [`Algorithm::hasher`].
#[derive(Clone)]
pub struct Hasher(HasherState);

#[derive(Clone)]
enum HasherState {
    Blake3(Box<blake3::Hasher>),
    Sha256(Context),
}

impl fmt::Debug for Hasher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hasher").finish_non_exhaustive()
    }
}

impl Hasher {
    /// Feeds more bytes.
    pub fn update(&mut self, data: &[u8]) {
        match &mut self.0 {
            HasherState::Blake3(hasher) => {
                hasher.update(data);
            }
            HasherState::Sha256(hasher) => hasher.update(data),
        }
    }

    /// The digest of everything fed so far.
    pub fn finish(self) -> Digest {
        match self.0 {
            HasherState::Blake3(hasher) => Digest::blake3(*hasher.finalize().as_bytes()),
            HasherState::Sha256(hasher) => {
                let mut hash = [0; 32];
                hash.copy_from_slice(hasher.finish().as_ref());
                Digest::sha256(hash)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_of_nothing_are_the_published_ones() {
        let empty = Algorithm::Sha256.digest(b"");
        assert_eq!(
            empty.to_string(),
            "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
        );
        let empty = Algorithm::Blake3.digest(b"");
        assert_eq!(
            empty.to_string(),
            "blake3:af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
        );
        assert_eq!(empty.to_string().parse(), Ok(empty));
    }

    #[test]
    fn other_text_is_no_digest() {
        for text in ["", "sha256", "sha256:", "md5:00", &format!("sha256:{}", "A".repeat(64))] {
            assert!(text.parse::<Digest>().is_err(), "{text}");
        }
        assert!(format!("sha256:{}", "é".repeat(32)).parse::<Digest>().is_err());
    }
}
