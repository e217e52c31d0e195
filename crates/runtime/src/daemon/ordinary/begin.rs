//! Has the layers of an image pulled that have no index.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use lazuli_image::{Digest, oci::Descriptor};
use lazuli_policy::SignedIndex;
use lazuli_registry::Repository;

use super::{pull::Pull, state::Ordinary};
use crate::daemon::{logins::Lent, node::Node};

impl Node {
    /// Begins to pull all layers of an image that are not known.
    pub(super) fn begin_pulls(
        &self,
        image: &Arc<Ordinary>,
        signed: Option<&SignedIndex>,
        repository: &Arc<dyn Repository>,
        login: Option<Arc<Lent>>,
    ) {
        let store = &self.ordinaries.store;
        for (layer, diff_id) in image.layers() {
            let is_here = |index: &Digest| !store.is_wrong(index);
            let record = store.layer(&layer.digest).filter(|record| record.is_proven);
            let is_stated = signed.is_some_and(|signed| {
                let mut stated = signed.indexing.layers.iter();
                stated.any(|it| {
                    it.layer == layer.digest && it.diff_id == *diff_id && is_here(&it.index)
                })
            });
            let is_proven = record.is_some_and(|record| store.index(&record.index).is_some());
            if is_proven || is_stated || !is_readable(layer) {
                continue;
            }
            let (outcome, is_new) = self.ordinaries.pulls.join(layer.digest);
            if !is_new {
                continue;
            }
            let (layer, diff_id) = (layer.clone(), *diff_id);
            let pull = Pull {
                repository: repository.clone(),
                cache: self.cache.clone(),
                store: store.clone(),
            };
            let (turns, login) = (self.ordinaries.pulls.turns.clone(), login.clone());
            tokio::spawn(async move {
                let begin = async {
                    let _login = login;
                    let _turn = turns.acquire_owned().await;
                    let pulled = pull.layer(&layer, diff_id).await;
                    match &pulled {
                        Ok(()) => tracing::info!(layer = %layer.digest, "pulled and indexed"),
                        Err(error) => tracing::info!(layer = %layer.digest, %error,
                            "left to containerd"),
                    }
                    pulled.map_err(|_| Instant::now())
                };
                outcome.get_or_init(|| begin).await;
            });
        }
    }

    /// Waits until a layer is pulled; false if it is not going to be.
    pub(super) async fn pulled(&self, layer: &Descriptor, may_pull: bool) -> bool {
        let pull = self.ordinaries.pulls.find(&layer.digest).filter(|_| may_pull);
        let Some(outcome) = pull else { return false };
        // The task that pulls begins it; the first caller waits for it.
        while !outcome.initialized() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        outcome.get().is_some_and(Result::is_ok)
    }
}

/// Whether a layer may be one that can be read in places; its first bytes tell.
fn is_readable(layer: &Descriptor) -> bool {
    let kind = layer.media_type.as_str();
    kind.contains("tar") && !kind.ends_with("zstd") && !kind.contains("+encrypted")
}
