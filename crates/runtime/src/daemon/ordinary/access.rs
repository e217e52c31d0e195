//! Which layers of an image its clients may read.

use std::{
    sync::Mutex,
    time::{Duration, Instant},
};

use futures_util::{StreamExt as _, stream};
use lazuli_image::Digest;
use lazuli_registry::{Login, Pull, RegistryError};

use crate::sync::lock;

/// How long the registry's permission counts: long enough for the layers of one pull.
const LIFE: Duration = Duration::from_secs(30);

/// Maximum number of an image's layers that a registry is asked about at a time.
pub(super) const AT_A_TIME: usize = 8;

/// Recent permissions by the registry for the layers of one image.
#[derive(Debug, Default)]
pub(super) struct Access(Mutex<Vec<Permission>>);

#[derive(Debug)]
struct Permission {
    login: Option<Login>,
    layer: Digest,
    at: Instant,
}

impl Access {
    /// Returns whether `repository` gives `layer` to a client with `login`, with which it was
    /// opened.
    ///
    /// # Errors
    /// The registry does not answer.
    pub(super) async fn allows(
        &self,
        repository: &dyn Pull,
        login: Option<&Login>,
        layer: Digest,
    ) -> Result<bool, RegistryError> {
        let is_it = |known: &Permission| {
            known.layer == layer && known.login.as_ref() == login && known.at.elapsed() < LIFE
        };
        if lock(&self.0).iter().any(is_it) {
            return Ok(true);
        }
        let is_allowed = repository.has_blob(&layer).await?;
        if is_allowed {
            let mut known = lock(&self.0);
            known.retain(|permission| permission.at.elapsed() < LIFE);
            known.push(Permission { login: login.cloned(), layer, at: Instant::now() });
        }
        Ok(is_allowed)
    }

    /// Asks for several `layers` at once. Errors are the later requests' to report.
    pub(super) async fn ask_ahead(
        &self,
        repository: &dyn Pull,
        login: Option<&Login>,
        layers: impl Iterator<Item = Digest>,
    ) {
        let questions = layers.map(|layer| self.allows(repository, login, layer));
        let questions = stream::iter(questions.collect::<Vec<_>>());
        questions.buffer_unordered(AT_A_TIME).for_each(async |_| ()).await;
    }
}
