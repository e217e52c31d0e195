use std::{path::PathBuf, time::Instant};

use anyhow::{Context, Result, bail};
use clap::Args;
use indicatif::BinaryBytes;
use lazuli_builder::{
    Base, BootstrapLayer, Built, KnownBlob, Layer, LayerSource, Options, bootstrap_layer,
    build_with,
};
use lazuli_image::oci::{self, BlobLayer, ImageConfig, annotation};
use lazuli_registry::ImageName;
use tokio::runtime::Runtime;

use crate::{
    Session,
    container::changes::{self, Written},
    image::{
        open::{self, OpenedImage},
        push,
        scratch::Scratch,
        sign,
    },
    image_args, progress,
};

/// Make an image of a container's writes, on top of the container's own image
///
/// Only content that the image does not have is stored, and its blobs are used in place. The
/// container keeps running: its writes meanwhile may or may not be in the image.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// A container on a lazy image: the id that containerd or `lazuli status` gives it, or the
    /// beginning of that. With --base, the upper directory of an overlayfs
    #[arg(value_name = "CONTAINER|DIR")]
    container: String,
    /// Where the new image goes: a registry reference or oci:DIR[:TAG]
    #[arg(value_name = "IMAGE")]
    target: String,
    /// The lazy image below DIR
    #[arg(long, value_name = "IMAGE")]
    base: Option<String>,
    #[command(flatten)]
    sign: sign::Sign,
    #[command(flatten)]
    access: image_args::Access,
}

pub(crate) fn run(session: &Session, arguments: &Arguments) -> Result<()> {
    let started = Instant::now();
    let name: ImageName = arguments.target.parse()?;
    push::must_name_a_new_image(&name)?;
    let access = arguments.access.options(&session.config)?;
    let signer = arguments.sign.signer(&name, &access)?;
    let written = match &arguments.base {
        Some(base) => {
            let layers = vec![PathBuf::from(&arguments.container)];
            Written { image: base.parse()?, layers }
        }
        None => changes::find(session, &arguments.container)?,
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let base = written.image.to_string();
    let base = open::open(&base, &arguments.access, &session.config, &runtime)?;
    if base.image.bootstrap.version() == 5 {
        let from = &base.name;
        bail!(
            "{from} is RAFS v5, whose blobs no image of v6 can have: convert its source with `lazuli convert`"
        );
    }
    base.must_be_converted()?;
    // For a container, the layers on top of its image exist here.
    if arguments.base.is_some() {
        base.image.must_be_whole(base.name.to_string())?;
    }

    let scratch = Scratch::new()?;
    let mut options = Options::new(scratch.path());
    let Base { dictionary, layer } = lowest(&base, &mut options, &runtime)?;
    let uppers = written.layers.iter().map(|layer| Layer {
        name: layer.display().to_string(),
        stored_size: None,
        source: LayerSource::Upper(layer.clone()),
    });
    let layers = std::iter::once(layer).chain(uppers).collect();
    let bar = progress::bytes(None, "reading");
    let reading = progress::Reading(&bar);
    let built = build_with(dictionary, layers, &options, &reading, &mut |_| {})?;
    bar.finish_and_clear();

    let bootstrap = bootstrap_layer(&built);
    let config = runtime.block_on(lazuli_registry::config(&*base.repository, &base.manifest))?;
    let config =
        ImageConfig::parse(&config).with_context(|| format!("the config of {}", base.name))?;
    let image = describe(&base, &built, &bootstrap, &config)?;
    let target = lazuli_registry::open(&name, &access)?;
    let mut blobs: Vec<_> = built.blobs.iter().filter_map(push::built).collect();
    let known = built.blobs.iter().filter(|blob| blob.file.is_none());
    blobs.extend(base.to_store(known.map(|blob| &blob.record.blob), &name));
    let metadata = bootstrap.size();
    let mount_from = push::mount_source(&base.name, &name);
    let push = push::push(&*target, blobs, bootstrap, image, mount_from, signer.as_ref());
    let uploaded = runtime.block_on(push)?;

    println!("{name}");
    println!("  base      {}", base.name);
    let report = &built.report;
    let (new, known) = (report.blobs - report.known_blobs, report.known_blobs);
    let bytes = BinaryBytes(report.stored_bytes - report.known_bytes);
    println!("  new       {bytes} in {new} blobs, {known} of the base reused");
    println!("  metadata  {} for {} files", BinaryBytes(metadata), report.inodes);
    let seconds = started.elapsed().as_secs_f64();
    println!("  time      {seconds:.1} s, uploaded {}", BinaryBytes(uploaded));
    Ok(())
}

/// The base as the lowest layer, with the tables of its blobs.
fn lowest(base: &OpenedImage, options: &mut Options, runtime: &Runtime) -> Result<Base> {
    let bootstrap = &*base.image.bootstrap;
    let mut blobs = Vec::new();
    for (record, hot) in bootstrap.blob_records().into_iter().zip(&base.image.hot) {
        let meta_file = runtime.block_on(push::meta_file(&*base.repository, &record))?;
        blobs.push(KnownBlob { record, meta_file, hot_bytes: Some(*hot).filter(|hot| *hot > 0) });
    }
    let lowest = Base::new(base.name.to_string(), bootstrap, blobs, options);
    lowest.with_context(|| base.name.to_string())
}

fn describe(
    base: &OpenedImage,
    built: &Built,
    bootstrap: &BootstrapLayer,
    config: &ImageConfig,
) -> Result<oci::LazyImage> {
    let blobs = built.blobs.iter().map(|blob| {
        let size = base.stored_size(&blob.record.blob);
        BlobLayer { size, ..push::layer(blob) }
    });
    let blobs: Vec<_> = blobs.collect();
    let layer = BlobLayer::new(bootstrap.digest, bootstrap.size());
    let mut notes = base.manifest.parsed.annotations.clone();
    // It describes only the base.
    notes.remove(annotation::SOURCE_DIGEST);
    Ok(oci::LazyImage::new(&config.committed()?, &blobs, layer, bootstrap.diff_id, notes)?)
}
