//! `--keep-oci`: the source image, stored beside the lazy one under the same tag.
//!
//! ```text
//! index ─┬ ordinary manifest   linux/amd64                        byte for byte the source's
//!        └ lazy manifest       linux/amd64 with os.features: LAZY
//! ```

use std::sync::Arc;

use anyhow::{Result, bail};
use lazuli_image::{
    Digest,
    oci::{Descriptor, ImageConfig, LazyImage, both, media_type},
};
use lazuli_registry::{BlobContent, Document, Manifest, Pull, Push, PushBy, Repository};
use tokio::task::JoinHandle;

use crate::image::{push, sign::Signer};

/// Whether the target is the source's own tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InPlace {
    Yes,
    No,
}

/// The source image while it is copied to the target.
pub(crate) struct KeptImage {
    manifest: Manifest,
    /// Copies config and layers while the conversion reads and compresses.
    blobs: JoinHandle<Result<u64>>,
    /// What the tag names that is going to be replaced, if that is the source itself.
    replaces: Option<Digest>,
}

impl KeptImage {
    /// Begins to copy the image from `from` to `to`. `mount_from` is the repository of `from`, if
    /// `to` can mount blobs from it. Call it on a runtime.
    ///
    /// # Errors
    /// The image has non-distributable layers.
    pub(crate) fn begin(
        manifest: Manifest,
        from: Arc<dyn Pull>,
        to: Arc<dyn Push>,
        mount_from: Option<String>,
        in_place: InPlace,
    ) -> Result<Self> {
        let Descriptor { digest, size, .. } = manifest.parsed.config;
        let layers = manifest.parsed.layers.iter().map(|layer| (layer.digest, layer.size));
        let mut layers_of_image = manifest.parsed.layers.iter();
        if let Some(layer) = layers_of_image.find(|layer| !layer.is_distributable()) {
            bail!("layer {} is {}, which is not to be given away", layer.digest, layer.media_type);
        }
        let content = || BlobContent::Stored(from.clone());
        let blobs: Vec<_> = layers
            .chain([(digest, size)])
            .map(|(digest, size)| (digest, size, content()))
            .collect();
        let blobs =
            tokio::spawn(
                async move { push::upload(&*to, blobs, mount_from.as_deref(), &|_| {}).await },
            );
        let named = manifest.index.as_ref().map_or(manifest.digest, |index| index.digest);
        let replaces = (in_place == InPlace::Yes).then_some(named);
        Ok(KeptImage { manifest, blobs, replaces })
    }

    /// Stores both manifests and an index of them under the tag of `to`, which already has the lazy
    /// image's blobs. Returns the bytes that `to` did not have.
    pub(crate) async fn finish(
        self,
        to: &dyn Repository,
        lazy: LazyImage,
        config: &ImageConfig,
        signer: Option<&Signer>,
    ) -> Result<u64> {
        let uploaded = self.blobs.await??;
        let lazy = Document::new(lazy.manifest, media_type::MANIFEST);
        let Manifest { raw, digest, media_type, .. } = self.manifest;
        let ordinary = Document { raw, digest, media_type };
        let [first, second] = [&ordinary, &lazy].map(|Document { raw, digest, media_type }| {
            Descriptor::plain(media_type, *digest, raw.len() as u64)
        });
        let index = both(first, second, &config.platform()?)?;
        let index = Document::new(index, media_type::INDEX);
        for document in [&ordinary, &lazy] {
            to.push_document(document, PushBy::Digest).await?;
        }
        if let Some(signer) = signer {
            to.push_document(&index, PushBy::Digest).await?;
            // Clients that pull the tag verify the index, or the manifest that they choose from it.
            signer.sign(to, &ordinary).await?;
            signer.sign_lazy(to, &lazy).await?;
            signer.sign(to, &index).await?;
        }
        if let Some(expected) = self.replaces {
            must_be_named(to, &expected).await?;
        }
        to.push_document(&index, PushBy::Tag).await?;
        Ok(uploaded)
    }
}

/// Checks that the tag still names what was converted. Registries cannot compare and replace, but
/// what is pushed in the minutes of a conversion is found.
async fn must_be_named(to: &dyn Repository, expected: &Digest) -> Result<()> {
    let named = to.document(None).await?.digest;
    if named != *expected {
        bail!(
            "{} was pushed again meanwhile: it names {named} now, and {expected} was converted; \
             convert it once more",
            to.describe()
        );
    }
    Ok(())
}
