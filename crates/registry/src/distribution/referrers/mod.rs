//! Referrers of a manifest: OCI distribution 1.1, "Listing Referrers".
//!
//! ```text
//! GET referrers/sha256:HEX?artifactType=…     an index; perhaps with a Link to its next page
//! GET manifests/sha256-HEX                    the same list without that API, kept by clients
//! ```
//! Their content comes from any client that may push to the repository, and no digest covers it.

mod index;
mod push;

use std::{collections::HashSet, pin::pin};

use lazuli_image::{
    Algorithm, Digest,
    oci::{Descriptor, media_type},
};
use reqwest::{
    Method, Response, StatusCode, Url,
    header::{ACCEPT, HeaderMap, HeaderValue, LINK},
};

use crate::{
    distribution::pull::content_type,
    error::RegistryError,
    manifest::DOCUMENT_LIMIT,
    transport::{
        client::{Call, Client},
        client_pool::ReferrersApi,
        response::{detail, read_bounded},
    },
};

pub(crate) use index::ReferrerIndex;
pub(crate) use push::{Referrer, delete, enlist, push};

/// Maximum number of pages read from a list. Registries that page put hundreds of entries on a
/// page, and most of them filter, so that ours are on the first.
const PAGE_LIMIT: usize = 4;

/// The referrers of `subject`, of one type or of all.
pub(crate) async fn list(
    client: &Client,
    subject: &Digest,
    artifact_type: Option<&str>,
) -> Result<Vec<Descriptor>, RegistryError> {
    let known = client.referrers_api();
    let mut tagged = pin!(under_tag(client, subject, artifact_type));
    if known == Some(ReferrersApi::Missing) {
        return tagged.await;
    }
    let mut listed = pin!(listed(client, subject, artifact_type));
    let mut fallback = None;
    let listed = loop {
        tokio::select! {
            biased;
            found = &mut listed => break found?,
            // Lookups without the API would wait for its denial first.
            found = &mut tagged, if known.is_none() && fallback.is_none() => fallback = Some(found),
        }
    };
    match (listed, fallback) {
        (Some(found), _) => Ok(found),
        (None, Some(found)) => found,
        (None, None) => tagged.await,
    }
}

/// The referrers of `subject` that clients list under a tag.
async fn under_tag(
    client: &Client,
    subject: &Digest,
    artifact_type: Option<&str>,
) -> Result<Vec<Descriptor>, RegistryError> {
    match tagged(client, subject, &client.scope("pull")).await {
        Ok(index) => Ok(index.map_or_else(Vec::new, |index| index.of_type(artifact_type))),
        // "If the tag schema does not return a valid image index, the client SHOULD assume there
        // are no referrers."
        Err(error @ RegistryError::Malformed { .. }) => {
            tracing::debug!(%error, "taken for no referrers");
            Ok(Vec::new())
        }
        Err(error) => Err(error),
    }
}

/// Lists referrers by the API; `None` if the server has none.
async fn listed(
    client: &Client,
    subject: &Digest,
    artifact_type: Option<&str>,
) -> Result<Option<Vec<Descriptor>>, RegistryError> {
    let object = format!("the list of referrers of {subject}");
    let scope = client.scope("pull");
    let mut url = client.url(&format!("referrers/{subject}"))?;
    if let Some(wanted) = artifact_type {
        url.query_pairs_mut().append_pair("artifactType", wanted);
    }
    let (mut asked, mut left) = (Vec::new(), DOCUMENT_LIMIT);
    let (mut found, mut known) = (Vec::new(), HashSet::new());
    loop {
        let call = get(url.clone(), &scope, &object);
        let answer = client.follow(call).await.map(|(response, _)| response);
        let page = match answer {
            Ok(response) if asked.is_empty() && denies(&response) => {
                note_denial(client, response).await;
                return Ok(None);
            }
            Ok(response) => page(client, response, &object, left).await,
            Err(error) => Err(error),
        };
        asked.push(url);
        let page = match page {
            Ok(page) => page,
            // Entries found so far remain valid.
            Err(error) if !found.is_empty() => {
                tracing::debug!(%error, "the rest of a list is left out");
                break;
            }
            Err(error) => return Err(error),
        };
        // The registry may ignore filters, and pages may repeat each other.
        let entries = page.index.of_type(artifact_type).into_iter();
        found.extend(entries.filter(|entry| known.insert(entry.digest)));
        client.note_referrers_api(ReferrersApi::Present);
        left = left.saturating_sub(page.size);
        match page.next {
            Some(next) if asked.len() < PAGE_LIMIT && !asked.contains(&next) => url = next,
            _ => break,
        }
    }
    Ok(Some(found))
}

/// One page of a list.
struct Page {
    index: ReferrerIndex,
    /// Its size in bytes.
    size: u64,
    next: Option<Url>,
}

/// Reads a page of at most `limit` bytes.
async fn page(
    client: &Client,
    response: Response,
    object: &str,
    limit: u64,
) -> Result<Page, RegistryError> {
    if response.status() != StatusCode::OK {
        return Err(client.refuse(response, object).await);
    }
    let links = response.headers().get_all(LINK).iter().filter_map(|value| value.to_str().ok());
    let next = links.filter_map(next_link).find_map(|link| client.page(&response, link));
    let raw = read_bounded(response, limit, &client.place, object).await?;
    let index = ReferrerIndex::parse(&raw)
        .map_err(|problem| RegistryError::malformed(&client.place, object, problem))?;
    Ok(Page { index, size: raw.len() as u64, next })
}

/// Returns whether the answer means that there is no referrers API. The specification has 404 for
/// this. Other servers refuse the path or the method, or show a web page.
fn denies(response: &Response) -> bool {
    let status = response.status();
    matches!(status.as_u16(), 400 | 404 | 405 | 501)
        || status == StatusCode::OK && !is_index(response)
}

/// Remembers that there is no referrers API, unless the answer is about something else.
async fn note_denial(client: &Client, response: Response) {
    let unknown_name =
        response.status() != StatusCode::OK && detail(response).await.starts_with("NAME_UNKNOWN");
    if !unknown_name {
        client.note_referrers_api(ReferrersApi::Missing);
    }
}

/// Reads the list that clients keep under a tag; `None` if there is none.
async fn tagged(
    client: &Client,
    subject: &Digest,
    scope: &str,
) -> Result<Option<ReferrerIndex>, RegistryError> {
    Ok(tagged_as_stored(client, subject, scope).await?.map(|(index, _)| index))
}

/// The same, with the digest of the list as it is stored.
async fn tagged_as_stored(
    client: &Client,
    subject: &Digest,
    scope: &str,
) -> Result<Option<(ReferrerIndex, Digest)>, RegistryError> {
    let tag = tag(subject);
    let object = format!("the list of referrers {tag}");
    let url = client.url(&format!("manifests/{tag}"))?;
    let (response, _) = client.follow(get(url, scope, &object)).await?;
    match response.status() {
        StatusCode::OK => {}
        StatusCode::NOT_FOUND => return Ok(None),
        _ => return Err(client.refuse(response, &object).await),
    }
    let malformed = |problem: String| RegistryError::malformed(&client.place, &object, problem);
    if !is_index(&response) {
        let found = content_type(&response).unwrap_or_else(|| "no media type".to_owned());
        return Err(malformed(format!("it is `{found}`, expected `{}`", media_type::INDEX)));
    }
    let raw = read_bounded(response, DOCUMENT_LIMIT, &client.place, &object).await?;
    let index = ReferrerIndex::parse(&raw).map_err(malformed)?;
    Ok(Some((index, Algorithm::Sha256.digest(&raw))))
}

fn get<'a>(url: Url, scope: &'a str, object: &'a str) -> Call<'a> {
    let mut headers = HeaderMap::new();
    headers.insert(ACCEPT, HeaderValue::from_static(media_type::INDEX));
    Call { method: Method::GET, url, scope, headers, body: None, object }
}

fn is_index(response: &Response) -> bool {
    content_type(response).is_some_and(|found| found == media_type::INDEX)
}

/// "Referrers Tag Schema". Algorithm and digits of all our digests are short enough, and legal in
/// tags.
pub(crate) fn tag(subject: &Digest) -> String {
    format!("{}-{}", subject.algorithm.name(), subject.hex())
}

/// Ends of the tags under which cosign 2 keeps signatures, attestations and SBOMs.
const ATTACHMENTS: [&str; 3] = [".sig", ".att", ".sbom"];

/// The tags under which cosign 2 keeps attachments of `subject`.
pub(crate) fn attachment_tags(subject: &Digest) -> [String; 3] {
    ATTACHMENTS.map(|end| tag(subject) + end)
}

/// Returns whether a tag stands for a list of referrers or a cosign attachment instead of an image.
pub fn is_beside_image(name: &str) -> bool {
    let name = ATTACHMENTS.iter().find_map(|end| name.strip_suffix(end)).unwrap_or(name);
    name.replacen('-', ":", 1).parse().is_ok_and(|subject| tag(&subject) == name)
}

/// The target of relation type `next` in a Link header, RFC 8288: `<target>; rel="next", <target>;
/// …`.
pub(crate) fn next_link(header: &str) -> Option<&str> {
    let mut rest = header;
    loop {
        let (target, after) = rest.split_once('<')?.1.split_once('>')?;
        let parameters = after.split('<').next().unwrap_or_default();
        let mut relations = parameters.split([';', ',']).filter_map(|parameter| {
            let (name, value) = parameter.split_once('=')?;
            let named = name.trim().eq_ignore_ascii_case("rel");
            named.then(|| value.trim().trim_matches('"'))
        });
        if relations.any(|names| names.split(' ').any(|name| name.eq_ignore_ascii_case("next"))) {
            return Some(target);
        }
        rest = after;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_of_referrers_are_told_from_those_of_images() {
        let digest = Algorithm::Sha256.digest(b"{}");
        let hex = "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a";
        assert_eq!(tag(&digest), format!("sha256-{hex}"));
        assert!(is_beside_image(&tag(&digest)));
        assert!(attachment_tags(&digest).iter().all(|tag| is_beside_image(tag)));
        for other in ["sha256-44136f", "latest", &digest.to_string(), "1.sig"] {
            assert!(!is_beside_image(other), "{other}");
        }
    }

    #[test]
    fn the_link_to_the_next_page_is_found_among_others() {
        for (header, expected) in [
            (r#"</v2/a/referrers/d?last=1>; rel="next""#, Some("/v2/a/referrers/d?last=1")),
            ("<x>;rel=next", Some("x")),
            (r#"<a,b>; rel="prev", <c;d>; title="t"; REL="last Next""#, Some("c;d")),
            (r#"<x>; rel="prev""#, None),
            ("x; rel=next", None),
            ("<x; rel=next", None),
            ("<x>", None),
            ("", None),
        ] {
            assert_eq!(next_link(header), expected, "{header}");
        }
    }
}
