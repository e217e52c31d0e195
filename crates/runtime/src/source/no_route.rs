//! The stand-in for a blob's sources while the route to them is unusable.

use std::ops::Range;

use async_trait::async_trait;
use bytes::Bytes;
use lazuli_image::Stored;
use lazuli_registry::{ImageName, RegistryError};

use super::{BlobSource, Progress, SourceError};

/// Fails each read with the reason why the image's route cannot be used. That is transient: readers
/// wait until the operator has put the files right, or their deadline is over.
#[derive(Debug)]
pub(crate) struct NoRoute {
    image: String,
    reason: SourceError,
}

impl NoRoute {
    /// For an image in use, to which there is no route because of `reason`.
    pub(crate) fn new(image: &ImageName, reason: RegistryError) -> Self {
        NoRoute { image: image.to_string(), reason: reason.into() }
    }
}

#[async_trait]
impl BlobSource for NoRoute {
    async fn read(&self, _: Range<Stored>, _: Progress<'_>) -> Result<Bytes, SourceError> {
        Err(self.reason.clone())
    }

    fn describe(&self) -> String {
        self.image.clone()
    }
}
