//! Proof that a repository has a private blob before its images use what the cache has of it.
//!
//! A digest names content, but does not entitle to it. A tenant that knows the manifest of another
//! tenant's image could push it to a registry that claims to have all blobs, and the cache would
//! deliver them. So such a registry first has to deliver a chunk chosen at random, which is checked
//! like any other.

use std::{
    hash::{BuildHasher as _, RandomState},
    sync::Arc,
};

use futures_util::future::try_join_all;
use lazuli_image::{Blob, codec::Decoder};
use lazuli_registry::{ImageName, Options, Pull, open};
use lazuli_sys::path_error::At as _;

use crate::{
    cache::{Cache, CachedBlob},
    daemon::{DaemonError, served::image::ServedImage},
    image::StoredImage,
};

/// Makes sure that the repository of `name` may use what the cache has of the image's blobs. The
/// blobs stay open as long as the result lives.
pub(in crate::daemon) async fn prove(
    stored: &StoredImage,
    name: &ImageName,
    options: &Options,
    cache: &Cache,
) -> Result<Vec<Arc<CachedBlob>>, DaemonError> {
    // Peers deliver by digest, whoever asks.
    let repository = open(name, &Options { dragonfly: None, ..options.clone() })?;
    let Some(asking) = repository.repository_name() else { return Ok(Vec::new()) };
    let (mut cached, mut private) = (Vec::new(), Vec::new());
    for blob in stored.bootstrap.blobs() {
        let Some(found) = cache.find(blob)? else { continue };
        if !found.allowed_repositories().allow(&asking) {
            private.push((blob, found.clone()));
        }
        cached.push(found);
    }
    try_join_all(private.iter().map(|(blob, _)| deliver_any(&*repository, blob))).await?;
    private.iter().try_for_each(|(_, blob)| allow(blob, &asking))?;
    Ok(cached)
}

/// Makes the blobs of an image private if only a pull secret lets clients of `repository` read
/// them.
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

/// Fetches a chunk of `blob` chosen at random, and checks it.
async fn deliver_any(repository: &dyn Pull, blob: &Blob) -> Result<(), DaemonError> {
    if blob.chunks.is_empty() {
        return Ok(());
    }
    let random = RandomState::new().hash_one(blob.id);
    let chunk = blob.chunks[(random % blob.chunks.len() as u64) as usize];
    let range = chunk.stored..chunk.stored_end();
    let stored = repository.read(&blob.id, blob.stored_size, range, &|_| {}).await?;
    let of_blob = blob.clone();
    let is_right = tokio::task::spawn_blocking(move || {
        let mut buffer = Vec::new();
        Decoder::new()
            .unit(&of_blob.unit(&chunk), &stored, &mut buffer)
            .is_ok_and(|unit| chunk.verified(unit).is_ok())
    });
    if is_right.await.unwrap_or(false) {
        return Ok(());
    }
    Err(DaemonError::NotProven { image: repository.describe(), blob: blob.id })
}
