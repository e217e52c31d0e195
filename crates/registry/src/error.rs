//! Errors of pushes and pulls.

use std::{
    error::Error as _,
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use lazuli_image::{Digest, oci::Platform};
use lazuli_sys::path_error::PathError;

use crate::name::InvalidName;

/// A failed request to an image's place.
///
/// `place` is the repository or layout directory as the user would spell it, `object` what was
/// asked for there. No variant ever holds a credential or a signed URL.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    /// The name of the image cannot be parsed.
    #[error(transparent)]
    Name(#[from] InvalidName),
    /// containerd's configuration of the registry is invalid.
    #[error(transparent)]
    Hosts(#[from] HostsError),
    /// No server has the capability.
    #[error(
        "{image}: no host may {capability}; one of those in the registry's hosts.toml needs \"{capability}\" in its capabilities"
    )]
    NoHost {
        /// The image.
        image: String,
        /// `pull`, `resolve` or `push`.
        capability: &'static str,
    },
    /// The place answered that it does not have the object.
    #[error("{place} has no {object}; check the name, and whether it was pushed")]
    Missing {
        /// The place that was asked.
        place: String,
        /// The requested object.
        object: String,
    },
    /// The credentials (or their absence) were refused.
    #[error("{place} refuses access to {object}: {detail}; try `docker login {host}`")]
    Denied {
        /// The place that refused access.
        place: String,
        /// The requested object.
        object: String,
        /// The registry as `docker login` spells it.
        host: String,
        /// The server's message.
        detail: String,
    },
    /// The peer-to-peer daemon must not see the credentials that the request needs.
    #[error(
        "{place} is not asked for {object}: `credentials = true` in [p2p] lets it see the login that the registry wants"
    )]
    Withheld {
        /// The daemon.
        place: String,
        /// The requested object.
        object: String,
    },
    /// A credential file or helper is configured but does not work.
    #[error("credentials for {host}: {problem}")]
    Credentials {
        /// The registry the credentials are for.
        host: String,
        /// The file or helper, and the problem.
        problem: String,
    },
    /// A status that no other variant covers.
    #[error("{place} answered {status} to the request for {object}: {detail}")]
    Status {
        /// The server.
        place: String,
        /// The requested object.
        object: String,
        /// The HTTP status.
        status: u16,
        /// The server's message, shortened.
        detail: String,
        /// How long the server asks to wait, bounded to one hour.
        retry_after: Option<Duration>,
    },
    /// The peer-to-peer daemon passes on an error status of the registry.
    #[error("{place} was answered {status} by the registry when it fetched {object}: {detail}")]
    Upstream {
        /// The daemon.
        place: String,
        /// The requested object.
        object: String,
        /// The HTTP status of the registry's answer.
        status: u16,
        /// The registry's message, shortened.
        detail: String,
    },
    /// No connection could be made.
    #[error("cannot reach {host} for {object}: {cause}; is the registry up?")]
    Unreachable {
        /// Host and port that did not answer.
        host: String,
        /// The requested object.
        object: String,
        /// The operating system's or TLS library's reason.
        cause: String,
    },
    /// The server's certificate is not trusted, or it refuses ours.
    #[error(
        "no TLS with {host} for {object}: {cause}; the authority of a private registry is named by `ca` in its \
         hosts.toml, or is a .crt file beside it"
    )]
    Untrusted {
        /// Host and port.
        host: String,
        /// The requested object.
        object: String,
        /// The TLS library's reason.
        cause: String,
    },
    /// The connection broke, or nothing arrived for the idle time-out, during a transfer.
    #[error("the transfer of {object} from {place} broke off: {cause}")]
    Interrupted {
        /// The other end.
        place: String,
        /// The object in transfer.
        object: String,
        /// The reason.
        cause: String,
    },
    /// The server sends whole blobs where a range was asked for.
    #[error(
        "{place} does not support ranged reads: it answered 200 instead of 206 for {object}; \
         lazy mounts need a registry or proxy that honours the Range header"
    )]
    RangeUnsupported {
        /// The registry, or the storage host that it redirected to.
        place: String,
        /// Blob and range.
        object: String,
    },
    /// The answer has another length than the object.
    #[error("{object} from {place} has {got} bytes, expected {expected}")]
    WrongSize {
        /// The place that it came from.
        place: String,
        /// The object read.
        object: String,
        /// Bytes that were expected.
        expected: u64,
        /// Bytes that arrived; reading stops at one more than expected.
        got: u64,
    },
    /// The content's digest is not the requested one.
    #[error("{object} from {place} has digest {got}, expected {expected}; it is corrupt")]
    WrongDigest {
        /// The place that it came from.
        place: String,
        /// The object read.
        object: String,
        /// The digest that was asked for.
        expected: Digest,
        /// The digest of the received content.
        got: Digest,
    },
    /// An object that is read into memory is bigger than its bound.
    #[error("{object} from {place} is bigger than the {limit} bytes allowed for it")]
    TooLarge {
        /// The place that it came from.
        place: String,
        /// The object read.
        object: String,
        /// The bound in bytes.
        limit: u64,
    },
    /// The object breaks its format or the protocol.
    #[error("{object} from {place} is malformed: {problem}")]
    Malformed {
        /// The place that it came from.
        place: String,
        /// The object read.
        object: String,
        /// The value found, and the one expected.
        problem: String,
    },
    /// The image exists, but not for this platform.
    #[error("{place} has no image for {wanted}; it has {}", list(available))]
    NoPlatform {
        /// The image.
        place: String,
        /// The platform that was asked for.
        wanted: Platform,
        /// The platforms that exist.
        available: Vec<Platform>,
    },
    /// A layout directory without tag holds several images.
    #[error("{place} holds {}; name one, as in oci:DIR:TAG", several(tags))]
    Ambiguous {
        /// The layout.
        place: String,
        /// The tags that exist.
        tags: Vec<String>,
    },
    /// Only registries have a place for it.
    #[error("{place} is a directory: a {object} can only be pushed to a registry")]
    NotInLayouts {
        /// The layout.
        place: String,
        /// The object to push.
        object: String,
    },
    /// Neither the mirrors nor the registry itself delivered.
    #[error("{}", list_failures(failures))]
    Everywhere {
        /// The failure of each server, in the order in which they are asked.
        failures: Vec<RegistryError>,
    },
    /// A local file could not be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        source: io::Error,
    },
}

fn list_failures(failures: &[RegistryError]) -> String {
    failures.iter().map(RegistryError::to_string).collect::<Vec<_>>().join("; ")
}

fn several(tags: &[String]) -> String {
    match tags {
        [] => "no image".to_owned(),
        tags => format!("several images ({})", tags.join(", ")),
    }
}

fn list(platforms: &[Platform]) -> String {
    if platforms.is_empty() {
        return "none that is described".to_owned();
    }
    platforms.iter().map(Platform::to_string).collect::<Vec<_>>().join(", ")
}

impl RegistryError {
    /// Returns whether every server that was asked reported the object missing.
    pub fn is_missing(&self) -> bool {
        match self {
            RegistryError::Missing { .. } => true,
            RegistryError::Everywhere { failures } => failures.iter().all(Self::is_missing),
            _ => false,
        }
    }

    /// Returns whether the same request may succeed a little later.
    pub fn is_transient(&self) -> bool {
        match self {
            RegistryError::Unreachable { .. }
            | RegistryError::Untrusted { .. }
            // The operator may be at it, and files are read again.
            | RegistryError::Hosts(_)
            | RegistryError::Interrupted { .. }
            | RegistryError::WrongSize { .. } => true,
            // 501 and 505 are permanent; all other 5xx are transient.
            RegistryError::Status { status, .. } => {
                matches!(status, 408 | 425 | 429)
                    || (*status >= 500 && !matches!(status, 501 | 505))
            }
            RegistryError::Everywhere { failures } => {
                failures.iter().any(RegistryError::is_transient)
            }
            _ => false,
        }
    }

    /// How long the server asked to wait before the next attempt.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            RegistryError::Status { retry_after, .. } => *retry_after,
            _ => None,
        }
    }

    pub(crate) fn io(path: impl Into<PathBuf>, source: impl Into<io::Error>) -> Self {
        RegistryError::Io { path: path.into(), source: source.into() }
    }

    pub(crate) fn malformed(place: &str, object: &str, problem: impl Into<String>) -> Self {
        RegistryError::Malformed {
            place: place.to_owned(),
            object: object.to_owned(),
            problem: problem.into(),
        }
    }

    /// Translates an error of the HTTP client. URLs are left out: a redirected one carries a
    /// signature.
    pub(crate) fn http(place: &str, object: &str, error: reqwest::Error) -> Self {
        let host = error
            .url()
            .map(|url| url.authority().rsplit('@').next().unwrap_or_default().to_owned())
            .unwrap_or_else(|| place.to_owned());
        let (connect, timeout) = (error.is_connect(), error.is_timeout());
        let tls = is_about_tls(&error);
        let cause = cause(&error.without_url());
        let object = object.to_owned();
        if tls {
            RegistryError::Untrusted { host, object, cause }
        } else if connect {
            RegistryError::Unreachable { host, object, cause }
        } else {
            let cause = if timeout { "nothing arrived in time".to_owned() } else { cause };
            RegistryError::Interrupted { place: place.to_owned(), object, cause }
        }
    }
}

impl From<PathError> for RegistryError {
    fn from(PathError { path, source }: PathError) -> Self {
        RegistryError::Io { path, source }
    }
}

/// The innermost reason: `connection refused`, `invalid peer certificate: …`.
fn cause(error: &reqwest::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(inner) = next {
        text = inner.to_string();
        next = inner.source();
    }
    text
}

/// Returns whether certificates caused the error. The server checks ours after the handshake, so
/// such an error can come after connecting.
fn is_about_tls(error: &reqwest::Error) -> bool {
    let mut next = error.source();
    while let Some(inner) = next {
        if let Some(
            rustls::Error::InvalidCertificate(_)
            | rustls::Error::AlertReceived(_)
            // The system has no authorities.
            | rustls::Error::General(_),
        ) = inner.downcast_ref()
        {
            return true;
        }
        // An I/O error's source is that of the error it wraps, not the wrapped error itself.
        next = match inner.downcast_ref::<io::Error>().and_then(io::Error::get_ref) {
            Some(wrapped) => Some(wrapped),
            None => inner.source(),
        };
    }
    false
}

/// A file of containerd's registry configuration cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: {problem}", path.display())]
pub struct HostsError {
    /// The file or directory.
    pub path: PathBuf,
    /// The key, the problem, and the expected value.
    pub problem: String,
}

impl HostsError {
    pub(crate) fn new(path: &Path, problem: impl Into<String>) -> Self {
        HostsError { path: path.to_owned(), problem: problem.into() }
    }
}

/// Recovers the error that a [`BlobReader`](crate::BlobReader) wrapped.
pub fn from_reader(error: io::Error, place: &str, object: &str) -> RegistryError {
    error.downcast::<RegistryError>().unwrap_or_else(|error| RegistryError::Interrupted {
        place: place.to_owned(),
        object: object.to_owned(),
        cause: error.to_string(),
    })
}
