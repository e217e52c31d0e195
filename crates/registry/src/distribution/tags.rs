//! Tags of a repository: OCI distribution 1.1, "Listing Tags".
//!
//! ```text
//! GET tags/list?n=1000     {"name": "library/debian", "tags": ["12", "13"]}; perhaps with a Link
//!                          to its next page
//! ```

use reqwest::{
    Method, StatusCode,
    header::{HeaderMap, LINK},
};
use serde::Deserialize;

use crate::{
    distribution::referrers::next_link,
    error::RegistryError,
    manifest::DOCUMENT_LIMIT,
    repository::TAGS,
    transport::{
        client::{Call, Client},
        response::read_bounded,
    },
};

/// Some registries send `null` for an empty list.
#[derive(Deserialize)]
struct List {
    tags: Option<Vec<String>>,
}

/// At most `limit` tags.
pub(crate) async fn list(client: &Client, limit: usize) -> Result<Vec<String>, RegistryError> {
    let object = "the list of tags";
    let mut url = client.url("tags/list")?;
    url.query_pairs_mut().append_pair("n", &limit.min(TAGS).to_string());
    let scope = client.scope("pull");
    let mut tags = Vec::new();
    loop {
        let headers = HeaderMap::new();
        let call = Call { method: Method::GET, url, scope: &scope, headers, body: None, object };
        let (response, _) = client.follow(call).await?;
        match response.status() {
            StatusCode::OK => {}
            // Nothing was ever pushed, or there is no such list.
            StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED => return Ok(tags),
            _ => return Err(client.refuse(response, object).await),
        }
        let links = response.headers().get_all(LINK).iter().filter_map(|link| link.to_str().ok());
        let next = links.filter_map(next_link).find_map(|link| client.page(&response, link));
        let raw = read_bounded(response, DOCUMENT_LIMIT, &client.place, object).await?;
        let page: List = serde_json::from_slice(&raw)
            .map_err(|error| RegistryError::malformed(&client.place, object, error.to_string()))?;
        let page = page.tags.unwrap_or_default();
        let is_empty = page.is_empty();
        tags.extend(page);
        match next {
            // A page without tags could lead to itself for ever.
            Some(next) if tags.len() < limit && !is_empty => url = next,
            _ => break,
        }
    }
    tags.truncate(limit);
    Ok(tags)
}
