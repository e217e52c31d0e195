//! Uploads of blobs: at once, in pieces, and mounts from another repository.

use std::sync::Arc;

use lazuli_image::Digest;

use super::State;
use crate::http::{Request, Response};

/// Answers a request below `/blobs/uploads/`; `id` is empty for a new upload.
pub(super) fn upload(
    state: &mut State,
    request: &Request,
    repository: &str,
    id: &str,
    body: Vec<u8>,
) -> Response {
    let location = |id: u64| format!("/v2/{repository}/blobs/uploads/{id}");
    let key = |digest: Digest, repository: &str| (repository.to_owned(), digest);
    let mut digest = request.query("digest");
    digest.extend(request.query("mount"));
    let digest: Option<Digest> = digest.first().and_then(|text| text.parse().ok());
    if request.method == "POST" {
        let from = request.query("from");
        if let (Some(digest), Some(from)) = (digest, from.first())
            && let Some(content) = state.blobs.get(&key(digest, from)).cloned()
        {
            state.blobs.insert(key(digest, repository), content);
            return Response::new(201).with("location", format!("/v2/{repository}/blobs/{digest}"));
        }
        let id = state.next();
        state.uploads.insert(id, (repository.to_owned(), Vec::new()));
        return Response::new(202).with("location", location(id)).with("range", "0-0");
    }
    let Ok(id) = id.parse::<u64>() else { return Response::error(404, "BLOB_UPLOAD_UNKNOWN") };
    let Some((_, content)) = state.uploads.get_mut(&id).filter(|(owner, _)| owner == repository)
    else {
        return Response::error(404, "BLOB_UPLOAD_UNKNOWN");
    };
    let offset = content.len();
    let so_far = |length: usize| format!("0-{}", length.saturating_sub(1));
    match request.method.as_str() {
        "GET" => Response::new(204).with("location", location(id)).with("range", so_far(offset)),
        "DELETE" => {
            state.uploads.remove(&id);
            Response::new(204)
        }
        "PATCH" | "PUT" => {
            let right = match request.header("content-range") {
                Some(text) => Some(text.to_owned()) == last_of(offset, body.len()),
                // A closing request may carry everything, or nothing.
                None => request.method == "PUT" && (offset == 0 || body.is_empty()),
            };
            if !right {
                let range = so_far(offset);
                return Response::error(416, "RANGE_INVALID")
                    .with("range", range)
                    .with("location", location(id));
            }
            content.extend_from_slice(&body);
            if request.method == "PATCH" {
                let range = so_far(content.len());
                return Response::new(202).with("location", location(id)).with("range", range);
            }
            let Some((_, content)) = state.uploads.remove(&id) else { return Response::new(404) };
            match digest {
                Some(digest) if digest.matches(&content) => {
                    state.blobs.insert(key(digest, repository), Arc::new(content));
                    Response::new(201).with("location", format!("/v2/{repository}/blobs/{digest}"))
                }
                _ => Response::error(400, "DIGEST_INVALID"),
            }
        }
        _ => Response::error(405, "UNSUPPORTED"),
    }
}

fn last_of(offset: usize, length: usize) -> Option<String> {
    Some(format!("{offset}-{}", (offset + length).checked_sub(1)?))
}
