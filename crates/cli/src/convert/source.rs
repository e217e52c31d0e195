//! The source of a conversion: its layers as the builder reads them, and its config.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, IsTerminal as _, Read},
    os::fd::AsFd as _,
    sync::Arc,
};

use anyhow::{Context, Result, bail};
use lazuli_builder::{Dictionary, Layer, LayerSource, Options, index::IndexLayer};
use lazuli_image::{
    Digest,
    oci::{ArtifactLayer, Descriptor, ImageConfig, Platform, annotation},
};
use lazuli_registry::{
    DockerArchive, Manifest, Options as RegistryOptions, Pull, Source, into_blocking,
};
use tokio::runtime::{Handle, Runtime};

use crate::convert::layer_cache::LayerCache;

/// An opened source.
pub(crate) struct Opened {
    /// Lowest first.
    pub(crate) layers: Vec<Layer>,
    /// The digest of each layer; `None` for a directory or a tar.
    pub(crate) digests: Vec<Option<Digest>>,
    /// Its config, or an empty one.
    pub(crate) config: ImageConfig,
    /// The manifest and repository, if the source is an image of a registry or layout.
    pub(crate) image: Option<(Manifest, Arc<dyn Pull>)>,
    /// Annotations for the lazy image's manifest.
    pub(crate) annotations: BTreeMap<String, String>,
    /// Whether it is no image, but an artifact whose layers are files.
    pub(crate) is_artifact: bool,
}

impl Opened {
    /// Bytes of all layers, if they are known.
    pub(crate) fn stored_size(&self) -> Option<u64> {
        self.layers.iter().map(|layer| layer.stored_size).sum()
    }

    /// The same without known layers, which are not read again.
    pub(crate) fn unread_size(&self) -> Option<u64> {
        let unread = |layer: &&Layer| !matches!(layer.source, LayerSource::Known(_));
        self.layers.iter().filter(unread).map(|layer| layer.stored_size).sum()
    }

    /// Replaces layers by their records of an earlier conversion, if `dictionary` has all of their
    /// content, and trims the dictionary to blobs that the other layers can use.
    pub(crate) fn take_known(
        &mut self,
        dictionary: &mut Dictionary,
        cache: &LayerCache,
        options: &Options,
    ) {
        let record = |digest: &Option<Digest>| cache.get(digest.as_ref()?, options);
        let records: Vec<_> = self.digests.iter().map(record).collect();
        let here = dictionary.trim(&records, options);
        for ((layer, record), here) in self.layers.iter_mut().zip(records).zip(here) {
            if let (Some(record), true) = (record, here) {
                layer.source = LayerSource::Known(Box::new(record));
            }
        }
    }
}

/// The layers of an image of a registry or layout, to be indexed.
pub(crate) fn to_index(layers: Vec<Layer>, digests: Vec<Option<Digest>>) -> Vec<IndexLayer> {
    let layer = |(layer, digest): (Layer, Option<Digest>)| {
        let (file, source) = match layer.source {
            LayerSource::Tar(source) => (None, source),
            LayerSource::File(path, source) => (Some(path), source),
            _ => return None,
        };
        let stored_size = layer.stored_size.unwrap_or_default();
        Some(IndexLayer { digest: digest?, stored_size, file, source })
    };
    layers.into_iter().zip(digests).filter_map(layer).collect()
}

/// Opens a source. Layers are fetched when they are read.
pub(crate) fn open(
    source: &Source,
    platform: Option<Platform>,
    access: &RegistryOptions,
    runtime: &Runtime,
) -> Result<Opened> {
    // Lazy images are made from ordinary ones.
    let platform = platform.unwrap_or_else(Platform::host).ordinary();
    match source {
        Source::Image(name) => {
            let repository = lazuli_registry::open(name, access)?;
            runtime.block_on(image(repository, &platform))
        }
        Source::DockerArchive(file, reference) => {
            let archive = Arc::new(DockerArchive::open(file, reference.as_deref())?);
            let config = ImageConfig::parse(archive.config())?;
            let layers = archive.layers().iter().map(|layer| Layer {
                name: format!("{source}, layer {}", layer.diff_id()),
                stored_size: Some(layer.size()),
                source: LayerSource::Tar(Box::new(layer.reader())),
            });
            let digests = archive.layers().iter().map(|layer| Some(layer.diff_id())).collect();
            let (layers, annotations) = (layers.collect(), BTreeMap::new());
            Ok(Opened { layers, digests, config, image: None, annotations, is_artifact: false })
        }
        Source::Tar(path) if path.as_os_str() == "-" => {
            let input = io::stdin();
            if input.is_terminal() {
                bail!("{source}: a tar does not come from a terminal: give it a file or a program");
            }
            let input = File::from(input.as_fd().try_clone_to_owned()?);
            Ok(rootfs(source, None, LayerSource::Tar(Box::new(input)), platform))
        }
        Source::Tar(path) => {
            let context = || format!("cannot read {}", path.display());
            let file = File::open(path).with_context(context)?;
            let stored_size = Some(file.metadata().with_context(context)?.len());
            Ok(rootfs(source, stored_size, LayerSource::Tar(Box::new(file)), platform))
        }
        Source::Directory(path) => {
            Ok(rootfs(source, None, LayerSource::Directory(path.clone()), platform))
        }
    }
}

fn rootfs(
    source: &Source,
    stored_size: Option<u64>,
    layer: LayerSource,
    platform: Platform,
) -> Opened {
    let layer = Layer { name: source.to_string(), stored_size, source: layer };
    let config = ImageConfig::new(&platform);
    let (layers, digests, annotations) = (vec![layer], vec![None], BTreeMap::new());
    Opened { layers, digests, config, image: None, annotations, is_artifact: false }
}

async fn image(repository: Arc<dyn Pull>, platform: &Platform) -> Result<Opened> {
    let manifest = repository.manifest(Some(platform)).await?;
    let is_artifact = manifest.parsed.is_artifact();
    let config = match is_artifact {
        true => ImageConfig::new(platform),
        false => {
            let config = lazuli_registry::config(&*repository, &manifest).await?;
            let context = || format!("the config of {}", repository.describe());
            ImageConfig::parse(&config).with_context(context)?
        }
    };
    // Only the digest: a name would make the result depend on where the source was read from.
    let annotations = [(annotation::SOURCE_DIGEST.to_owned(), manifest.digest.to_string())];
    let layers = manifest.parsed.layers.iter().map(|layer| {
        let reader = Fetch::Waiting(repository.clone(), Box::new(layer.clone()), Handle::current());
        let source = match layer.artifact_layer() {
            ArtifactLayer::File(path) if is_artifact => LayerSource::File(path, Box::new(reader)),
            _ => LayerSource::Tar(Box::new(reader)),
        };
        Layer { name: layer.digest.to_string(), stored_size: Some(layer.size), source }
    });
    let digests = manifest.parsed.layers.iter().map(|layer| Some(layer.digest)).collect();
    let (layers, annotations) = (layers.collect(), annotations.into());
    let image = Some((manifest, repository));
    Ok(Opened { layers, digests, config, image, annotations, is_artifact })
}

/// A layer that is requested when its first byte is read: an image may have more layers than a
/// registry allows connections, and an idle one would be closed.
enum Fetch {
    Waiting(Arc<dyn Pull>, Box<Descriptor>, Handle),
    Reading(Box<dyn Read + Send>),
}

impl Read for Fetch {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match self {
                Fetch::Reading(reader) => return reader.read(buffer),
                Fetch::Waiting(repository, layer, handle) => {
                    let reader = handle
                        .block_on(repository.blob(&layer.digest, layer.size))
                        .map_err(io::Error::other)?;
                    *self = Fetch::Reading(Box::new(into_blocking(reader, handle.clone())));
                }
            }
        }
    }
}
