//! Makes a lazy image of an artifact. Its layers are the image's data as they are: only metadata is
//! made, which says where each file's chunks are in them.

use std::{collections::HashSet, mem, thread::available_parallelism};

use anyhow::{Result, bail};
use lazuli_builder::{
    BootstrapLayer,
    index::{ImageIndex, index},
};
use lazuli_image::{
    oci::{BlobLayer, IndexedLayer, LazyImage, Manifest},
    rafs::Bootstrap,
};
use lazuli_registry::BlobContent;

use super::{Conversion, ConversionRequest, Order, mount_source, source::to_index};
use crate::{image::push, progress};

/// What was made of an artifact.
pub(crate) struct MadeOfArtifact {
    pub(crate) layers: usize,
    pub(crate) files: usize,
    /// Bytes of metadata, and of content that had to be stored once more.
    pub(crate) made: u64,
    /// Bytes that the target did not have.
    pub(crate) uploaded: u64,
}

/// Refuses options that have no effect on an artifact.
pub(super) fn must_be_plain(request: &ConversionRequest) -> Result<()> {
    let ConversionRequest { source, dict, batch_size, order, keep_oci, .. } = request;
    let options = [
        ("--dict", dict.is_some()),
        ("--batch", *batch_size > 0),
        ("--keep-oci", *keep_oci),
        ("a trace", !matches!(order, Order::Source)),
    ];
    if let Some((option, _)) = options.into_iter().find(|(_, is_there)| *is_there) {
        bail!("{source} is an artifact, whose layers stay as they are: leave out {option}");
    }
    Ok(())
}

impl Conversion<'_> {
    /// Returns whether the source is an artifact: [`Conversion::publish_artifact`] makes the image.
    pub(crate) fn is_of_artifact(&self) -> bool {
        self.source.is_artifact
    }

    /// Reads an artifact, and stores the image made of it under its name.
    ///
    /// # Errors
    /// A layer can't be read in places, or the target failed.
    pub(crate) fn publish_artifact(mut self) -> Result<MadeOfArtifact> {
        let digests = mem::take(&mut self.source.digests);
        let layers = to_index(mem::take(&mut self.source.layers), digests);
        let count = layers.len();
        let bar = progress::bytes(self.source_size, "reading");
        let threads = available_parallelism().map_or(1, usize::from);
        let indexed = index(layers, &self.options.scratch, threads, &progress::Reading(&bar));
        bar.finish_and_clear();
        let mut indexed = indexed?;
        let bootstrap = indexed.bootstrap_layer();
        let image = self.describe_artifact(&indexed, &bootstrap)?;
        let mut signer = self.request.signer.take();
        if let (Some(signer), Some(origin)) = (&mut signer, self.origin.take()) {
            let stated = mem::take(&mut self.request.stated);
            signer.states(origin.converted(stated, None, Vec::new())?);
        }
        let files = indexed.inodes;
        let own = push::take_indexed(&mut indexed);
        let made = bootstrap.size() + own.iter().map(|(_, size, _)| size).sum::<u64>();
        let blobs = own.into_iter().chain(self.layers_as_blobs(&image)?).collect();
        let (target, mount_from) = (&*self.target, mount_source(&self.request));
        let pushed = push::push(target, blobs, bootstrap, image, mount_from, signer.as_ref());
        let uploaded = self.runtime.block_on(pushed)?;
        Ok(MadeOfArtifact { layers: count, files, made, uploaded })
    }

    fn describe_artifact(
        &mut self,
        indexed: &ImageIndex,
        bootstrap: &BootstrapLayer,
    ) -> Result<LazyImage> {
        let opened = Bootstrap::open(&indexed.bootstrap[..])?;
        let blobs = opened.blobs();
        let is_used = |index: &IndexedLayer| blobs.iter().any(|blob| blob.id == index.layer);
        let indexes = indexed.layers.iter().filter_map(IndexedLayer::of).filter(is_used);
        // Layers are listed beside their indexes: a registry keeps what a manifest lists.
        let data: Vec<_> =
            blobs.iter().map(|blob| BlobLayer::new(blob.id, blob.stored_size)).collect();
        let (layer, diff_id) =
            (BlobLayer::new(bootstrap.digest, bootstrap.size()), bootstrap.diff_id);
        let annotations = mem::take(&mut self.source.annotations);
        let (config, indexes) = (&self.source.config, indexes.collect::<Vec<_>>());
        Ok(LazyImage::with_indexes(config, &indexes, &data, layer, diff_id, annotations)?)
    }

    /// Those of the artifact's layers that the image has, each once. The target may lack them.
    fn layers_as_blobs(&self, image: &LazyImage) -> Result<Vec<push::Blob>> {
        let Some((manifest, repository)) = &self.source.image else { return Ok(Vec::new()) };
        let listed = Manifest::parse(&image.manifest)?.layers;
        let mut missing: HashSet<_> = listed.iter().map(|layer| layer.digest).collect();
        let layers = manifest.parsed.layers.iter().filter(|layer| missing.remove(&layer.digest));
        let content = || BlobContent::Stored(repository.clone());
        Ok(layers.map(|layer| (layer.digest, layer.size, content())).collect())
    }
}
