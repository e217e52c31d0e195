//! A lazy image as `check`, `inspect` and others look at it: its metadata in a temporary directory,
//! no daemon.

use std::sync::Arc;

use anyhow::{Result, bail};
use lazuli_image::{
    Blob, ChunkRef, Digest, Tree,
    compare::Content,
    oci::Descriptor,
    rafs::{Bootstrap, layout::Origin},
};
use lazuli_policy::Gate;
use lazuli_registry::{
    BlobContent, Found, ImageName, IndexTrust, Manifest, Options, Repository, lazy_manifest,
};
use lazuli_runtime::image::StoredImage;
use tokio::runtime::Runtime;

use crate::{
    config::Config,
    image::{push, scratch::Scratch},
    image_args::Access,
};

/// An image whose metadata was fetched and checked.
pub(crate) struct OpenedImage {
    pub(crate) name: ImageName,
    pub(crate) manifest: Manifest,
    pub(crate) image: StoredImage,
    /// The repository with its blobs.
    pub(crate) repository: Arc<dyn Repository>,
    _scratch: Scratch,
}

impl OpenedImage {
    /// Those of its `blobs` that an image at `target` needs: none if the target shares this image's
    /// place.
    pub(crate) fn to_store<'a>(
        &self,
        blobs: impl IntoIterator<Item = &'a Blob>,
        target: &ImageName,
    ) -> Vec<push::Blob> {
        if push::same_place(&self.name, target) {
            return Vec::new();
        }
        let content = || BlobContent::Stored(self.repository.clone());
        blobs.into_iter().map(|blob| (blob.id, self.stored_size(blob), content())).collect()
    }

    /// Bytes of a blob as the registry has it. Upstream's builder counts only a part of blobs that
    /// hold their bootstrap.
    pub(crate) fn stored_size(&self, blob: &Blob) -> u64 {
        self.layer(blob).map_or(blob.stored_size, |layer| layer.size)
    }

    /// Stored hot bytes at the beginning of a blob, if the registry knows.
    pub(crate) fn hot_bytes(&self, blob: &Blob) -> Option<u64> {
        self.layer(blob)?.hot_bytes()
    }

    /// Refuses an index, whose data is in the layers of an ordinary image, for operations that
    /// would change these.
    pub(crate) fn must_be_converted(&self) -> Result<()> {
        let (bootstrap, name) = (&self.image.bootstrap, &self.name);
        if bootstrap.tails().iter().any(|tail| tail.index.is_some()) {
            bail!("{name} is an ordinary image with an index: convert it with `lazuli convert`");
        }
        if bootstrap.origin() == Origin::Seekable {
            bail!(
                "{name} is an ordinary image, of eStargz or zstd:chunked: convert it with `lazuli convert`"
            );
        }
        Ok(())
    }

    fn layer(&self, blob: &Blob) -> Option<&Descriptor> {
        self.manifest.parsed.layers.iter().find(|layer| layer.digest == blob.id)
    }
}

/// Fetches the metadata of the image that `text` names.
pub(crate) fn open(
    text: &str,
    access: &Access,
    config: &Config,
    runtime: &Runtime,
) -> Result<OpenedImage> {
    open_with(text, &access.options(config)?, access, config, runtime)
}

/// The same, with `options` for how registries are reached.
pub(crate) fn open_with(
    text: &str,
    options: &Options,
    access: &Access,
    config: &Config,
    runtime: &Runtime,
) -> Result<OpenedImage> {
    let name: ImageName = text.parse()?;
    let repository = lazuli_registry::open(&name, options)?;
    let scratch = Scratch::new()?;
    let platform = access.platform()?;
    let replacement = options.referrers.replacement(&name);
    let manifest = runtime.block_on(async {
        let (platform, indexes) = (platform.as_ref(), options.indexes);
        let Found { manifest: found, referrers } =
            lazy_manifest(&*repository, &name, platform, replacement, indexes).await?;
        if found.parsed.lazy_base().is_some() || indexes != IndexTrust::Signed {
            return anyhow::Ok(found);
        }
        let gate = Gate::new(config.policy.clone(), None);
        let referrers = referrers.as_deref();
        let signed = gate.signed_index(&name, &found, referrers, &*repository, options).await?;
        Ok(signed.map_or(found, |index| index.manifest))
    })?;
    let directory = scratch.path();
    let seekable = options.indexes.seekable_layers(&name);
    let fetch = StoredImage::fetch(repository.clone(), &manifest, &directory, seekable);
    let (image, _) = runtime.block_on(fetch)?;
    Ok(OpenedImage { name, manifest, image, repository, _scratch: scratch })
}

/// The visible content of an image, to compare it with another.
pub(crate) struct Shown<'a, B> {
    pub(crate) tree: Tree,
    pub(crate) bootstrap: &'a Bootstrap<B>,
}

impl<B: AsRef<[u8]>> Content for Shown<'_, B> {
    fn tree(&self) -> &Tree {
        &self.tree
    }

    fn chunk(&self, chunk: ChunkRef) -> Option<(Digest, u32)> {
        let blob = self.bootstrap.blobs().get(usize::from(chunk.blob.0))?;
        blob.chunk(chunk.number).map(|chunk| (chunk.digest, chunk.decoded_size))
    }
}
