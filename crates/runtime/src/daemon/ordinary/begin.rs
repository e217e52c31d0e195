//! Starts pulls of an image's layers that have no index.

use std::{sync::Arc, time::Instant};

use lazuli_image::{Digest, oci::Descriptor};
use lazuli_registry::Repository;

use super::{
    pull::Pull,
    state::{Ordinaries, Ordinary},
    vouched::Vouched,
    whole_layer::LayerError,
};
use crate::daemon::admission::logins::Lent;

impl Ordinaries {
    /// Begins to pull all layers of an image that are not known.
    pub(super) fn begin_pulls(
        &self,
        image: &Arc<Ordinary>,
        vouched: &Vouched,
        repository: &Arc<dyn Repository>,
        login: Option<Arc<Lent>>,
    ) {
        let store = &self.store;
        for (layer, diff_id) in image.layers() {
            let is_here = |index: &Digest| !store.is_wrong(index);
            let record = store.layer(&layer.digest).filter(|record| record.is_proven);
            let is_stated = vouched
                .of(&layer.digest, diff_id)
                .is_some_and(|vouched| is_here(&vouched.stated.index));
            let is_proven = record.is_some_and(|record| store.index(&record.index).is_some());
            if is_proven || is_stated || !is_readable(layer) {
                continue;
            }
            let repository_key = key_of(&**repository);
            let Some(ended) = self.pulls.begin(&repository_key, layer.digest) else { continue };
            let (layer, diff_id) = (layer.clone(), *diff_id);
            let pull = Pull {
                repository: repository.clone(),
                cache: self.cache.clone(),
                store: store.clone(),
                repository_key: repository_key.clone(),
            };
            let (pulls, login) = (self.pulls.clone(), login.clone());
            tokio::spawn(async move {
                let _login = login;
                let pulled = match pulls.slot(&repository_key).await {
                    Some(_slot) => pull.layer(&layer, diff_id).await,
                    None => Err(LayerError::Busy),
                };
                match &pulled {
                    Ok(()) => tracing::info!(layer = %layer.digest, "pulled and indexed"),
                    Err(error) => {
                        tracing::info!(layer = %layer.digest, %error, "left to containerd");
                    }
                }
                ended.send_replace(Some(pulled.map_err(|_| Instant::now())));
            });
        }
    }
}

/// The key of a repository in pulls and their queues.
pub(super) fn key_of(repository: &dyn Repository) -> String {
    repository.repository_name().unwrap_or_else(|| repository.describe())
}

/// Returns whether a layer may be readable in places; its first bytes decide.
pub(super) fn is_readable(layer: &Descriptor) -> bool {
    let kind = layer.media_type.as_str();
    kind.contains("tar") && !kind.ends_with("zstd") && !kind.contains("+encrypted")
}
