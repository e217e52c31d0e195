use std::{path::PathBuf, time::Instant};

use anyhow::{Context, Result, bail};
use clap::Args;
use indicatif::BinaryBytes;
use lazuli_builder::{
    BootstrapLayer, BuiltBlob,
    bake::{Hot, Optimized, optimize},
    pack_bootstrap,
};
use lazuli_image::{
    oci::{self, BlobLayer, ImageConfig, annotation},
    rafs::BlobRecord,
};
use lazuli_registry::{ImageName, Pull};
use tokio::runtime::Runtime;

use crate::{
    Session,
    image::{
        hot_blob,
        open::{self, OpenedImage},
        push,
        scratch::Scratch,
        sign, trace,
    },
    image_args,
};

/// Add a blob with everything that starts read to a lazy image, to be fetched in a few large
/// requests
///
/// The reads of starts come from a trace: the one that the node has recorded, else the one beside
/// the image, else --trace. All other blobs are reused. The same image and trace give the same
/// bytes.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// A lazy image: a registry reference or oci:DIR[:TAG]
    #[arg(value_name = "IMAGE")]
    image: String,
    /// Where the new image goes [default: IMAGE]
    #[arg(value_name = "TARGET")]
    target: Option<String>,
    /// Use this trace of IMAGE, which `lazuli trace show --save` wrote
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    #[command(flatten)]
    sign: sign::Sign,
    #[command(flatten)]
    access: image_args::Access,
}

pub(crate) fn run(session: &Session, arguments: &Arguments) -> Result<()> {
    let started = Instant::now();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let text = arguments.target.as_ref().unwrap_or(&arguments.image);
    let name: ImageName = text.parse()?;
    push::must_name_a_new_image(&name)?;
    let access = arguments.access.options(&session.config)?;
    let signer = arguments.sign.signer(&name, &access)?;
    let image = open::open(&arguments.image, &arguments.access, &session.config, &runtime)?;
    if arguments.target.is_none() {
        let document = runtime.block_on(image.repository.document(None))?;
        if document.digest != image.manifest.digest {
            bail!(
                "{name} leads to a lazy image but names an index or an ordinary image, which would be lost: say TARGET"
            );
        }
    }
    image.must_be_converted()?;
    if image.image.bootstrap.version() == 5 {
        let from = &image.name;
        bail!(
            "{from} is RAFS v5, which has no place for a hot blob: convert its source with `lazuli convert`"
        );
    }
    let trace = match &arguments.trace {
        Some(path) => trace::read(path)?,
        None => trace::find(&session.root, &image, &runtime)?,
    };
    let bootstrap = &*image.image.bootstrap;
    let chunks = Hot::of(&trace, bootstrap.blobs());
    if chunks.chunks.is_empty() {
        let from = &image.name;
        bail!(
            "the trace is not one of {from}, which has none of its {} hot chunks",
            chunks.unknown
        );
    }
    let repository = &*image.repository;
    let scratch = Scratch::new()?;
    let fetch = hot_blob::fetch(repository, bootstrap.blobs(), &chunks, scratch.path());
    let hot_blob = runtime.block_on(fetch)?;
    let optimized = optimize(bootstrap, &chunks, &hot_blob)?;
    let layer = pack(repository, &optimized, &hot_blob, &runtime)?;
    let config = runtime.block_on(lazuli_registry::config(repository, &image.manifest))?;
    let description = describe(&image, &optimized, &hot_blob, &layer, &config)?;

    let target = lazuli_registry::open(&name, &access)?;
    let mut blobs = Vec::from_iter(push::built(&hot_blob));
    blobs.extend(image.to_store(optimized.kept.iter().map(|record| &record.blob), &name));
    let mount_from = push::mount_source(&image.name, &name);
    let push = push::push(&*target, blobs, layer, description, mount_from, signer.as_ref());
    let uploaded = runtime.block_on(push)?;

    println!("{name}");
    let bytes = BinaryBytes(hot_blob.hot_bytes.unwrap_or_default());
    println!("  hot       {bytes} in {} chunks in a blob of their own", chunks.chunks.len());
    super::trace::report_unknown(&chunks, &arguments.image);
    let (kept, all) = (optimized.kept.len(), bootstrap.blobs().len());
    println!("  reused    {kept} of {all} blobs");
    println!(
        "  time      {:.1} s, uploaded {}",
        started.elapsed().as_secs_f64(),
        BinaryBytes(uploaded)
    );
    Ok(())
}

/// The bootstrap with the tables of all blobs.
fn pack(
    repository: &dyn Pull,
    optimized: &Optimized,
    hot_blob: &BuiltBlob,
    runtime: &Runtime,
) -> Result<BootstrapLayer> {
    let mut metas = Vec::new();
    for record in &optimized.kept {
        metas.push((record.blob.id, runtime.block_on(push::meta_file(repository, record))?));
    }
    metas.push((hot_blob.record.blob.id, hot_blob.meta_file.clone()));
    Ok(pack_bootstrap(&optimized.bootstrap, metas.iter().map(|(id, meta)| (*id, &meta[..]))))
}

fn describe(
    image: &OpenedImage,
    optimized: &Optimized,
    hot_blob: &BuiltBlob,
    bootstrap: &BootstrapLayer,
    config: &[u8],
) -> Result<oci::LazyImage> {
    let plain =
        |BlobRecord { blob, .. }: &BlobRecord| BlobLayer::new(blob.id, image.stored_size(blob));
    let mut blobs: Vec<_> = optimized.kept.iter().map(plain).collect();
    blobs.push(push::layer(hot_blob));
    let layer = BlobLayer::new(bootstrap.digest, bootstrap.size());
    let mut notes = image.manifest.parsed.annotations.clone();
    // Nobody has to guess any more.
    notes.remove(annotation::GUESS);
    let config =
        ImageConfig::parse(config).with_context(|| format!("the config of {}", image.name))?;
    Ok(oci::LazyImage::new(&config, &blobs, layer, bootstrap.diff_id, notes)?)
}
