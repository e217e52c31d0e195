//! Proof that a repository has a private blob before its images use what the cache has of it.
//!
//! A digest names content, but does not entitle to it. A tenant that knows the manifest of another
//! tenant's image could push it to a registry that claims to have all blobs, and the cache would
//! deliver them. So such a registry first has to deliver a chunk chosen at random, which is checked
//! like any other.

use std::sync::Arc;

use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use lazuli_registry::{ImageName, Layout, Options, Pull, open};
use lazuli_sys::path_error::At as _;

use crate::{
    cache::{Cache, CachedBlob},
    daemon::{DaemonError, served::image::ServedImage},
    image::StoredImage,
    source::RepositorySource,
};

/// Proofs at a time for one image.
const PARALLEL: usize = 8;

/// Makes sure that `repository`, which `name` means, may use what the cache has of the image's
/// blobs. The blobs stay open as long as the result lives.
pub(in crate::daemon) async fn prove(
    stored: &StoredImage,
    name: &ImageName,
    options: &Options,
    repository: &dyn Pull,
    cache: &Cache,
) -> Result<Vec<Arc<CachedBlob>>, DaemonError> {
    let Some(asking) = repository.repository_name() else { return Ok(Vec::new()) };
    let (mut cached, mut private) = (Vec::new(), Vec::new());
    for blob in stored.bootstrap.blobs() {
        let Some(found) = cache.find(blob)? else { continue };
        if !found.allowed_repositories().allow(&asking) {
            private.push((found.clone(), blob.stored_size));
        }
        cached.push(found);
    }
    if private.is_empty() {
        return Ok(cached);
    }
    let bundle = match is_delivered(stored, name, options).await {
        true => options.bundle.clone(),
        false => None,
    };
    // Peers deliver by digest, whoever asks.
    let options = Options { dragonfly: None, bundle, ..options.clone() };
    let registry: Arc<dyn Pull> = open(name, &options)?;
    let proofs = private.into_iter().map(|(blob, size)| {
        let source = Arc::new(RepositorySource::new(registry.clone(), blob.id(), size));
        let image = registry.describe();
        let asking = &asking;
        async move {
            let proof = blob.prove(source).await;
            let not_proven = |source| DaemonError::NotProven { image, blob: blob.id(), source };
            proof.map_err(not_proven)?;
            allow(&blob, asking)
        }
    });
    stream::iter(proofs).buffer_unordered(PARALLEL).try_collect::<()>().await?;
    Ok(cached)
}

/// Returns whether the node was delivered with the image, and not only with others that share its
/// repository or its blobs.
async fn is_delivered(stored: &StoredImage, name: &ImageName, options: &Options) -> bool {
    let ImageName::Registry(reference) = name else { return false };
    let bundle = options.bundle.as_ref();
    let layout = bundle.and_then(|bundle| Layout::in_bundle(bundle, reference));
    let Some(layout) = layout else { return false };
    let delivered = layout.manifest(None).await;
    delivered.is_ok_and(|it| name.is_pinned() || it.digest == stored.manifest_digest)
}

/// Makes the blobs of an image that came with a pull secret private, unless `repository` was just
/// read without one.
pub(in crate::daemon) fn keep_private(
    image: &ServedImage,
    repository: &dyn Pull,
) -> Result<(), DaemonError> {
    match repository.repository_name() {
        Some(name) if !repository.serves_anonymously() => {
            image.blobs().iter().try_for_each(|blob| allow(blob, &name))
        }
        _ => Ok(()),
    }
}

fn allow(blob: &CachedBlob, repository: &str) -> Result<(), DaemonError> {
    Ok(blob.allowed_repositories().add(repository).at(blob.path())?)
}
