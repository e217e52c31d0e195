//! A blob in a registry or an OCI layout directory.

use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use bytes::Bytes;
use lazuli_image::{Digest, Stored};
use lazuli_registry::{Health, Pull, RegistryError, RequestPolicy, ServerTraffic, Urgency};

use super::{BlobSource, Progress, SourceError};

/// One blob of a [`Pull`] repository.
#[derive(Debug)]
pub struct RepositorySource {
    repository: Arc<dyn Pull>,
    policy: RequestPolicy,
    blob: Digest,
    size: u64,
    /// Whether the whole blob was announced to be read from here.
    is_expected: AtomicBool,
}

impl RepositorySource {
    /// The blob with this digest and this many bytes.
    pub fn new(repository: Arc<dyn Pull>, blob: Digest, size: u64) -> Self {
        let policy = repository.request_policy();
        RepositorySource { repository, policy, blob, size, is_expected: AtomicBool::new(false) }
    }
}

#[async_trait]
impl BlobSource for RepositorySource {
    async fn read(
        &self,
        range: Range<Stored>,
        arrived: Progress<'_>,
    ) -> Result<Bytes, SourceError> {
        // Servers truncate a range that ends behind the blob, which would look like a transient
        // fault.
        if range.end.0 > self.size || range.start > range.end {
            return Err(SourceError::OutOfRange { range, size: self.size });
        }
        Ok(self.repository.read(&self.blob, self.size, range, arrived).await?)
    }

    fn describe(&self) -> String {
        self.repository.describe()
    }

    fn expect_whole(&self) {
        if !self.is_expected.swap(true, Ordering::Relaxed) {
            self.policy.expect_whole(&self.blob);
        }
    }

    async fn suits(&self, range: &Range<Stored>, urgency: Urgency) -> bool {
        // A peer that fetches the whole blob is fetching this range. Demand may be served sooner
        // elsewhere.
        let comes = self.is_expected.load(Ordering::Relaxed) && urgency == Urgency::Prefetch;
        comes || self.policy.suits_range(&self.blob, self.size, range, urgency).await
    }

    fn hedge_after(&self) -> Option<Duration> {
        self.policy.hedge_after()
    }

    fn traffic(&self) -> Option<&ServerTraffic> {
        self.policy.traffic()
    }

    fn server_health(&self) -> Option<&Arc<Health>> {
        self.policy.health()
    }
}

impl From<RegistryError> for SourceError {
    fn from(error: RegistryError) -> Self {
        SourceError::Failed {
            transient: error.is_transient(),
            retry_after: error.retry_after(),
            source: Arc::new(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::source::contract;

    #[tokio::test]
    async fn a_layout_keeps_the_contract_of_a_source() {
        let content = contract::content();
        let digest = lazuli_image::Algorithm::Sha256.digest(&content);
        let dir = tempfile::tempdir().unwrap();
        let blobs = dir.path().join("blobs/sha256");
        fs::create_dir_all(&blobs).unwrap();
        fs::write(blobs.join(digest.hex()), &content).unwrap();
        let name = format!("oci:{}", dir.path().display()).parse().unwrap();
        let repository = lazuli_registry::open(&name, &Default::default()).unwrap();
        let source = RepositorySource::new(repository, digest, content.len() as u64);
        contract::check(&source, &content).await;
    }
}
