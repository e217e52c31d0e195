//! Receives events.

use std::{
    fs::File, io::Read as _, os::unix::fs::MetadataExt as _, path::Path, sync::Arc, time::Duration,
};

use anyhow::{Context as _, Result, bail};
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, LengthLimitError, Limited};
use hyper::{
    Method, Request, Response, StatusCode,
    body::{Body as _, Incoming},
    header::{ALLOW, AUTHORIZATION, HeaderValue},
};
use lazuli_image::{Algorithm, Digest};
use lazuli_metrics::Limits;

use super::{
    Settings, events,
    queue::{Queue, Refused},
};
use crate::path_context::PathContext as _;

/// The time is for a queue on a slow disk; registries wait for some seconds at least.
pub(super) const LIMITS: Limits = Limits { connections: 256, time: Duration::from_secs(30) };

/// Biggest body, in bytes: a registry's event has about one thousand.
const BODY_LIMIT: usize = 1 << 20;

/// Fewer characters can be guessed.
const SHORTEST_SECRET: usize = 16;

/// Most bytes of a secret; HTTP libraries take no longer headers.
const LONGEST_SECRET: u64 = 4096;

/// Most names that one body can bring into the log.
const LOGGED: usize = 10;

/// Reads the secret that registries have to show.
///
/// # Errors
/// There is none, or other users could know it.
pub(super) fn read_secret(path: &Path) -> Result<Secret> {
    let key = "convert.secret_file";
    let mut file = File::open(path).cannot("read", path).context(key)?;
    let found = file.metadata().cannot("read", path)?;
    let shown = path.display();
    if !found.is_file() {
        bail!("{key}: {shown} is not a file");
    }
    // A service's file often belongs to root and the group of the service.
    if found.mode() & 0o027 != 0 {
        let mode = found.mode() & 0o777;
        bail!(
            "{key}: other users can read or change {shown}, whose mode is {mode:04o}, expected at most \
             0640: chmod 0600 {shown}"
        );
    }
    let mut text = String::new();
    file.by_ref().take(LONGEST_SECRET + 1).read_to_string(&mut text).cannot("read", path)?;
    let secret = text.trim_end_matches(['\n', '\r']);
    let is_text = secret.bytes().all(|byte| byte.is_ascii_graphic());
    if secret.len() < SHORTEST_SECRET || text.len() as u64 > LONGEST_SECRET || !is_text {
        bail!(
            "{key}: {shown} has no secret, expected one line of {SHORTEST_SECRET} to {LONGEST_SECRET} \
             printable ASCII characters without spaces, as `openssl rand -hex 32` prints"
        );
    }
    Ok(Secret::of(format!("Bearer {secret}").as_bytes()))
}

/// The digest of an Authorization header. Comparing digests shows nothing about the secret.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Secret(Digest);

impl Secret {
    fn of(header: &[u8]) -> Self {
        Secret(Algorithm::Sha256.digest(header))
    }

    /// Returns whether a request has this header, in the same time for all wrong ones.
    fn is_shown(&self, header: Option<&HeaderValue>) -> bool {
        let shown = Secret::of(header.map(HeaderValue::as_bytes).unwrap_or_default());
        aws_lc_rs::constant_time::verify_slices_are_equal(&shown.0.hash, &self.0.hash).is_ok()
    }
}

/// Puts the events of registries into the queue.
#[derive(Debug)]
pub(super) struct Receiver {
    secret: Secret,
    settings: Arc<Settings>,
    queue: Arc<Queue>,
}

impl Receiver {
    pub(super) fn new(secret: Secret, settings: Arc<Settings>, queue: Arc<Queue>) -> Self {
        Receiver { secret, settings, queue }
    }

    /// Answers a request. Errors are short: registries put them into their logs.
    pub(super) async fn answer(
        self: Arc<Self>,
        request: Request<Incoming>,
    ) -> Response<Full<Bytes>> {
        let is_read = matches!(*request.method(), Method::GET | Method::HEAD);
        if is_read && request.uri().path() == "/healthz" {
            return text(StatusCode::OK, "ok\n");
        }
        if !self.secret.is_shown(request.headers().get(AUTHORIZATION)) {
            tracing::warn!("a client without the secret is refused");
            return text(StatusCode::UNAUTHORIZED, "");
        }
        if request.uri().path() != "/" {
            return text(StatusCode::NOT_FOUND, "events are received at /\n");
        }
        if request.method() != Method::POST {
            let mut answer = text(StatusCode::METHOD_NOT_ALLOWED, "expected POST\n");
            answer.headers_mut().insert(ALLOW, HeaderValue::from_static("POST"));
            return answer;
        }
        let too_large = || text(StatusCode::PAYLOAD_TOO_LARGE, "expected at most 1 MiB\n");
        if request.body().size_hint().lower() > BODY_LIMIT as u64 {
            return too_large();
        }
        let body = match Limited::new(request.into_body(), BODY_LIMIT).collect().await {
            Ok(body) => body.to_bytes(),
            Err(error) if error.is::<LengthLimitError>() => return too_large(),
            Err(_) => return text(StatusCode::BAD_REQUEST, "the body is incomplete\n"),
        };
        // Parsing and writing take time, in which others are answered.
        let receiving = tokio::task::spawn_blocking(move || self.receive(&body));
        let (status, problem) = receiving.await.unwrap_or_else(|error| {
            tracing::error!(%error, "cannot receive events");
            (StatusCode::INTERNAL_SERVER_ERROR, String::new())
        });
        text(status, problem)
    }

    fn receive(&self, body: &[u8]) -> (StatusCode, String) {
        let events = match events::parse(body, &self.settings.registry) {
            Ok(events) => events,
            Err(problem) => {
                tracing::warn!(problem, "not events of a registry");
                return (StatusCode::BAD_REQUEST, format!("{problem}\n"));
            }
        };
        for problem in events.left_out.iter().take(LOGGED) {
            tracing::warn!(problem, "an event is left out");
        }
        let is_ours = |name: &&_| self.settings.has(name);
        let (ours, others): (Vec<_>, Vec<_>) = events.images.iter().partition(is_ours);
        for image in others.iter().take(LOGGED) {
            tracing::info!(%image, "left out: not in convert.repositories");
        }
        for image in ours {
            match self.queue.add(image) {
                Ok(()) => tracing::info!(%image, "received"),
                Err(Refused::Full) => {
                    tracing::error!(%image, "refused: too many jobs");
                    return (StatusCode::SERVICE_UNAVAILABLE, "too many jobs\n".to_owned());
                }
                Err(Refused::Disk(error)) => {
                    tracing::error!(%image, error = format!("{error:#}"), "refused");
                    return (
                        StatusCode::SERVICE_UNAVAILABLE,
                        "the queue cannot be written\n".into(),
                    );
                }
            }
        }
        (StatusCode::ACCEPTED, String::new())
    }
}

fn text(status: StatusCode, body: impl Into<Bytes>) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body.into()));
    *response.status_mut() = status;
    response
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt as _};

    use super::*;

    #[test]
    fn a_secret_is_long_printable_and_for_one_user() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("secret");
        let read = |text: &str, mode: u32| {
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            read_secret(&path).map_err(|error| format!("{error:#}"))
        };
        let secret = read("0123456789abcdef\n", 0o600).unwrap();
        assert_eq!(secret, read("0123456789abcdef", 0o440).unwrap());
        let header = |text: &'static str| Some(HeaderValue::from_static(text));
        assert!(secret.is_shown(header("Bearer 0123456789abcdef").as_ref()));
        for wrong in ["Bearer 0123456789abcdeg", "0123456789abcdef", "bearer 0123456789abcdef", ""]
        {
            assert!(!secret.is_shown(header(wrong).as_ref()), "{wrong}");
        }
        assert!(!secret.is_shown(None));
        let long = "x".repeat(5000);
        for (text, mode, expected) in [
            ("0123456789abcdef\n", 0o644, "chmod 0600"),
            ("0123456789abcdef\n", 0o620, "chmod 0600"),
            ("short\n", 0o600, "one line of 16"),
            ("", 0o600, "one line of 16"),
            ("0123456789abcdef\nmore\n", 0o600, "one line of 16"),
            (&long, 0o600, "one line of 16"),
        ] {
            let error = read(text, mode).unwrap_err();
            assert!(error.contains(expected) && error.contains("convert.secret_file"), "{error}");
        }
        assert!(read_secret(directory.path()).is_err());
        assert!(read_secret(&directory.path().join("none")).is_err());
    }
}
