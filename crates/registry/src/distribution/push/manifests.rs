//! Puts manifests and indexes.

use bytes::Bytes;
use lazuli_image::{Algorithm, Digest};
use reqwest::{
    Method, StatusCode,
    header::{CONTENT_TYPE, HeaderMap, HeaderValue},
};

use crate::{
    blob::Pushed,
    distribution::pull,
    error::RegistryError,
    manifest::Document,
    name::Selector,
    transport::client::{Call, Client},
};

/// Puts a manifest under `selector`.
pub(crate) async fn manifest(
    client: &Client,
    selector: &Selector,
    raw: Bytes,
    media_type: &str,
) -> Result<Digest, RegistryError> {
    put(client, selector, raw, media_type).await.map(|(digest, _)| digest)
}

/// Makes sure that `selector` names the document.
pub(crate) async fn document(
    client: &Client,
    selector: &Selector,
    document: &Document,
) -> Result<Pushed, RegistryError> {
    // Whatever speaks against it is said again when it is pushed.
    if let Ok(true) = pull::has_manifest(client, selector, &document.digest).await {
        return Ok(Pushed::Existed);
    }
    manifest(client, selector, document.raw.clone(), &document.media_type).await?;
    Ok(Pushed::Uploaded(document.raw.len() as u64))
}

/// Puts a manifest under `selector`; also the headers of the answer.
pub(crate) async fn put(
    client: &Client,
    selector: &Selector,
    raw: Bytes,
    media_type: &str,
) -> Result<(Digest, HeaderMap), RegistryError> {
    let object = format!("manifest {selector}");
    let digest = Algorithm::Sha256.digest(&raw);
    if let Selector::Digest(expected) = selector
        && *expected != digest
    {
        let (place, expected) = (client.place.clone(), *expected);
        return Err(RegistryError::WrongDigest { place, object, expected, got: digest });
    }
    let media_type = HeaderValue::try_from(media_type).map_err(|_| {
        RegistryError::malformed(&client.place, &object, "its media type is no header value")
    })?;
    let mut headers = HeaderMap::new();
    headers.insert(CONTENT_TYPE, media_type);
    let scope = client.scope("pull,push");
    let url = client.url(&format!("manifests/{selector}"))?;
    let call =
        Call { method: Method::PUT, url, scope: &scope, headers, body: Some(raw), object: &object };
    let response = client.send(&call).await?;
    if response.status() != StatusCode::CREATED {
        return Err(client.refuse(response, &object).await);
    }
    let header = response.headers().get("docker-content-digest").and_then(|v| v.to_str().ok());
    if let Some(got) = header.and_then(|text| text.parse::<Digest>().ok())
        && got.algorithm == digest.algorithm
        && got != digest
    {
        let place = client.place.clone();
        return Err(RegistryError::WrongDigest { place, object, expected: digest, got });
    }
    Ok((digest, response.headers().clone()))
}
