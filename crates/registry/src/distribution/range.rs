//! Ranged reads of blobs, on which containers wait.
//!
//! Many registries answer a read of a blob with a redirect to signed storage. The target is
//! remembered for each blob, so that only its first range pays for the detour, and forgotten when
//! the storage refuses it, because signatures expire.

use std::{
    collections::HashMap,
    ops::Range,
    sync::{Arc, Mutex},
};

use bytes::{Bytes, BytesMut};
use lazuli_image::{Digest, Stored};
use reqwest::{
    Method, Response, StatusCode, Url,
    header::{CONTENT_RANGE, HeaderMap, HeaderName, HeaderValue, RANGE},
};

use crate::{
    blob::Progress,
    error::RegistryError,
    transport::{
        CONNECTIONS,
        client::{Call, Client},
        health::Health,
        response::read_bounded,
    },
};

/// Limit on memory reserved ahead of arriving bytes, in bytes: the caller's range may be wrong,
/// while bytes that arrive cost the sender as much.
const RESERVE_LIMIT: u64 = 4 << 20;

/// Targets of redirects, by blob digest. Kept as long as the image is open.
#[derive(Debug, Default)]
pub(crate) struct Locations(Mutex<HashMap<Digest, Url>>);

impl Locations {
    fn get(&self, digest: &Digest) -> Option<Url> {
        self.lock().get(digest).cloned()
    }

    fn set(&self, digest: &Digest, url: Option<Url>) {
        match url {
            Some(url) => self.lock().insert(*digest, url),
            None => self.lock().remove(digest),
        };
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<Digest, Url>> {
        // No panic can leave the map half changed.
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// Splits `range` into `count` parts of nearly equal size, to be requested at the same time: at
/// least one, at most [`CONNECTIONS`], and not more than it has bytes. A nearby server, or none,
/// gets one part: there is nothing to gain.
pub fn parts(
    range: &Range<Stored>,
    count: u64,
    server: Option<&Health>,
) -> impl Iterator<Item = Range<Stored>> + use<> {
    let (start, bytes) = (range.start.0, range.end.0.saturating_sub(range.start.0));
    let most = if server.is_some_and(|server| !server.is_near()) { CONNECTIONS } else { 1 };
    let count = count.min(bytes).clamp(1, most);
    let border = move |number: u64| {
        Stored(start + (u128::from(bytes) * u128::from(number) / u128::from(count)) as u64)
    };
    (0..count).map(move |number| border(number)..border(number + 1))
}

/// Reads exactly `range` of the blob `digest`.
pub(crate) async fn read(
    client: &Client,
    locations: &Locations,
    digest: &Digest,
    range: Range<Stored>,
    arrived: Progress<'_>,
) -> Result<Bytes, RegistryError> {
    let (start, end) = (range.start.0, range.end.0);
    let object = format!("bytes {start}..{end} of blob {digest}");
    if start >= end {
        let problem = "the range is inverted";
        let empty = || Ok(Bytes::new());
        return if start == end {
            empty()
        } else {
            Err(RegistryError::malformed(&client.place, &object, problem))
        };
    }
    let mut headers = HeaderMap::new();
    if let Ok(value) = HeaderValue::try_from(format!("bytes={start}-{}", end - 1)) {
        headers.insert(RANGE, value);
    }
    let scope = client.scope("pull");
    let mut call = Call {
        method: Method::GET,
        url: client.url("")?,
        scope: &scope,
        headers,
        body: None,
        object: &object,
    };

    if let Some(url) = locations.get(digest) {
        call.url = url;
        let answer = client.follow(call.clone()).await;
        let expired = answer.as_ref().is_ok_and(|(response, _)| has_expired(response.status()));
        if !expired {
            let bytes = match answer {
                Ok((response, _)) => exactly(client, response, start..end, &object, arrived).await,
                Err(error) => Err(error),
            };
            // The registry may redirect elsewhere by now.
            return bytes.inspect_err(|_| locations.set(digest, None));
        }
        tracing::debug!(%digest, "a redirect expired");
        locations.set(digest, None);
    }
    call.url = client.url(&format!("blobs/{digest}"))?;
    let (response, elsewhere) = client.follow(call.clone()).await?;
    if response.status() == StatusCode::PARTIAL_CONTENT {
        locations.set(digest, elsewhere);
    }
    exactly(client, response, start..end, &object, arrived).await
}

/// Returns the size of the blob `digest` in bytes. Reads one byte to learn it: signed storage
/// behind a redirect refuses HEAD.
pub(crate) async fn size(
    client: &Client,
    locations: &Locations,
    digest: &Digest,
) -> Result<u64, RegistryError> {
    let object = format!("blob {digest}");
    let scope = client.scope("pull");
    let url = client.url(&format!("blobs/{digest}"))?;
    let headers = HeaderMap::from_iter([(RANGE, HeaderValue::from_static("bytes=0-0"))]);
    let call =
        Call { method: Method::GET, url, scope: &scope, headers, body: None, object: &object };
    let (response, elsewhere) = client.follow(call).await?;
    match response.status() {
        StatusCode::PARTIAL_CONTENT => {
            locations.set(digest, elsewhere);
            let header = response.headers().get(CONTENT_RANGE).and_then(|v| v.to_str().ok());
            header.and_then(total).ok_or_else(|| {
                let problem = format!("Content-Range is `{}`", header.unwrap_or("absent"));
                RegistryError::malformed(&client.place, &object, problem)
            })
        }
        // An empty blob has no first byte, and some servers don't support ranges.
        StatusCode::RANGE_NOT_SATISFIABLE => Ok(0),
        StatusCode::OK => response.content_length().ok_or_else(|| {
            RegistryError::malformed(&client.place, &object, "its answer has no Content-Length")
        }),
        _ => Err(client.refuse(response, &object).await),
    }
}

/// Begins to have all of the blob `digest` fetched by a server that does so for several nodes.
pub(crate) fn expect_whole(client: Arc<Client>, digest: Digest) {
    let object = format!("blob {digest}");
    let ask = async move {
        let scope = client.scope("pull");
        let headers = HeaderMap::from_iter([
            (RANGE, HeaderValue::from_static("bytes=0-0")),
            (HeaderName::from_static("x-dragonfly-prefetch"), HeaderValue::from_static("true")),
        ]);
        let (url, object) = (client.url(&format!("blobs/{digest}"))?, object.as_str());
        let call = Call { method: Method::GET, url, scope: &scope, headers, body: None, object };
        let response = client.send(&call).await?;
        read_bounded(response, RESERVE_LIMIT, &client.place, object).await
    };
    // Errors show when the blob is read.
    tokio::spawn(async move {
        if let Err(error) = ask.await {
            tracing::debug!(%error, "a blob is not fetched for other nodes");
        }
    });
}

/// Returns whether storage refused an old location. Expired signatures give 401, 403 or 410, and
/// 400 at one of the big providers; moved blobs give 404. The registry knows the new location in
/// each case.
fn has_expired(status: StatusCode) -> bool {
    matches!(status.as_u16(), 400 | 401 | 403 | 404 | 410)
}

/// Reads the body of `response` if it is exactly the requested range.
async fn exactly(
    client: &Client,
    mut response: Response,
    range: Range<u64>,
    object: &str,
    arrived: Progress<'_>,
) -> Result<Bytes, RegistryError> {
    let place = || response.url().host_str().unwrap_or(&client.place).to_owned();
    match response.status() {
        StatusCode::PARTIAL_CONTENT => {}
        // The connection is given up with the answer: reading a whole blob to keep it would be
        // worse.
        StatusCode::OK => {
            return Err(RegistryError::RangeUnsupported {
                place: place(),
                object: object.to_owned(),
            });
        }
        _ => return Err(client.refuse(response, object).await),
    }
    let header = response.headers().get(CONTENT_RANGE).and_then(|value| value.to_str().ok());
    if header.and_then(content_range) != Some(range.clone()) {
        let problem = format!("Content-Range is `{}`", header.unwrap_or("absent"));
        return Err(RegistryError::malformed(&client.place, object, problem));
    }
    let expected = range.end - range.start;
    let size = |got: u64| RegistryError::WrongSize {
        place: client.place.clone(),
        object: object.to_owned(),
        expected,
        got,
    };
    if let Some(length) = response.content_length()
        && length != expected
    {
        return Err(size(length));
    }
    let mut body = BytesMut::with_capacity(expected.min(RESERVE_LIMIT) as usize);
    loop {
        match client.chunk(&mut response, object).await? {
            Some(piece) if (body.len() + piece.len()) as u64 > expected => {
                return Err(size(expected + 1));
            }
            Some(piece) => {
                body.extend_from_slice(&piece);
                arrived(piece.len() as u64);
            }
            None if body.len() as u64 == expected => return Ok(body.freeze()),
            None => return Err(size(body.len() as u64)),
        }
    }
}

/// Parses `bytes 5-9/20` to `5..10`; the total may be `*`.
fn content_range(text: &str) -> Option<Range<u64>> {
    let (range, total) = text.strip_prefix("bytes ")?.split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let (start, end): (u64, u64) = (first.parse().ok()?, last.parse::<u64>().ok()?.checked_add(1)?);
    let fits = total == "*" || total.parse::<u64>().is_ok_and(|total| end <= total);
    (start < end && fits).then_some(start..end)
}

/// Parses `bytes 0-0/20` to 20.
fn total(text: &str) -> Option<u64> {
    content_range(text)?;
    text.rsplit_once('/')?.1.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_about_equal_size_cover_the_range() {
        for (range, count, parts) in [
            (0..0, 5, 1),
            (3..10, 0, 1),
            (3..10, 7, 7),
            (0..300_001, 8, 8),
            (5..1 << 60, 1000, CONNECTIONS),
        ] {
            let range = Stored(range.start)..Stored(range.end);
            let far = Health::new("far");
            let all: Vec<_> = super::parts(&range, count, Some(&far)).collect();
            assert_eq!(all.len() as u64, parts, "{range:?}");
            assert_eq!((all[0].start, all[all.len() - 1].end), (range.start, range.end));
            assert!(all.windows(2).all(|pair| pair[0].end == pair[1].start), "{all:?}");
            let sizes = || all.iter().map(|part| part.end.0 - part.start.0);
            assert!(sizes().max().unwrap() - sizes().min().unwrap() <= 1, "{all:?}");
        }
    }

    #[test]
    fn a_content_range_gives_its_range_or_is_refused() {
        let cases = [
            ("bytes 5-9/20", Some(5..10)),
            ("bytes 0-0/1", Some(0..1)),
            ("bytes 5-9/*", Some(5..10)),
            ("bytes 5-9/9", None),
            ("bytes 9-5/20", None),
            ("bytes */20", None),
            ("bytes 0-18446744073709551615/*", None),
            ("5-9/20", None),
            ("", None),
        ];
        for (text, expected) in cases {
            assert_eq!(content_range(text), expected, "{text}");
        }
    }

    #[test]
    fn the_size_of_a_blob_is_in_its_content_range() {
        for (text, expected) in [
            ("bytes 0-0/20", Some(20)),
            ("bytes 0-0/*", None),
            ("bytes 1-0/20", None),
            ("bytes 0-0/-1", None),
        ] {
            assert_eq!(total(text), expected, "{text}");
        }
    }
}
