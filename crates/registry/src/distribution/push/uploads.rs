//! Uploads blobs.
//!
//! ```text
//! HEAD  blobs/D                         there already: done
//! POST  blobs/uploads/?mount=D&from=R   linked from another repository: done
//! PATCH location     bytes k..k+8 MiB   … as often as needed; after a failure, GET location tells
//! PUT   location?digest=D  the rest     how far the registry got
//! ```
//! A blob that is still being made begins with POST, and its digest is first heard of in PUT.

use std::{
    future::pending,
    io::{self, SeekFrom},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use lazuli_image::Digest;
use lazuli_sys::path_error::At as _;
use reqwest::{
    Method, Response, StatusCode, Url,
    header::{CONTENT_RANGE, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, RANGE},
};
use tokio::{
    fs::File,
    io::{AsyncReadExt as _, AsyncSeekExt as _},
    time::sleep,
};

use crate::{
    blob::{BlobReader, Growing, Growth, Progress, Pushed},
    distribution::pull,
    error::{self, RegistryError},
    repository::{BlobContent, Pull},
    transport::{
        client::{Call, Client},
        response::location,
    },
};

/// Bytes of a blob that travel in one request. Registries that keep blobs in S3 refuse pieces under
/// 5 MiB, and each piece of each parallel upload is in memory, so that it can be sent again.
pub(crate) const PIECE: u64 = 8 << 20;

/// Failures in a row, without any progress in between, after which an upload is given up. The waits
/// between them add up to 6 s: a registry that restarts behind a supervisor is back by then.
const FAILURE_LIMIT: u32 = 5;

/// The wait after the first failure; it doubles with each further one.
const FIRST_WAIT: Duration = Duration::from_millis(200);

/// The longest wait that a registry can ask for with Retry-After.
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// The upload of one blob.
#[derive(Debug)]
struct Upload<'a> {
    client: &'a Client,
    scope: String,
    object: String,
    /// Digest and size, once they are known.
    identity: Option<(Digest, u64)>,
    content: Content,
    /// Bytes sent, also the ones that were lost.
    sent: u64,
    /// The highest offset sent since the upload began: the registry cannot have more.
    reached: u64,
}

/// The place of a blob's bytes.
#[derive(Debug)]
enum Content {
    File(PathBuf),
    /// All of them.
    Bytes(Bytes),
    /// The blob with this digest and size, as another place has it.
    Stored(Arc<dyn Pull>, Digest, u64),
    Growing(Growing),
}

/// A blob that is read from another place, as far as it has arrived.
#[derive(Debug)]
struct Passing {
    reader: BlobReader,
    /// The offset of `piece` in the blob.
    start: u64,
    /// The piece read last, kept for a repetition.
    piece: Bytes,
}

/// The position of an upload.
#[derive(Debug)]
struct Position {
    location: Url,
    /// Bytes that the registry has.
    offset: u64,
}

/// Makes sure that the repository holds the blob.
pub(crate) async fn blob(
    client: &Client,
    digest: &Digest,
    size: u64,
    content: BlobContent,
    mount_from: Option<&str>,
    progress: Progress<'_>,
) -> Result<Pushed, RegistryError> {
    let (object, identity) = (format!("blob {digest}"), Some((*digest, size)));
    let content = match content {
        BlobContent::File(path) => Content::File(path),
        BlobContent::Stored(place) => Content::Stored(place, *digest, size),
        BlobContent::Bytes(bytes) if bytes.len() as u64 == size => Content::Bytes(bytes),
        BlobContent::Bytes(bytes) => {
            let (place, expected, got) = ("memory".to_owned(), size, bytes.len() as u64);
            return Err(RegistryError::WrongSize { place, object, expected, got });
        }
    };
    let scope = client.scope("pull,push");
    let upload = Upload { client, scope, object, identity, content, sent: 0, reached: 0 };
    push(upload, Next::Look, mount_from, progress).await
}

/// The same for a blob that is still being made.
pub(crate) async fn growing(
    client: &Client,
    growing: Growing,
    progress: Progress<'_>,
) -> Result<Pushed, RegistryError> {
    // A blob that is complete before the first request may exist in the registry.
    let (object, identity) = match growing.beyond(PIECE).await? {
        Growth::Whole(digest, size) => (format!("blob {digest}"), Some((digest, size))),
        _ => ("a blob that is being made".to_owned(), None),
    };
    let content = Content::Growing(growing);
    let scope = client.scope("pull,push");
    let upload = Upload { client, scope, object, identity, content, sent: 0, reached: 0 };
    let first = if identity.is_some() { Next::Look } else { Next::Send };
    push(upload, first, None, progress).await
}

/// The next step for a blob.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Next {
    /// Ask whether the registry has it, or can mount it.
    Look,
    /// Send more of it.
    Send,
}

/// Brings a blob to the registry.
async fn push(
    mut upload: Upload<'_>,
    mut next: Next,
    mount_from: Option<&str>,
    progress: Progress<'_>,
) -> Result<Pushed, RegistryError> {
    let (mut position, mut passing) = (None, None);
    let (mut failures, mut reported) = (0, 0);
    loop {
        let step = match next {
            Next::Look => upload.look(mount_from, &mut position).await,
            Next::Send => upload.advance(&mut position, &mut passing).await,
        };
        let error = match step {
            Ok(step) => {
                let whole = || upload.identity.map_or(reported, |(_, size)| size);
                let offset = if let Step::At(offset) = step { offset } else { whole() };
                progress(offset.saturating_sub(reported));
                reported = reported.max(offset);
                if let Step::Done(pushed) = step {
                    return Ok(pushed);
                }
                (next, failures) = (Next::Send, 0);
                continue;
            }
            Err(error) => error,
        };
        failures += 1;
        // 416 says that the registry has another offset than we think.
        let lost = matches!(error, RegistryError::Status { status: 416, .. });
        if failures >= FAILURE_LIMIT || !(error.is_transient() || lost) {
            upload.abandon(position).await;
            return Err(error);
        }
        tracing::debug!(%error, failures, "an upload is taken up again");
        let wait = error.retry_after().unwrap_or(FIRST_WAIT * 2u32.pow(failures - 1));
        tokio::select! {
            () = sleep(wait.min(LONGEST_WAIT)) => {}
            _ = upload.given_up() => {}
        }
        // The answer to the closing PUT may have been lost after the registry had acted on it.
        if let Some((digest, size)) = upload.identity.filter(|_| next == Next::Send)
            && matches!(pull::has_blob(upload.client, &digest, &upload.scope).await, Ok(true))
        {
            progress(size.saturating_sub(reported));
            return Ok(Pushed::Uploaded(upload.sent));
        }
        if let Some(before) = position.take() {
            position = upload.resume(&before.location).await;
        }
    }
}

/// The outcome of one step of a push.
enum Step {
    /// The registry has this many bytes.
    At(u64),
    /// The registry has the blob.
    Done(Pushed),
}

impl Upload<'_> {
    fn call(&self, method: Method, url: Url, body: Option<Bytes>) -> Call<'_> {
        let (scope, object, headers) = (&self.scope, &self.object, HeaderMap::new());
        Call { method, url, scope, headers, body, object }
    }

    /// Finds out whether there is anything to send, and asks for a link from repository `from`.
    async fn look(
        &self,
        from: Option<&str>,
        position: &mut Option<Position>,
    ) -> Result<Step, RegistryError> {
        let Some((digest, _)) = self.identity else { return Ok(Step::At(0)) };
        if pull::has_blob(self.client, &digest, &self.scope).await? {
            return Ok(Step::Done(Pushed::Existed));
        }
        let Some(from) = from else { return Ok(Step::At(0)) };
        let mut url = self.client.url("blobs/uploads/")?;
        let digest = digest.to_string();
        url.query_pairs_mut().append_pair("mount", &digest).append_pair("from", from);
        let scope = format!("{} repository:{from}:pull", self.scope);
        let call = Call { scope: &scope, ..self.call(Method::POST, url, Some(Bytes::new())) };
        let response = self.client.send(&call).await?;
        match response.status() {
            StatusCode::CREATED => return Ok(Step::Done(Pushed::Mounted)),
            StatusCode::ACCEPTED => *position = Some(self.position(&response, 0)?),
            // Without access to the other repository, an upload still works.
            _ => {}
        }
        Ok(Step::At(0))
    }

    /// Sends the next piece. `position` is `None` before the upload has begun, and again once the
    /// blob is complete. `passing` is the position in a blob read from another place.
    async fn advance(
        &mut self,
        position: &mut Option<Position>,
        passing: &mut Option<Passing>,
    ) -> Result<Step, RegistryError> {
        let (url, offset) = match position {
            Some(position) => (position.location.clone(), position.offset),
            None => {
                self.reached = 0;
                let begun = position.insert(self.begin().await?);
                (begun.location.clone(), begun.offset)
            }
        };
        // While a blob's size is unknown, wait for more than one piece, so that some bytes are left
        // for the last request.
        self.grow(offset + PIECE).await?;
        let length = self.identity.map_or(PIECE, |(_, size)| (size - offset).min(PIECE));
        let end = offset + length;
        let piece = self.piece(offset, length, passing).await?;
        self.reached = self.reached.max(end);
        let closing = self.identity.filter(|(_, size)| *size == end).map(|(digest, _)| digest);
        let mut call = self.call(
            if closing.is_some() { Method::PUT } else { Method::PATCH },
            url,
            Some(piece),
        );
        call.headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
        if length > 0 && !(closing.is_some() && offset == 0) {
            insert(&mut call.headers, CONTENT_RANGE, format!("{offset}-{}", end - 1));
        }
        if let Some(digest) = closing {
            call.url.query_pairs_mut().append_pair("digest", &digest.to_string());
        }
        let sent = tokio::select! {
            biased;
            error = self.given_up() => Err(error),
            sent = self.client.send(&call) => sent,
        };
        self.sent += length;
        let response = sent?;
        match (closing.is_some(), response.status()) {
            (true, StatusCode::CREATED) => *position = None,
            (false, StatusCode::ACCEPTED) => *position = Some(self.position(&response, end)?),
            // The upload is unknown, not the repository: it expired or the registry lost it.
            (_, StatusCode::NOT_FOUND) => {
                *position = None;
                return Err(RegistryError::Interrupted {
                    place: self.client.place.clone(),
                    object: self.object.clone(),
                    cause: "the registry forgot the upload".to_owned(),
                });
            }
            _ => return Err(self.client.refuse(response, &self.object).await),
        }
        Ok(if closing.is_some() { Step::Done(Pushed::Uploaded(self.sent)) } else { Step::At(end) })
    }

    /// Waits until a growing blob has more than `bytes` bytes, or is complete.
    async fn grow(&mut self, bytes: u64) -> Result<(), RegistryError> {
        if let (Content::Growing(growing), None) = (&self.content, self.identity)
            && let Growth::Whole(digest, size) = growing.beyond(bytes).await?
        {
            self.identity = Some((digest, size));
        }
        Ok(())
    }

    /// Waits until the blob is not wanted any more; for ever if it is complete.
    async fn given_up(&self) -> RegistryError {
        match &self.content {
            Content::Growing(growing) => growing.given_up().await,
            _ => pending().await,
        }
    }

    async fn begin(&self) -> Result<Position, RegistryError> {
        let url = self.client.url("blobs/uploads/")?;
        let response = self.client.send(&self.call(Method::POST, url, Some(Bytes::new()))).await?;
        match response.status() {
            StatusCode::ACCEPTED => self.position(&response, 0),
            _ => Err(self.client.refuse(response, &self.object).await),
        }
    }

    /// Asks how far the registry got. `None` if the upload has to start over.
    async fn resume(&self, url: &Url) -> Option<Position> {
        let response = self.client.send(&self.call(Method::GET, url.clone(), None)).await.ok()?;
        if response.status() != StatusCode::NO_CONTENT {
            return None;
        }
        let offset = accepted(&response)?;
        let location = location(&response).unwrap_or_else(|| url.clone());
        (offset <= self.reached).then_some(Position { location, offset })
    }

    /// Cancels the upload, best effort: a registry removes abandoned uploads after some days
    /// anyway.
    async fn abandon(&self, position: Option<Position>) {
        if let Some(position) = position {
            let _ = self.client.send(&self.call(Method::DELETE, position.location, None)).await;
        }
    }

    /// Parses where the upload continues. The registry may have kept less than `sent` bytes.
    fn position(&self, response: &Response, sent: u64) -> Result<Position, RegistryError> {
        let malformed = |p: &str| RegistryError::malformed(&self.client.place, &self.object, p);
        let location = location(response)
            .ok_or_else(|| malformed("the answer to an upload has no Location"))?;
        let offset = if sent == 0 { 0 } else { accepted(response).unwrap_or(sent) };
        if offset > sent {
            return Err(malformed("the registry claims to have more bytes than were sent"));
        }
        Ok(Position { location, offset })
    }

    async fn piece(
        &self,
        offset: u64,
        length: u64,
        passing: &mut Option<Passing>,
    ) -> Result<Bytes, RegistryError> {
        let path = match &self.content {
            Content::Bytes(bytes) => {
                return Ok(bytes.slice(offset as usize..(offset + length) as usize));
            }
            Content::Stored(place, digest, size) => {
                let known = passing.take().filter(|known| known.start <= offset);
                let known = match known {
                    Some(known) => known,
                    None => {
                        let reader = place.blob(digest, *size).await?;
                        Passing { reader, start: 0, piece: Bytes::new() }
                    }
                };
                let read = known.advance(offset, length, *size).await;
                let read = read
                    .map_err(|error| error::from_reader(error, &place.describe(), &self.object))?;
                return Ok(passing.insert(read).piece.clone());
            }
            Content::File(path) | Content::Growing(Growing { file: path, .. }) => path,
        };
        let read = async {
            let mut file = File::open(path).await?;
            file.seek(SeekFrom::Start(offset)).await?;
            let mut piece = vec![0; length as usize];
            file.read_exact(&mut piece).await?;
            Ok::<_, io::Error>(piece)
        };
        Ok(read.await.at(path)?.into())
    }
}

impl Passing {
    /// Reads on to these bytes of a blob of `size` bytes. At the end of the blob, after it was
    /// checked.
    async fn advance(mut self, offset: u64, length: u64, size: u64) -> io::Result<Self> {
        let known = self.start + self.piece.len() as u64;
        if known < offset {
            let skipped = (&mut self.reader).take(offset - known);
            tokio::io::copy(&mut { skipped }, &mut tokio::io::sink()).await?;
        }
        let kept = self.piece.slice(((offset.min(known)) - self.start) as usize..);
        let mut piece = vec![0; length as usize];
        let (again, new) = piece.split_at_mut(kept.len().min(length as usize));
        again.copy_from_slice(&kept[..again.len()]);
        self.reader.read_exact(new).await?;
        if offset + length == size {
            // Nothing follows, and the digest is compared.
            tokio::io::copy(&mut self.reader, &mut tokio::io::sink()).await?;
        }
        Ok(Passing { reader: self.reader, start: offset, piece: piece.into() })
    }
}

/// Parses the number of bytes that the registry has, from `Range: 0-N`. `0-0` is ambiguous: no
/// bytes, or one. It counts as none, because no piece has one byte.
fn accepted(response: &Response) -> Option<u64> {
    let text = response.headers().get(RANGE)?.to_str().ok()?;
    let last: u64 = text.strip_prefix("bytes=").unwrap_or(text).strip_prefix("0-")?.parse().ok()?;
    if last == 0 { Some(0) } else { last.checked_add(1) }
}

fn insert(headers: &mut HeaderMap, name: HeaderName, value: String) {
    // Digits and a dash are always a legal header value.
    if let Ok(value) = HeaderValue::try_from(value) {
        headers.insert(name, value);
    }
}
