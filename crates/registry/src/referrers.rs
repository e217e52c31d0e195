//! What refers to a manifest without being part of it: OCI distribution 1.1, "Listing Referrers".
//!
//! ```text
//! GET referrers/sha256:HEX?artifactType=…     an index; perhaps with a Link to its next page
//! GET manifests/sha256-HEX                    the same, kept by the clients of a registry without that API
//! ```
//! Whatever they say comes from whoever may push to the repository, and is not covered by any digest.

mod index;
mod push;

use lazuli_image::{
    Digest,
    oci::{Descriptor, media_type},
};
use reqwest::{
    Method, Response, StatusCode, Url,
    header::{ACCEPT, HeaderMap, HeaderValue, LINK},
};

use crate::{
    client::{Call, Client, detail, read_bounded},
    error::RegistryError,
    manifest::DOCUMENT_LIMIT,
    pull::content_type,
};

pub(crate) use index::Index;
pub(crate) use push::{Referrer, push};

/// Most pages of a list that are read. Registries that page at all put hundreds of entries on each, and most of them filter,
/// so that what we look for is on the first.
const PAGE_LIMIT: usize = 4;

/// The referrers of `subject` that are of `artifact_type`.
pub(crate) async fn list(
    client: &Client,
    subject: &Digest,
    artifact_type: &str,
) -> Result<Vec<Descriptor>, RegistryError> {
    if client.may_list_referrers()
        && let Some(found) = listed(client, subject, artifact_type).await?
    {
        return Ok(found);
    }
    match tagged(client, subject, &client.scope("pull")).await {
        Ok(index) => Ok(index.map_or_else(Vec::new, |index| index.of_type(artifact_type))),
        // "If the tag schema does not return a valid image index, the client SHOULD assume there are no referrers."
        Err(error @ RegistryError::Malformed { .. }) => {
            tracing::debug!(%error, "taken for no referrers");
            Ok(Vec::new())
        }
        Err(error) => Err(error),
    }
}

/// What the referrers API says; `None` where there is none.
async fn listed(
    client: &Client,
    subject: &Digest,
    artifact_type: &str,
) -> Result<Option<Vec<Descriptor>>, RegistryError> {
    let object = format!("the list of referrers of {subject}");
    let scope = client.scope("pull");
    let mut url = client.url(&format!("referrers/{subject}"))?;
    url.query_pairs_mut().append_pair("artifactType", artifact_type);
    let (mut asked, mut found, mut left) = (Vec::new(), Vec::<Descriptor>::new(), DOCUMENT_LIMIT);
    loop {
        let call = get(url.clone(), &scope, &object);
        asked.push(url);
        let page = match page(client, call, left).await {
            Ok(Some(page)) => page,
            Ok(None) if asked.len() == 1 => return Ok(None),
            Err(error) if asked.len() == 1 || found.is_empty() => return Err(error),
            // What was found so far is as good as it was.
            _ => break,
        };
        // The registry may know no filters, and pages may repeat each other.
        for entry in page.index.of_type(artifact_type) {
            if found.iter().all(|known| known.digest != entry.digest) {
                found.push(entry);
            }
        }
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
    index: Index,
    /// Its size in bytes.
    size: u64,
    next: Option<Url>,
}

/// Fetches a page of at most `limit` bytes; `None`: the server has no referrers API.
async fn page(client: &Client, call: Call<'_>, limit: u64) -> Result<Option<Page>, RegistryError> {
    let object = call.object;
    let (response, _) = client.follow(call).await?;
    let status = response.status();
    // The specification has 404 for this. Others answer that such paths, or methods there, are none of theirs, or show a
    // page for humans.
    let denied = matches!(status.as_u16(), 400 | 404 | 405 | 501);
    if denied || status == StatusCode::OK && !is_index(&response) {
        let unknown_name = denied && detail(response).await.starts_with("NAME_UNKNOWN");
        if !unknown_name {
            client.lists_referrers(false);
        }
        return Ok(None);
    }
    if status != StatusCode::OK {
        return Err(client.refuse(response, object).await);
    }
    let links = response.headers().get_all(LINK).iter().filter_map(|value| value.to_str().ok());
    let next = links.filter_map(next_link).find_map(|link| client.page(&response, link));
    let raw = read_bounded(response, limit, &client.place, object).await?;
    let index = Index::parse(&raw)
        .map_err(|problem| RegistryError::malformed(&client.place, object, problem))?;
    Ok(Some(Page { index, size: raw.len() as u64, next }))
}

/// The list that clients keep under a tag; `None` if there is none.
async fn tagged(
    client: &Client,
    subject: &Digest,
    scope: &str,
) -> Result<Option<Index>, RegistryError> {
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
    Index::parse(&raw).map(Some).map_err(malformed)
}

fn get<'a>(url: Url, scope: &'a str, object: &'a str) -> Call<'a> {
    let mut headers = HeaderMap::new();
    headers.insert(ACCEPT, HeaderValue::from_static(media_type::INDEX));
    Call { method: Method::GET, url, scope, headers, body: None, object }
}

fn is_index(response: &Response) -> bool {
    content_type(response).is_some_and(|found| found == media_type::INDEX)
}

/// "Referrers Tag Schema". Algorithm and digits of all our digests are short enough, and legal in tags.
pub(crate) fn tag(subject: &Digest) -> String {
    format!("{}-{}", subject.algorithm.name(), subject.hex())
}

/// The target of relation type `next` in a Link header, RFC 8288: `<target>; rel="next", <target>; …`.
fn next_link(header: &str) -> Option<&str> {
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
    use lazuli_image::Algorithm;

    use super::*;

    #[test]
    fn tags_of_lists() {
        let digest = Algorithm::Sha256.digest(b"{}");
        let hex = "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a";
        assert_eq!(tag(&digest), format!("sha256-{hex}"));
    }

    #[test]
    fn links_to_next_pages() {
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
