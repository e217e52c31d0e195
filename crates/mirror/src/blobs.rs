//! Blobs that clients download: layers of ordinary images, and configurations.

use std::{ops::Range, sync::Arc};

use bytes::Bytes;
use futures_util::StreamExt as _;
use http_body_util::{BodyExt as _, StreamBody};
use hyper::{
    HeaderMap, StatusCode,
    body::Frame,
    header::{CONTENT_RANGE, HeaderValue, IF_RANGE, RANGE},
};
use lazuli_image::Digest;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;

use crate::{
    ANSWER_LIMIT, Mirror,
    manifests::{SMALL, too_slow},
    range::Wanted,
    reply::{self, Problem, Reply},
    sessions::Session,
    stream::{self, Blob},
};

/// The media type of blobs; manifests have their own types.
const OCTETS: &str = "application/octet-stream";

impl Mirror {
    /// Answers a request for a blob, or for the head of such an answer.
    pub(crate) async fn blob(
        self: &Arc<Self>,
        session: &Arc<Session>,
        digest: Digest,
        headers: &HeaderMap,
        is_head: bool,
    ) -> Result<Reply, Problem> {
        if let Some(problem) = self.answered_before(session) {
            return Err(problem);
        }
        if session.is_wrong(&digest) {
            return Err(Problem::Wrong(format!("blob {digest} had another digest")));
        }
        // A HEAD request asks whether the blob exists, and only the registry knows that.
        let known = session.size(&digest).filter(|_| !is_head);
        let size = match known {
            Some(size) => size,
            None => self.size(session, &digest).await?,
        };
        let wanted = if is_head { Wanted::Whole } else { wanted(headers, &digest, size) };
        let range = match &wanted {
            Wanted::Whole => 0..size,
            Wanted::Part(range) => range.clone(),
            Wanted::Nothing => return Ok(unsatisfiable(size)),
        };
        let mut answer = if is_head {
            reply::with_body(
                StatusCode::OK,
                size,
                reply::whole(StatusCode::OK, Bytes::new()).into_body(),
            )
        } else if size <= SMALL {
            let content = self.small_blob(session, digest, size).await?;
            reply::whole(StatusCode::OK, content.slice(range.start as usize..range.end as usize))
        } else {
            self.streamed(session, digest, size, range.clone()).await?
        };
        if let Wanted::Part(range) = wanted {
            part(&mut answer, &range, size);
        }
        reply::describe(&mut answer, &digest, OCTETS);
        reply::accept_ranges(&mut answer);
        Ok(answer)
    }

    /// The size of a blob, by the registry's word.
    async fn size(&self, session: &Session, digest: &Digest) -> Result<u64, Problem> {
        self.counters.miss();
        let asked = timeout(ANSWER_LIMIT, session.repository.blob_size(digest)).await;
        let problem = match asked.map(|answer| session.heard(answer)) {
            Ok(Ok(size)) => {
                session.record_sizes([(*digest, size)].into_iter());
                return Ok(size);
            }
            Ok(Err(error)) => Problem::of(&error),
            Err(_) => Problem::Away(too_slow(session.reference.registry())),
        };
        self.record_refusal(session, &problem);
        Err(problem)
    }

    /// Bytes of a blob as they arrive.
    async fn streamed(
        self: &Arc<Self>,
        session: &Arc<Session>,
        digest: Digest,
        size: u64,
        range: Range<u64>,
    ) -> Result<Reply, Problem> {
        self.counters.miss();
        let length = range.end - range.start;
        let blob = Blob { repository: session.repository.clone(), digest, size };
        let of = session.clone();
        let on_wrong = move || of.record_wrong_bytes(&digest);
        let problem =
            match timeout(ANSWER_LIMIT, stream::open(blob, range, &self.memory, on_wrong)).await {
                Ok(Ok(pieces)) => {
                    let counters = self.counters.clone();
                    let pieces = ReceiverStream::new(pieces).map(move |piece| {
                        let piece = piece?;
                        counters.passed(piece.len());
                        Ok(Frame::data(piece))
                    });
                    let body = StreamBody::new(pieces).boxed_unsync();
                    return Ok(reply::with_body(StatusCode::OK, length, body));
                }
                Ok(Err(error)) => Problem::of(&error),
                Err(_) => Problem::Away(too_slow(session.reference.registry())),
            };
        self.record_refusal(session, &problem);
        Err(problem)
    }
}

/// Parses the range that a request asks for.
fn wanted(headers: &HeaderMap, digest: &Digest, size: u64) -> Wanted {
    let text = |name| headers.get(name).and_then(|value: &HeaderValue| value.to_str().ok());
    match text(IF_RANGE) {
        Some(tag) if tag != reply::etag(digest) => Wanted::Whole,
        _ => Wanted::parse(text(RANGE), size),
    }
}

/// Marks the answer as part of a blob.
fn part(answer: &mut Reply, range: &Range<u64>, size: u64) {
    *answer.status_mut() = StatusCode::PARTIAL_CONTENT;
    content_range(answer, format!("bytes {}-{}/{size}", range.start, range.end - 1));
}

/// The answer to a request for bytes that are not there.
fn unsatisfiable(size: u64) -> Reply {
    let status = StatusCode::RANGE_NOT_SATISFIABLE;
    let mut answer = reply::error(status, "RANGE_INVALID", "the blob does not have these bytes");
    content_range(&mut answer, format!("bytes */{size}"));
    answer
}

fn content_range(answer: &mut Reply, text: String) {
    if let Ok(value) = HeaderValue::try_from(text) {
        answer.headers_mut().insert(CONTENT_RANGE, value);
    }
}
