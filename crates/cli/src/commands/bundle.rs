use std::{io, path::PathBuf, sync::Arc, time::Instant};

use anyhow::{Context as _, Result, bail};
use clap::Args;
use indicatif::BinaryBytes;
use lazuli_image::oci::ImageConfig;
use lazuli_registry::{
    Bundle, ImageName, Layout, Options, Platform, Pull as _, RegistryError, Repository, config,
    into_blocking,
};
use lazuli_runtime::daemon::index_bundled_layer;
use tokio::runtime::Runtime;

use crate::{
    Session, image::copy::WholeCopy, image_args, path_context::PathContext as _, progress,
};

/// Put images into a directory from which nodes start containers without a network
///
/// The directory becomes /var/lib/lazuli/bundle in the image of a node, which pulls from it while
/// the registry of an image cannot be reached. It gets each image for one platform, with its
/// signatures, statements and traces. Layers of ordinary images are indexed, so that containers
/// start without unpacking them.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// The directory; images are added to those that it has
    #[arg(long, value_name = "DIR")]
    to: PathBuf,
    /// Images in registries, as pods name them
    #[arg(value_name = "IMAGE", required = true)]
    images: Vec<String>,
    #[command(flatten)]
    access: image_args::Access,
}

pub(crate) fn run(session: &Session, arguments: &Arguments) -> Result<()> {
    let started = Instant::now();
    let options = arguments.access.options(&session.config)?;
    let platform = arguments.access.platform()?.unwrap_or_else(|| Platform::host().lazy());
    let to = std::path::absolute(&arguments.to).cannot("use", &arguments.to)?;
    let (to, runtime) = (To { bundle: Bundle::at(&to), directory: to }, Runtime::new()?);
    for image in &arguments.images {
        let add = to.add(&runtime, image, &platform, &options);
        add.with_context(|| format!("cannot put {image} into {}", to.directory.display()))?;
    }
    println!("{}", to.directory.display());
    println!("  images    {}", arguments.images.len());
    println!("  time      {:.1} s", started.elapsed().as_secs_f64());
    Ok(())
}

/// The directory.
struct To {
    directory: PathBuf,
    bundle: Bundle,
}

impl To {
    fn add(
        &self,
        runtime: &Runtime,
        image: &str,
        platform: &Platform,
        options: &Options,
    ) -> Result<()> {
        let source: ImageName = image.parse()?;
        self.open(&source)?;
        // Fails if there is none for the platform: a list of images would be copied without any.
        let from = lazuli_registry::open(&source, options)?;
        runtime.block_on(from.manifest(Some(platform)))?;
        let copy = WholeCopy::plan(&source, Some(platform.clone()), options);
        let copy = runtime.block_on(copy)?;
        let bar = progress::bytes(Some(copy.bytes()), "copying");
        let open = |name: &ImageName| Ok(Arc::new(self.open(name)?) as Arc<dyn Repository>);
        runtime.block_on(copy.run(&source, open, None, &|bytes| bar.inc(bytes)))?;
        bar.finish_and_clear();
        println!("{source}");
        println!("  digest    {}", copy.image.digest());
        println!("  size      {}", BinaryBytes(copy.bytes()));
        self.index(runtime, &self.open(&source)?, platform)
    }

    /// Opens an image in the bundle.
    fn open(&self, image: &ImageName) -> Result<Layout> {
        match image {
            ImageName::Registry(image) => Ok(Layout::open(self.bundle.entry(image))),
            ImageName::Layout(_) => {
                bail!("only an image in a registry has a name that pods can use")
            }
        }
    }

    /// Indexes the layers of an ordinary image.
    fn index(&self, runtime: &Runtime, image: &Layout, platform: &Platform) -> Result<()> {
        let wanted = platform.clone().ordinary();
        let manifest = match runtime.block_on(image.manifest(Some(&wanted))) {
            // All of its images are lazy.
            Err(RegistryError::NoPlatform { .. }) => return Ok(()),
            manifest => manifest?,
        };
        let parsed = &manifest.parsed;
        if parsed.lazy_base().is_some() || parsed.artifact_type.is_some() {
            return Ok(());
        }
        let config = ImageConfig::parse(&runtime.block_on(config(image, &manifest))?)?;
        let bar = progress::bytes(None, "indexing");
        for (layer, diff_id) in parsed.layers.iter().zip(config.diff_ids()?) {
            let open = || {
                let stored = runtime.block_on(image.blob(&layer.digest, layer.size))?;
                Ok::<_, RegistryError>(into_blocking(stored, runtime.handle().clone()))
            };
            let stored = bar.wrap_read(open()?);
            if let Some(why) = index_bundled_layer(&self.directory, layer, diff_id, stored)? {
                // Not because it is damaged: the reader checks the digest.
                io::copy(&mut open()?, &mut io::sink())
                    .with_context(|| format!("cannot read layer {}", layer.digest))?;
                println!("  unpacked  {}: {why}", layer.digest);
            }
        }
        bar.finish_and_clear();
        Ok(())
    }
}
