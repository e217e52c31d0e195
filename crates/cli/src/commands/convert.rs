use std::{collections::BTreeMap, path::PathBuf, time::Instant};

use anyhow::{Result, bail};
use bytes::Bytes;
use clap::Args;
use futures_util::{StreamExt, TryStreamExt, stream};
use indicatif::BinaryBytes;
use lazuli_build::{BootstrapLayer, Built, BuiltBlob, Options, bootstrap_layer};
use lazuli_image::oci::{BlobLayer, ImageConfig, LazyImage, media_type};
use lazuli_registry::{BlobContent, ImageName, Pushed, Repository, Source};

use crate::{Session, names, progress, source};

/// Convert an image into a lazy one and store it
///
/// SOURCE is a registry reference, oci:DIR[:TAG], docker-archive:FILE, tar:FILE or dir:PATH;
/// TARGET a registry reference or oci:DIR[:TAG]. The same input gives the same bytes, and what TARGET already
/// has is not stored again.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// What to convert
    #[arg(value_name = "SOURCE")]
    source: String,
    /// Where the lazy image goes
    #[arg(value_name = "TARGET")]
    target: String,
    #[command(flatten)]
    access: names::Access,
}

/// Blobs that are uploaded at the same time: enough to hide round trips, few enough for any registry.
const UPLOADS: usize = 4;

pub(crate) fn run(session: &Session, arguments: &Arguments) -> Result<()> {
    let started = Instant::now();
    let source: Source = arguments.source.parse()?;
    let name: ImageName = arguments.target.parse()?;
    let neighbour = neighbour(&source, &name);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let target = lazuli_registry::open(&name, &arguments.access.options(&session.config)?)?;
    let source = source::open(&source, &arguments.access, &session.config, &runtime)?;
    let total = source.stored_size();
    let bar = progress::bytes(total, "converting");
    let built =
        lazuli_build::build(source.layers, &Options::new(scratch()), &progress::Reading(&bar))?;
    bar.finish_and_clear();
    let bootstrap = bootstrap_layer(&built);
    let image = describe(&built, &bootstrap, &source.config, source.origin)?;
    let stored = built.report.stored_bytes + bootstrap.size();
    let uploaded = runtime.block_on(push(&*target, &built, bootstrap, image, neighbour))?;
    report(&name, &built, stored, uploaded, total, started);
    Ok(())
}

/// The source's repository when it is another one of the target's registry. Teams keep lazy images beside the
/// images that they come from, so it may hold the blobs of shared base layers already.
fn neighbour<'a>(source: &'a Source, target: &ImageName) -> Option<&'a str> {
    match (source, target) {
        (Source::Image(ImageName::Registry(source)), ImageName::Registry(target))
            if source.registry() == target.registry()
                && source.repository() != target.repository() =>
        {
            Some(source.repository())
        }
        _ => None,
    }
}

/// Where the data waits until its digests are known. Not `/tmp` unless `TMPDIR` says so: that may be
/// memory, and an image is not small.
fn scratch() -> PathBuf {
    std::env::var_os("TMPDIR").map_or_else(|| "/var/tmp".into(), PathBuf::from)
}

fn describe(
    built: &Built,
    bootstrap: &BootstrapLayer,
    config: &ImageConfig,
    origin: BTreeMap<String, String>,
) -> Result<LazyImage> {
    let layer = |blob: &BuiltBlob| {
        let blob = &blob.record.blob;
        BlobLayer { digest: blob.id, size: blob.stored_size }
    };
    let blobs: Vec<_> = built.blobs.iter().map(layer).collect();
    let layer = BlobLayer { digest: bootstrap.digest, size: bootstrap.size() };
    Ok(LazyImage::new(config, &blobs, layer, bootstrap.diff_id, origin)?)
}

/// Stores blobs before the config before the manifest, so that what the tag names is always whole.
/// Returns the bytes that the target did not have yet.
async fn push(
    target: &dyn Repository,
    built: &Built,
    bootstrap: BootstrapLayer,
    image: LazyImage,
    neighbour: Option<&str>,
) -> Result<u64> {
    let mut blobs = Vec::new();
    for BuiltBlob { record, file, .. } in &built.blobs {
        let content = BlobContent::File(file.clone());
        blobs.push((record.blob.id, record.blob.stored_size, content));
    }
    let size = bootstrap.size();
    blobs.push((bootstrap.digest, size, BlobContent::Bytes(Bytes::from(bootstrap.bytes))));
    let size = image.config.len() as u64;
    blobs.push((image.config_digest, size, BlobContent::Bytes(Bytes::from(image.config))));
    let bar = progress::bytes(Some(blobs.iter().map(|(_, size, _)| size).sum()), "storing");
    let count = |bytes| bar.inc(bytes);
    let pushes = blobs.into_iter().map(|(digest, size, content)| {
        let count = &count;
        async move { target.push_blob(&digest, size, content, neighbour, count).await }
    });
    let sum = |sum, pushed| async move {
        Ok(sum + if let Pushed::Uploaded(bytes) = pushed { bytes } else { 0 })
    };
    let uploaded = stream::iter(pushes).buffer_unordered(UPLOADS).try_fold(0, sum).await?;
    let digest = target.push_manifest(Bytes::from(image.manifest), media_type::MANIFEST).await?;
    bar.finish_and_clear();
    if digest != image.digest {
        bail!("{} stored {digest} instead of {}", target.describe(), image.digest);
    }
    Ok(uploaded)
}

fn report(
    name: &ImageName,
    built: &Built,
    stored: u64,
    uploaded: u64,
    source: Option<u64>,
    started: Instant,
) {
    let report = &built.report;
    println!("{name}");
    if let Some(source) = source {
        println!("  source    {} in {} layers", BinaryBytes(source), report.layers);
    }
    println!(
        "  image     {} in {} blobs, metadata {} for {} files",
        BinaryBytes(stored),
        report.blobs,
        BinaryBytes(report.bootstrap_bytes),
        report.inodes
    );
    println!(
        "  dedup     {} of content, {} distinct in {} of {} chunks",
        BinaryBytes(report.content_bytes),
        BinaryBytes(report.distinct_bytes),
        report.distinct_chunks,
        report.chunks
    );
    if report.dropped_xattrs > 0 {
        println!(
            "  dropped   {} extended attributes that Linux has no name space for",
            report.dropped_xattrs
        );
    }
    println!(
        "  time      {:.1} s, uploaded {}",
        started.elapsed().as_secs_f64(),
        BinaryBytes(uploaded)
    );
}
