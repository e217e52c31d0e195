//! Referrers, OCI distribution 1.1: the API, and the work of clients for a registry without it.

use std::{collections::BTreeMap, sync::Arc};

use lazuli_image::{Algorithm, Digest};
use serde_json::{Value, json};

use super::{State, StoredManifest};
use crate::http::{Request, Response};

/// The only media type of lists.
const INDEX: &str = "application/vnd.oci.image.index.v1+json";

/// How the API behaves.
#[derive(Clone, Debug, Default)]
pub(super) struct Behaviour {
    /// Whether the API is missing.
    pub(super) absent: bool,
    /// Entries on one page; 0: all.
    pub(super) page: usize,
    /// Whether `artifactType` is ignored.
    pub(super) unfiltered: bool,
}

/// "Listing Referrers".
pub(super) fn list(state: &State, request: &Request, repository: &str, subject: &str) -> Response {
    if state.referrers.absent {
        return Response::error(404, "NOT_FOUND");
    }
    let Ok(subject) = subject.parse::<Digest>() else {
        return Response::error(400, "DIGEST_INVALID");
    };
    let wanted = request.query("artifactType");
    let filter = wanted.first().filter(|_| !state.referrers.unfiltered);
    let manifests = state.manifests.iter().filter(|((owner, _), _)| owner == repository);
    // By digest: a manifest has several names.
    let entries: BTreeMap<String, Value> = manifests
        .filter_map(|(_, stored)| entry(stored, &subject))
        .filter(|entry| filter.is_none_or(|wanted| entry["artifactType"] == wanted.as_str()))
        .map(|entry| (entry["digest"].to_string(), entry))
        .collect();
    let offset = request.query("offset").first().and_then(|text| text.parse().ok()).unwrap_or(0);
    let limit = if state.referrers.page == 0 { usize::MAX } else { state.referrers.page };
    let page: Vec<&Value> = entries.values().skip(offset).take(limit).collect();
    let next = offset.saturating_add(limit);
    let body = json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": page});
    let mut response =
        Response::new(200).with("content-type", INDEX).body(body.to_string().into_bytes());
    if filter.is_some() {
        response = response.with("oci-filters-applied", "artifactType");
    }
    if next < entries.len() {
        let (path, query) = request.target.split_once('?').unwrap_or((&request.target, ""));
        let kept: Vec<_> = query.split('&').filter(|pair| !pair.starts_with("offset=")).collect();
        let query = kept.join("&");
        response = response.with("link", format!(r#"<{path}?{query}&offset={next}>; rel="next""#));
    }
    response
}

/// The entry of a manifest in lists, if it refers to `subject`.
fn entry(stored: &StoredManifest, subject: &Digest) -> Option<Value> {
    let manifest: Value = serde_json::from_slice(&stored.content).ok()?;
    if manifest["subject"]["digest"] != subject.to_string() {
        return None;
    }
    Some(described(stored, &manifest))
}

fn described(stored: &StoredManifest, manifest: &Value) -> Value {
    let mut entry = json!({
        "mediaType": stored.media_type,
        "digest": Algorithm::Sha256.digest(&stored.content),
        "size": stored.content.len(),
    });
    let declared = [&manifest["artifactType"], &manifest["config"]["mediaType"]];
    if let Some(artifact_type) = declared.into_iter().find(|value| value.is_string()) {
        entry["artifactType"] = artifact_type.clone();
    }
    if let Some(annotations) = manifest.get("annotations") {
        entry["annotations"] = annotations.clone();
    }
    entry
}

/// The subject of a manifest that was pushed, for `OCI-Subject`.
pub(super) fn subject<'a>(state: &State, manifest: &'a Value) -> Option<&'a str> {
    manifest["subject"]["digest"].as_str().filter(|_| !state.referrers.absent)
}

/// The problem with an index pushed as `name`, if any: its manifests must exist, and a list of
/// referrers must describe them correctly.
pub(super) fn problem(
    state: &State,
    repository: &str,
    name: &str,
    index: &Value,
) -> Option<&'static str> {
    let mut seen = Vec::new();
    for listed in index["manifests"].as_array().into_iter().flatten() {
        let digest = listed["digest"].as_str().unwrap_or_default().to_owned();
        let Some(stored) = state.manifests.get(&(repository.to_owned(), digest.clone())) else {
            return Some("a manifest of the index is unknown");
        };
        let list = name.split_once('-').map(|(algorithm, hex)| format!("{algorithm}:{hex}"));
        if let Some(subject) = list.and_then(|subject| subject.parse::<Digest>().ok())
            && entry(stored, &subject).as_ref() != Some(listed)
        {
            return Some("the list of referrers is not what its manifests say");
        }
        if seen.contains(&digest) {
            return Some("the index has duplicate entries");
        }
        seen.push(digest);
    }
    None
}

/// Deletes a manifest under all its names.
pub(super) fn delete(state: &mut State, repository: &str, digest: &str) -> Response {
    let key = (repository.to_owned(), digest.to_owned());
    let Some(StoredManifest { content, .. }) = state.manifests.get(&key).cloned() else {
        return Response::error(404, "MANIFEST_UNKNOWN");
    };
    state.manifests.retain(|(owner, _), stored| {
        owner != repository || !Arc::ptr_eq(&stored.content, &content)
    });
    Response::new(202)
}
