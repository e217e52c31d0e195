//! Operating system and processor of an image.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// An operating system and a processor, spelled `os/architecture[/variant]` in Go's words.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Platform {
    /// `linux`.
    pub os: String,
    /// `amd64`, `arm64`, …
    pub architecture: String,
    /// `v7`, `v8`, …; absent for most processors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub variant: Option<String>,
    /// Features that an image requires, or that a client supports: [`Platform::LAZY`].
    #[serde(default, rename = "os.features", skip_serializing_if = "Vec::is_empty")]
    pub features: Vec<String>,
}

impl Platform {
    /// The feature that lazy images require, in the word of upstream's converter. An index may have
    /// an ordinary and a lazy image for one platform; clients that don't know the feature take the
    /// ordinary one.
    pub const LAZY: &str = "nydus.remoteimage.v1";

    /// The same for a client that cannot use lazy images.
    #[must_use]
    pub fn ordinary(mut self) -> Self {
        self.features.retain(|feature| feature != Self::LAZY);
        self
    }

    /// The same for a client that can use lazy images.
    #[must_use]
    pub fn lazy(self) -> Self {
        let mut lazy = self.ordinary();
        lazy.features.push(Self::LAZY.to_owned());
        lazy
    }

    /// Linux on the processor that this program was built for.
    pub fn host() -> Self {
        let (architecture, variant) = match std::env::consts::ARCH {
            "x86_64" => ("amd64", None),
            "aarch64" => ("arm64", None),
            "x86" => ("386", None),
            "arm" => ("arm", Some("v7".to_owned())),
            "powerpc64" => ("ppc64le", None),
            "loongarch64" => ("loong64", None),
            other => (other, None),
        };
        Platform {
            os: "linux".into(),
            architecture: architecture.into(),
            variant,
            features: Vec::new(),
        }
    }

    /// Returns whether an image for `self` suits a client that asks for `wanted`. A variant matters
    /// only if `wanted` has one, and `arm64` equals `arm64/v8`; the client must support every
    /// feature that the image requires.
    pub fn satisfies(&self, wanted: &Platform) -> bool {
        self.os == wanted.os
            && self.architecture == wanted.architecture
            && (wanted.variant.is_none() || self.variant() == wanted.variant())
            && self.features.iter().all(|feature| wanted.features.contains(feature))
    }

    fn variant(&self) -> Option<&str> {
        match (self.architecture.as_str(), self.variant.as_deref()) {
            ("arm64", None) => Some("v8"),
            (_, variant) => variant,
        }
    }
}

impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.os, self.architecture)?;
        self.variant.as_ref().map_or(Ok(()), |variant| write!(f, "/{variant}"))
    }
}

/// Text that is not a platform.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a platform: expected os/architecture[/variant], as in linux/arm64/v8")]
pub struct InvalidPlatform(pub String);

impl FromStr for Platform {
    type Err = InvalidPlatform;

    fn from_str(text: &str) -> Result<Self, InvalidPlatform> {
        let mut parts = text.split('/').map(str::to_owned);
        let allowed = |part: &str| {
            let character = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
            !part.is_empty() && part.bytes().all(character)
        };
        match (parts.next(), parts.next(), parts.next(), parts.next()) {
            (Some(os), Some(architecture), variant, None)
                if allowed(&os)
                    && allowed(&architecture)
                    && variant.as_deref().is_none_or(allowed) =>
            {
                Ok(Platform { os, architecture, variant, features: Vec::new() })
            }
            _ => Err(InvalidPlatform(text.chars().take(100).collect())),
        }
    }
}
