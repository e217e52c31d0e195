//! Deletes what was stored beside an image that was deleted.

use lazuli_image::{Digest, oci::media_type};
use lazuli_policy::media_type::BUNDLE;
use lazuli_registry::{RegistryError, Repository};

/// Deletes the indexes of the manifest `subject`, and the statements about them, unless the
/// registry has the manifest. Returns how many indexes there were.
///
/// # Errors
/// The registry cannot be asked now. One that deletes nothing is no error.
pub(super) async fn clean_up(
    repository: &dyn Repository,
    subject: &Digest,
) -> Result<usize, RegistryError> {
    match repository.document(Some(subject)).await {
        Ok(_) => return Ok(0),
        Err(error) if error.is_missing() => {}
        Err(error) => return Err(error),
    }
    let indexes = repository.referrers(subject, Some(media_type::LAYER_INDEX)).await?;
    let indexes: Vec<Digest> = indexes.into_iter().map(|entry| entry.digest).collect();
    for index in &indexes {
        // The statements first: those of an index that is gone would not be found again.
        let statements = repository.referrers(index, Some(BUNDLE)).await?;
        let statements: Vec<Digest> = statements.into_iter().map(|entry| entry.digest).collect();
        if !statements.is_empty() && !delete(repository, index, &statements).await? {
            return Ok(0);
        }
    }
    if !indexes.is_empty() && !delete(repository, subject, &indexes).await? {
        return Ok(0);
    }
    Ok(indexes.len())
}

/// Returns whether the registry deletes at all.
async fn delete(
    repository: &dyn Repository,
    subject: &Digest,
    manifests: &[Digest],
) -> Result<bool, RegistryError> {
    match repository.delete_referrers(subject, manifests).await {
        Ok(()) => Ok(true),
        Err(error) if error.is_transient() => Err(error),
        Err(error) => {
            tracing::warn!(%error, "what is stored beside a deleted image stays");
            Ok(false)
        }
    }
}
