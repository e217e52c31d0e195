use std::{collections::BTreeMap, time::Instant};

use anyhow::{Context, Result, bail};
use clap::Args;
use indicatif::BinaryBytes;
use lazuli_builder::{BootstrapLayer, Combined, SourceImage, TreeOf, combine, pack_bootstrap};
use lazuli_image::{
    oci::{self, BlobLayer, ImageConfig, NotedGuess},
    rafs::BlobRecord,
};
use lazuli_registry::ImageName;
use tokio::runtime::Runtime;

use crate::{
    Session,
    image::{
        open::{self, OpenedImage},
        push, sign,
    },
    image_args,
};

/// Merge several lazy images into one, with their file trees stacked
///
/// The first image is the lowest: of two files with the same path, the later image's is visible;
/// directories are merged. Config and command are those of the last image. All blobs stay as they
/// are, so only metadata is fetched unless TARGET is elsewhere. The same images give the same
/// bytes.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Lazy images: registry references or oci:DIR[:TAG]
    #[arg(value_name = "IMAGE", required = true, num_args = 2..)]
    images: Vec<String>,
    /// Where the new image goes
    #[arg(value_name = "TARGET", required = true)]
    target: String,
    #[command(flatten)]
    sign: sign::Sign,
    #[command(flatten)]
    access: image_args::Access,
}

pub(crate) fn run(session: &Session, arguments: &Arguments) -> Result<()> {
    let started = Instant::now();
    let Arguments { images, target, sign, access } = arguments;
    let name: ImageName = target.parse()?;
    push::must_name_a_new_image(&name)?;
    let options = access.options(&session.config)?;
    let signer = sign.signer(&name, &options)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let open = |text: &String| {
        let image = open::open(text, access, &session.config, &runtime)?;
        image.image.must_be_whole(image.name.to_string())?;
        image.must_be_converted()?;
        if image.image.bootstrap.version() == 5 {
            bail!(
                "{text} is RAFS v5, whose blobs no image of v6 can have: convert its source with `lazuli convert`"
            );
        }
        Ok(image)
    };
    let images = images.iter().map(open).collect::<Result<Vec<_>>>()?;
    let sources = images.iter().map(|OpenedImage { name, image, .. }| SourceImage {
        name: name.to_string(),
        image: &*image.bootstrap,
        of: TreeOf::Image,
    });
    let combined = combine(&sources.collect::<Vec<_>>())?;
    let layer = pack(&images, &combined, &runtime)?;
    let description = describe(&images, &combined, &layer, &runtime)?;

    let repository = lazuli_registry::open(&name, &options)?;
    let mut blobs = Vec::new();
    for (home, record) in of_images(&images, &combined) {
        blobs.extend(home.to_store([&record.blob], &name));
    }
    // One repository can be asked for blobs; of an image that is elsewhere they are sent.
    let mount_from = images.iter().find_map(|image| push::mount_source(&image.name, &name));
    let push = push::push(&*repository, blobs, layer, description, mount_from, signer.as_ref());
    let uploaded = runtime.block_on(push)?;

    println!("{name}");
    let (count, bytes) = (combined.blobs.len(), combined.blobs.iter());
    let bytes: u64 = bytes.map(|record| record.blob.stored_size).sum();
    println!("  image     {} in {count} blobs, {} files", BinaryBytes(bytes), combined.tree.len());
    let seconds = started.elapsed().as_secs_f64();
    println!("  time      {seconds:.1} s, uploaded {}", BinaryBytes(uploaded));
    Ok(())
}

/// The blobs of the new image, each with an image that has it.
fn of_images<'a>(
    images: &'a [OpenedImage],
    combined: &'a Combined,
) -> impl Iterator<Item = (&'a OpenedImage, &'a BlobRecord)> {
    combined.homes.iter().map(|home| &images[*home]).zip(&combined.blobs)
}

fn pack(images: &[OpenedImage], combined: &Combined, runtime: &Runtime) -> Result<BootstrapLayer> {
    let metas = of_images(images, combined)
        .map(|(home, record)| {
            let meta = runtime.block_on(push::meta_file(&*home.repository, record))?;
            Ok((record.blob.id, meta))
        })
        .collect::<Result<Vec<_>>>()?;
    let metas = metas.iter().map(|(id, meta)| (*id, &meta[..]));
    Ok(pack_bootstrap(&combined.bootstrap(&[])?, metas))
}

fn describe(
    images: &[OpenedImage],
    combined: &Combined,
    bootstrap: &BootstrapLayer,
    runtime: &Runtime,
) -> Result<oci::LazyImage> {
    let layer = |(home, record): (&OpenedImage, &BlobRecord)| BlobLayer {
        digest: record.blob.id,
        size: home.stored_size(&record.blob),
        hot_bytes: home.hot_bytes(&record.blob),
    };
    let blobs: Vec<_> = of_images(images, combined).map(layer).collect();
    let last = images.last().context("no images")?;
    let config = lazuli_registry::config(&*last.repository, &last.manifest);
    let config = ImageConfig::parse(&runtime.block_on(config)?)
        .with_context(|| format!("the config of {}", last.name))?;
    let layer = BlobLayer::new(bootstrap.digest, bootstrap.size());
    let mut notes = BTreeMap::new();
    if let Some(guess) = guess(images) {
        guess.note(&mut notes);
    }
    Ok(oci::LazyImage::new(&config, &blobs, layer, bootstrap.diff_id, notes)?)
}

/// What the start most likely reads: what the makers of the images guessed for the last one, whose
/// command it runs, and then for the others, whose files it shows.
fn guess(images: &[OpenedImage]) -> Option<NotedGuess> {
    let decoded = |image: &OpenedImage| image.manifest.parsed.guess()?.decode().ok();
    let mut guesses = images.iter().rev().filter_map(decoded);
    let mut all = guesses.next()?;
    guesses.for_each(|guess| all.append(&guess));
    NotedGuess::of(&all)
}
