//! Manifests and whole blobs, from a registry.

use bytes::Bytes;
use futures_util::stream;
use lazuli_image::{Digest, oci::Platform};
use reqwest::{
    Method, Response, StatusCode,
    header::{ACCEPT, CONTENT_TYPE, HeaderMap, HeaderValue},
};
use std::{io, sync::Arc};
use tokio_util::io::StreamReader;

use crate::{
    blob::BlobReader,
    error::RegistryError,
    manifest::{self, DOCUMENT_LIMIT, Document, IMAGE_TYPES, INDEX_TYPES, Manifest, Parsed},
    name::Selector,
    transport::{
        client::{Call, Client},
        response::read_bounded,
    },
};

/// The manifest that `selector` names, for `platform` if it is an index.
pub(crate) async fn manifest(
    client: &Client,
    selector: &Selector,
    platform: Option<&Platform>,
) -> Result<Manifest, RegistryError> {
    let (index, entries) = match fetch(client, selector).await? {
        Parsed::Image(manifest) => return Ok(*manifest),
        Parsed::Index(index, entries) => (index, entries),
    };
    let chosen = manifest::choose(&client.place, &entries, platform)?;
    match fetch(client, &Selector::Digest(chosen.digest)).await? {
        Parsed::Image(manifest) => Ok(Manifest { index: Some(*index), ..*manifest }),
        Parsed::Index(..) => {
            let problem =
                format!("the index lists {} as an image, but it is an index", chosen.digest);
            Err(RegistryError::malformed(&client.place, "the manifest", problem))
        }
    }
}

/// Fetches the manifest or index `selector`, as stored.
pub(crate) async fn document(
    client: &Client,
    selector: &Selector,
) -> Result<Document, RegistryError> {
    let (raw, content_type) = raw(client, selector).await?;
    manifest::document(&client.place, raw, content_type.as_deref(), expected(selector))
}

async fn fetch(client: &Client, selector: &Selector) -> Result<Parsed, RegistryError> {
    let (raw, content_type) = raw(client, selector).await?;
    manifest::parse(&client.place, raw, content_type.as_deref(), expected(selector))
}

fn expected(selector: &Selector) -> Option<&Digest> {
    match selector {
        Selector::Digest(digest) => Some(digest),
        Selector::Tag(_) => None,
    }
}

/// Fetches the bytes of a manifest or an index, with its Content-Type.
async fn raw(
    client: &Client,
    selector: &Selector,
) -> Result<(Bytes, Option<String>), RegistryError> {
    let object = format!("manifest {selector}");
    let url = client.url(&format!("manifests/{selector}"))?;
    let (scope, headers) = (client.scope("pull"), any_manifest());
    let call =
        Call { method: Method::GET, url, scope: &scope, headers, body: None, object: &object };
    let (response, _) = client.follow(call).await?;
    if response.status() != StatusCode::OK {
        return Err(client.refuse(response, &object).await);
    }
    let content_type = content_type(&response);
    Ok((read_bounded(response, DOCUMENT_LIMIT, &client.place, &object).await?, content_type))
}

/// Accepts all that can be an image.
fn any_manifest() -> HeaderMap {
    let types = IMAGE_TYPES.into_iter().chain(INDEX_TYPES);
    types.map(|name| (ACCEPT, HeaderValue::from_static(name))).collect()
}

/// Returns whether `selector` names the manifest `digest` on the server.
pub(crate) async fn has_manifest(
    client: &Client,
    selector: &Selector,
    digest: &Digest,
) -> Result<bool, RegistryError> {
    let object = format!("manifest {selector}");
    let url = client.url(&format!("manifests/{selector}"))?;
    let (scope, headers) = (client.scope("pull,push"), any_manifest());
    let call =
        Call { method: Method::HEAD, url, scope: &scope, headers, body: None, object: &object };
    let response = client.send(&call).await?;
    let found = stated_digest(&response).or(expected(selector).copied());
    Ok(response.status() == StatusCode::OK && found == Some(*digest))
}

/// The digest of what `selector` names on the server, unless the server does not say it.
pub(crate) async fn head(
    client: &Client,
    selector: &Selector,
) -> Result<Option<Digest>, RegistryError> {
    let object = format!("manifest {selector}");
    let url = client.url(&format!("manifests/{selector}"))?;
    let (scope, headers) = (client.scope("pull"), any_manifest());
    let call =
        Call { method: Method::HEAD, url, scope: &scope, headers, body: None, object: &object };
    let (response, _) = client.follow(call).await?;
    match response.status() {
        StatusCode::OK => Ok(stated_digest(&response)),
        StatusCode::METHOD_NOT_ALLOWED | StatusCode::NOT_IMPLEMENTED => Ok(None),
        _ => Err(client.refuse(response, &object).await),
    }
}

fn stated_digest(response: &Response) -> Option<Digest> {
    response.headers().get("docker-content-digest")?.to_str().ok()?.parse().ok()
}

/// The Content-Type, without parameters such as a charset.
pub(crate) fn content_type(response: &Response) -> Option<String> {
    let value = response.headers().get(CONTENT_TYPE)?.to_str().ok()?;
    Some(value.split(';').next()?.trim().to_owned())
}

/// Returns whether the repository has the blob `digest`.
pub(crate) async fn has_blob(
    client: &Client,
    digest: &Digest,
    scope: &str,
) -> Result<bool, RegistryError> {
    let object = format!("blob {digest}");
    let url = client.url(&format!("blobs/{digest}"))?;
    let headers = HeaderMap::new();
    let call = Call { method: Method::HEAD, url, scope, headers, body: None, object: &object };
    let response = client.send(&call).await?;
    match response.status() {
        StatusCode::OK => Ok(true),
        StatusCode::NOT_FOUND => Ok(false),
        // The server redirects only for blobs that exist. Don't follow: storage refuses HEAD with a
        // signature for GET.
        status if status.is_redirection() => Ok(true),
        _ => Err(client.refuse(response, &object).await),
    }
}

/// The whole blob, checked while it streams.
pub(crate) async fn blob(
    client: &Arc<Client>,
    digest: &Digest,
    size: u64,
) -> Result<BlobReader, RegistryError> {
    let object = format!("blob {digest}");
    let url = client.url(&format!("blobs/{digest}"))?;
    let (scope, headers) = (client.scope("pull"), HeaderMap::new());
    let call =
        Call { method: Method::GET, url, scope: &scope, headers, body: None, object: &object };
    let (response, _) = client.follow(call).await?;
    if response.status() != StatusCode::OK {
        return Err(client.refuse(response, &object).await);
    }
    if let Some(got) = response.content_length()
        && got != size
    {
        return Err(RegistryError::WrongSize {
            place: client.place.clone(),
            object,
            expected: size,
            got,
        });
    }
    let rest = (response, client.clone(), object);
    let stream = stream::try_unfold(rest, |(mut response, client, object)| async move {
        let piece = client.chunk(&mut response, &object).await.map_err(io::Error::other)?;
        Ok::<_, io::Error>(piece.map(|piece| (piece, (response, client, object))))
    });
    Ok(BlobReader::new(StreamReader::new(Box::pin(stream)), &client.place, digest, size))
}
