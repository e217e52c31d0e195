//! Proof that a source has a blob.

use std::{
    hash::{BuildHasher as _, RandomState},
    sync::Arc,
};

use tokio::time::Instant;

use super::{CachedBlob, commit::check_one};
use crate::{
    error::ReadError,
    fetch::Wanted,
    sharing::priority_semaphore::Claim,
    source::{BlobSource, tracked_source::TrackedSource},
};

impl CachedBlob {
    /// Fetches a chunk chosen at random from `source`, and checks it. Nothing is kept.
    ///
    /// # Errors
    /// `source` does not deliver the chunk.
    pub(crate) async fn prove(
        self: &Arc<Self>,
        source: Arc<dyn BlobSource>,
    ) -> Result<(), ReadError> {
        let chunks = self.layout.chunks();
        if chunks.is_empty() {
            return Ok(());
        }
        let random = RandomState::new().hash_one(self.id());
        let at = (random % chunks.len() as u64) as usize;
        let range = chunks[at].stored..chunks[at].stored_end();
        let deadline = Instant::now() + self.settings.deadline;
        let wanted = Wanted { range, part: u64::MAX, deadline };
        let claim = Claim::new(self.account(), || true);
        let source = [Arc::new(TrackedSource::new(source))];
        let answer = self.fetch(&claim).get_from(&source, &wanted).await?;
        check_one(self, at, answer).await
    }
}
