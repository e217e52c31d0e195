//! Reads responses within bounds.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use reqwest::{
    Response, Url,
    header::{LOCATION, RETRY_AFTER},
};
use serde::Deserialize;

use crate::error::RegistryError;

/// How much of an error's body is read, in bytes, and how much of it is shown.
pub(crate) const DETAIL_LIMIT: u64 = 16 << 10;
const DETAIL_SHOWN: usize = 300;

/// Returns whether a request may have hit a connection that the server was just closing. Some
/// servers close theirs after an error without announcing it, such as docker-registry 2.8 after
/// each 416. Requests that change nothing are then sent again, once, as every client with a
/// connection pool must.
pub(crate) fn stale(error: &reqwest::Error) -> bool {
    error.is_request() && !error.is_connect() && !error.is_timeout()
}

/// Returns the answer's redirect target, resolved against the URL that it came from.
pub(crate) fn location(response: &Response) -> Option<Url> {
    let text = response.headers().get(LOCATION)?.to_str().ok()?;
    response.url().join(text).ok()
}

/// The header in seconds; the form with a date is not used by registries.
pub(crate) fn retry_after(response: &Response) -> Option<Duration> {
    let seconds: u64 = response.headers().get(RETRY_AFTER)?.to_str().ok()?.parse().ok()?;
    Some(Duration::from_secs(seconds.min(3600)))
}

/// Reads a body into memory, but never more than `limit` bytes.
pub(crate) async fn read_bounded(
    mut response: Response,
    limit: u64,
    place: &str,
    object: &str,
) -> Result<Bytes, RegistryError> {
    let too_large =
        || RegistryError::TooLarge { place: place.into(), object: object.into(), limit };
    if response.content_length().is_some_and(|length| length > limit) {
        return Err(too_large());
    }
    let mut body = BytesMut::new();
    loop {
        let piece = response.chunk().await;
        match piece.map_err(|error| RegistryError::http(place, object, error))? {
            Some(piece) if (body.len() + piece.len()) as u64 > limit => return Err(too_large()),
            Some(piece) => body.extend_from_slice(&piece),
            None => return Ok(body.freeze()),
        }
    }
}

/// The message in an error's body, in one short line.
pub(crate) async fn detail(response: Response) -> String {
    #[derive(Deserialize)]
    struct Envelope {
        errors: Vec<Problem>,
    }
    #[derive(Deserialize)]
    struct Problem {
        #[serde(default)]
        code: String,
        #[serde(default)]
        message: String,
    }
    let status = response.status();
    let body = read_bounded(response, DETAIL_LIMIT, "", "").await.unwrap_or_default();
    let text = match serde_json::from_slice::<Envelope>(&body) {
        Ok(envelope) => {
            let line = |p: &Problem| format!("{} {}", p.code, p.message).trim().to_owned();
            envelope.errors.iter().map(line).collect::<Vec<_>>().join("; ")
        }
        Err(_) => String::new(),
    };
    if text.is_empty() {
        return status.canonical_reason().unwrap_or("no reason given").to_lowercase();
    }
    text.chars().filter(|c| !c.is_control()).take(DETAIL_SHOWN).collect()
}
