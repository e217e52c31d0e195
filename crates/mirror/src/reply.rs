//! Answers as a registry spells them.

use std::{io, time::Duration};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Empty, Full, combinators::UnsyncBoxBody};
use hyper::{
    Response, StatusCode,
    header::{
        ACCEPT_RANGES, CONTENT_LENGTH, CONTENT_TYPE, ETAG, HeaderName, HeaderValue, RETRY_AFTER,
    },
};
use lazuli_image::Digest;
use lazuli_registry::RegistryError;

/// The body of an answer.
pub(crate) type Body = UnsyncBoxBody<Bytes, io::Error>;

/// An answer.
pub(crate) type Reply = Response<Body>;

/// Why a request fails.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Problem {
    /// The registry does not let this client see it.
    Denied(String),
    /// The registry does not have it.
    Missing(String),
    /// The registry asks clients to pause, perhaps for this long.
    Busy(Option<Duration>),
    /// The registry cannot be reached, or is too slow.
    Away(String),
    /// Wrong bytes came from the registry.
    Wrong(String),
}

impl Problem {
    /// Translates an error of the registry or its mirrors for the client.
    pub(crate) fn of(error: &RegistryError) -> Self {
        match error {
            // The registry itself is asked last.
            RegistryError::Everywhere { failures } => match failures.last() {
                Some(last) => Self::of(last),
                None => Problem::Away(error.to_string()),
            },
            RegistryError::Denied { .. } | RegistryError::Withheld { .. } => {
                Problem::Denied(error.to_string())
            }
            RegistryError::Missing { .. } => Problem::Missing(error.to_string()),
            RegistryError::Status { status: 429, retry_after, .. } => Problem::Busy(*retry_after),
            RegistryError::WrongDigest { .. }
            | RegistryError::Malformed { .. }
            | RegistryError::TooLarge { .. }
            | RegistryError::WrongSize { .. } => Problem::Wrong(error.to_string()),
            _ => Problem::Away(error.to_string()),
        }
    }

    /// The reply to the client; `what` is `MANIFEST` or `BLOB`. After each of them, containerd asks
    /// the registry itself.
    pub(crate) fn reply(&self, what: &str) -> Reply {
        match self {
            Problem::Denied(text) => error(StatusCode::FORBIDDEN, "DENIED", text),
            Problem::Missing(text) => {
                error(StatusCode::NOT_FOUND, &format!("{what}_UNKNOWN"), text)
            }
            Problem::Busy(pause) => {
                let text = "the registry limits the rate of requests";
                let mut reply = error(StatusCode::TOO_MANY_REQUESTS, "TOOMANYREQUESTS", text);
                if let Some(pause) = pause {
                    let seconds = pause.as_secs_f64().ceil() as u64;
                    reply.headers_mut().insert(RETRY_AFTER, seconds.into());
                }
                reply
            }
            Problem::Away(text) => error(StatusCode::SERVICE_UNAVAILABLE, "UNAVAILABLE", text),
            Problem::Wrong(text) => error(StatusCode::BAD_GATEWAY, "DIGEST_INVALID", text),
        }
    }
}

/// An error, with the message that people read in containerd's log.
pub(crate) fn error(status: StatusCode, code: &str, message: &str) -> Reply {
    let errors = serde_json::json!({"errors": [{"code": code, "message": message}]});
    let mut reply = whole(status, Bytes::from(errors.to_string()));
    reply.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    reply
}

/// An answer with this content.
pub(crate) fn whole(status: StatusCode, content: Bytes) -> Reply {
    let length = content.len() as u64;
    with_body(status, length, Full::new(content).map_err(|never| match never {}).boxed_unsync())
}

/// A reply with a body of `length` bytes.
pub(crate) fn with_body(status: StatusCode, length: u64, body: Body) -> Reply {
    let mut reply = Response::new(body);
    *reply.status_mut() = status;
    reply.headers_mut().insert(CONTENT_LENGTH, length.into());
    reply
}

/// The same answer to HEAD: its head.
pub(crate) fn head_of(mut reply: Reply) -> Reply {
    *reply.body_mut() = empty();
    reply
}

/// An answer without a body: the client has it.
pub(crate) fn not_modified() -> Reply {
    let mut reply = Response::new(empty());
    *reply.status_mut() = StatusCode::NOT_MODIFIED;
    reply
}

fn empty() -> Body {
    Empty::new().map_err(|never| match never {}).boxed_unsync()
}

/// Names the content of an answer.
pub(crate) fn describe(reply: &mut Reply, digest: &Digest, media_type: &str) {
    let headers = reply.headers_mut();
    let mut insert = |name: HeaderName, value: String| {
        // Digests and media types that were parsed are legal in headers; others are left out.
        if let Ok(value) = HeaderValue::try_from(value) {
            headers.insert(name, value);
        }
    };
    insert(HeaderName::from_static("docker-content-digest"), digest.to_string());
    insert(ETAG, etag(digest));
    insert(CONTENT_TYPE, media_type.to_owned());
}

/// Announces support of range requests.
pub(crate) fn accept_ranges(reply: &mut Reply) {
    reply.headers_mut().insert(ACCEPT_RANGES, HeaderValue::from_static("bytes"));
}

/// The entity tag of a blob or manifest.
pub(crate) fn etag(digest: &Digest) -> String {
    format!("\"{digest}\"")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(status: u16, retry_after: Option<Duration>) -> RegistryError {
        let (place, object, detail) = Default::default();
        RegistryError::Status { place, object, status, detail, retry_after }
    }

    #[test]
    fn the_registrys_failure_counts_over_its_mirrors() {
        let (place, object) = ("r.example/a".to_owned(), "manifest 1".to_owned());
        let missing = RegistryError::Missing { place, object };
        let failures = vec![status(503, None), missing];
        let problem = Problem::of(&RegistryError::Everywhere { failures });
        assert!(matches!(problem, Problem::Missing(_)), "{problem:?}");
        assert!(matches!(Problem::of(&status(502, None)), Problem::Away(_)));
    }

    #[test]
    fn a_pause_that_the_registry_wants_is_passed_on() {
        let pause = Some(Duration::from_secs(7));
        let reply = Problem::of(&status(429, pause)).reply("MANIFEST");
        assert_eq!(reply.status(), 429);
        assert_eq!(reply.headers()[RETRY_AFTER], "7");
    }
}
