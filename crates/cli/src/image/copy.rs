//! Copies an image with everything that is stored beside it.

use std::sync::Arc;

use anyhow::{Context as _, Result};
use lazuli_registry::{
    Copied, Copy, ImageName, Options, Platform, Progress, RegistryError, Repository, open,
};

/// An image to copy, and what cosign 2 keeps under tags beside it.
pub(crate) struct WholeCopy {
    pub(crate) image: Copy,
    pub(crate) attachments: Vec<(String, Copy)>,
}

impl WholeCopy {
    /// Reads all manifests of `source`, for `platform` or for all of them.
    pub(crate) async fn plan(
        source: &ImageName,
        platform: Option<Platform>,
        options: &Options,
    ) -> Result<Self, RegistryError> {
        let image = Copy::plan(open(source, options)?, platform).await?;
        let beside = |tag: &str| source.tagged(tag).map(|name| open(&name, options)).transpose();
        let attachments = image.attachments(beside).await?;
        Ok(WholeCopy { image, attachments })
    }

    /// The total size in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        let attached = self.attachments.iter().map(|(_, attached)| attached.bytes());
        self.image.bytes() + attached.sum::<u64>()
    }

    /// Stores everything under the name `target`, and under tags beside it, which `open` opens.
    pub(crate) async fn run(
        &self,
        target: &ImageName,
        open: impl Fn(&ImageName) -> Result<Arc<dyn Repository>>,
        mount_from: Option<&str>,
        progress: Progress<'_>,
    ) -> Result<Copied> {
        let mut copied = Copied::default();
        // The image's name is pushed last: a node that sees it sees its signatures too.
        let beside = self.attachments.iter().map(|(tag, attached)| (target.tagged(tag), attached));
        for (name, copy) in beside.chain([(Some(target.clone()), &self.image)]) {
            let name = name.with_context(|| format!("{target} cannot have tags beside it"))?;
            copied += copy.run(&*open(&name)?, mount_from, progress).await?;
        }
        Ok(copied)
    }
}
