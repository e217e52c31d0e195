//! Tags of a repository: OCI distribution 1.1, "Listing Tags".
//!
//! ```text
//! GET tags/list?n=1000     {"name": "library/debian", "tags": ["12", "13"]}
//! ```

use reqwest::{Method, StatusCode, header::HeaderMap};
use serde::Deserialize;

use crate::{
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

/// The first page.
pub(crate) async fn list(client: &Client) -> Result<Vec<String>, RegistryError> {
    let object = "the list of tags";
    let mut url = client.url("tags/list")?;
    url.query_pairs_mut().append_pair("n", &TAGS.to_string());
    let (scope, headers) = (client.scope("pull"), HeaderMap::new());
    let call = Call { method: Method::GET, url, scope: &scope, headers, body: None, object };
    let (response, _) = client.follow(call).await?;
    match response.status() {
        StatusCode::OK => {}
        // Nothing was ever pushed, or there is no such list.
        StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED => return Ok(Vec::new()),
        _ => return Err(client.refuse(response, object).await),
    }
    let raw = read_bounded(response, DOCUMENT_LIMIT, &client.place, object).await?;
    let list: List = serde_json::from_slice(&raw)
        .map_err(|error| RegistryError::malformed(&client.place, object, error.to_string()))?;
    Ok(list.tags.unwrap_or_default())
}
