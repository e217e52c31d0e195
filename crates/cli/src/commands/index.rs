use std::{path::PathBuf, time::Instant};

use anyhow::{Context as _, Result, bail};
use bytes::Bytes;
use clap::Args;
use indicatif::BinaryBytes;
use lazuli_builder::{
    BootstrapLayer, BuiltBlob,
    index::{ImageIndex, index},
};
use lazuli_image::{
    Blob, Digest,
    oci::{BlobLayer, Descriptor, ImageConfig, IndexImage, IndexedLayer, NotedGuess, media_type},
    rafs::IndexedBootstrap,
};
use lazuli_policy::StatedLayer;
use lazuli_registry::{
    BlobContent, Document, ImageName, Manifest, Options, Pull, PushBy, Repository, Source,
    TrustedReferrers,
};
use tokio::runtime::Runtime;

use crate::{
    Session,
    convert::{
        source::{self, Opened},
        statement::Origin,
    },
    image::{
        guess,
        index_repository::{StoredIndexes, store_layers},
        push,
        scratch::Scratch,
        sign::{Sign, Signer},
    },
    image_args, progress,
};

/// Make an ordinary image start lazily as it is, with an index beside it
///
/// IMAGE may also be an artifact whose layers are files, such as a model. Reads every layer once,
/// and stores the points where a reader can begin in it, with the digests of its chunks. The image,
/// its name and its digest stay unchanged. Layers of images have to be gzip or plain tar. Nodes use
/// the index if a key that their policy trusts has signed a statement about it, see `--sign`, or if
/// their configuration trusts any: `trust = "repository"` in the table [index]. The same image
/// gives the same index.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// An ordinary image or an artifact: a registry reference or oci:DIR[:TAG]. The index goes to
    /// the same place
    #[arg(value_name = "IMAGE")]
    image: String,
    #[command(flatten)]
    access: image_args::Access,
    /// Sign a statement about the index with this private key: PEM with PKCS#8, or a cosign.key,
    /// whose password is taken from $COSIGN_PASSWORD. Nodes whose policy lists the public key under
    /// `statements` use the index
    #[arg(long, value_name = "KEY")]
    sign: Option<PathBuf>,
    /// Store an index for each layer here, by the layer's digest, instead of one for the image
    /// beside it: the repository in nodes' `[index] repository`
    #[arg(long, value_name = "REPOSITORY")]
    to: Option<String>,
}

pub(crate) fn run(session: &Session, arguments: &Arguments) -> Result<()> {
    let started = Instant::now();
    lazuli_sys::heap::give_back();
    let name: ImageName = arguments.image.parse()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let access = arguments.access.options(&session.config)?;
    let source = Source::Image(name.clone());
    let opened = source::open(&source, arguments.access.platform()?, &access, &runtime)?;
    let Opened { layers, digests, config, image, is_artifact, .. } = opened;
    let (manifest, _) = image.context("an image of a registry or oci:DIR was expected")?;
    must_be_ordinary(&name, &manifest)?;
    if is_artifact && arguments.to.is_some() {
        bail!("{name} is an artifact, whose index is stored beside it: leave out --to");
    }
    let to = arguments.to.as_deref().map(index_repository).transpose()?;
    let signer = signer(arguments.sign.clone(), to.as_ref().unwrap_or(&name), &access)?;
    let stored: u64 = manifest.parsed.layers.iter().map(|layer| layer.size).sum();
    let layers = source::to_index(layers, digests);
    let count = layers.len();
    let bar = progress::bytes(Some(stored), "indexing");
    let scratch = Scratch::new()?;
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let indexed = index(layers, &scratch.path(), threads, &progress::Reading(&bar));
    bar.finish_and_clear();
    let indexed = indexed?;
    // An artifact claims nothing of its layers but their digests.
    if !is_artifact {
        check_diff_ids(&name, &config, &indexed.diff_ids)?;
    }
    if let Some(to) = to {
        let stated = stated(&manifest, &indexed)?;
        let storing = store_layers(&to, &access, &indexed.layers, &stated, signer.as_ref());
        let done = runtime.block_on(storing)?;
        report_layers(&name, &to, &done, stored, started);
        return Ok(());
    }
    let bootstrap = indexed.bootstrap_layer();
    let target = lazuli_registry::open(&name, &access)?;
    let guess = guess_start(&indexed, &config, &*target, &runtime)?;
    let document = describe(&manifest, &indexed, &bootstrap, guess.as_ref())?;
    let stated = stated(&manifest, &indexed)?;
    let index_bytes = index_bytes(&indexed) + bootstrap.size();
    let beside: u64 = indexed.beside.iter().map(|beside| beside.record.blob.stored_size).sum();
    let (files, digest) = (indexed.inodes, document.descriptor.digest);
    let manifest_bytes = document.manifest.clone();
    let uploaded = store(&*target, indexed, bootstrap, document, &manifest.digest, &runtime)?;
    if let Some(signer) = signer {
        let indexing = Origin::of(&name, &manifest).indexed(stated)?;
        let document = Document::new(manifest_bytes, media_type::MANIFEST);
        runtime.block_on(signer.state_index(&*target, &document, &indexing))?;
    }

    println!("{name}");
    println!("  image     {} in {count} layers, {files} files", BinaryBytes(stored));
    let percent = index_bytes as f64 * 100.0 / stored.max(1) as f64;
    println!("  index     {} ({percent:.2} %), {digest}", BinaryBytes(index_bytes));
    if beside > 0 {
        let bytes = BinaryBytes(beside);
        println!("  beside    {bytes} of content that cannot be read where it is");
    }
    println!(
        "  time      {:.1} s, uploaded {}",
        started.elapsed().as_secs_f64(),
        BinaryBytes(uploaded)
    );
    Ok(())
}

/// `--to`: a repository of a registry.
fn index_repository(text: &str) -> Result<ImageName> {
    let is_one = TrustedReferrers::parse(&[text.to_owned()]);
    is_one.map_err(|(_, error)| anyhow::anyhow!("--to: {error}"))?;
    Ok(text.parse()?)
}

fn report_layers(
    name: &ImageName,
    to: &ImageName,
    done: &StoredIndexes,
    stored: u64,
    started: Instant,
) {
    let StoredIndexes { bytes, uploaded, left_out } = done;
    let percent = *bytes as f64 * 100.0 / stored.max(1) as f64;
    println!("{name}");
    println!("  indexes   {} ({percent:.2} %) in {to}", BinaryBytes(*bytes));
    for layer in left_out {
        println!("  left out  {layer}: it has content that cannot be read where it is");
    }
    let (seconds, uploaded) = (started.elapsed().as_secs_f64(), BinaryBytes(*uploaded));
    println!("  time      {seconds:.1} s, uploaded {uploaded}");
}

/// The signer of statements about the index, if requested.
fn signer(key: Option<PathBuf>, name: &ImageName, options: &Options) -> Result<Option<Signer>> {
    Sign::with(key).signer(name, options)
}

/// The layers in the statement.
fn stated(manifest: &Manifest, indexed: &ImageIndex) -> Result<Vec<StatedLayer>> {
    let layers = manifest.parsed.layers.iter().zip(&indexed.diff_ids);
    let stated = layers.map(|(layer, diff_id)| {
        let mut indexes = indexed.layers.iter().map(|index| &index.record);
        let record = indexes.find(|record| record.blob.id == layer.digest);
        let index = record.and_then(|record| record.tail.index);
        let index = index.with_context(|| format!("layer {} has no index", layer.digest))?.digest;
        Ok(StatedLayer { layer: layer.digest, diff_id: *diff_id, index })
    });
    stated.collect()
}

fn must_be_ordinary(name: &ImageName, manifest: &Manifest) -> Result<()> {
    if manifest.parsed.lazy_base().is_some() {
        bail!("{name} is a lazy image: it needs no index");
    }
    let is_encrypted = |layer: &&Descriptor| layer.media_type.contains("+encrypted");
    if let Some(layer) = manifest.parsed.layers.iter().find(is_encrypted) {
        bail!("layer {} of {name} is encrypted, and cannot be indexed", layer.digest);
    }
    Ok(())
}

/// Checks the layers against the image's configuration.
fn check_diff_ids(name: &ImageName, config: &ImageConfig, found: &[Digest]) -> Result<()> {
    let expected = config.diff_ids().with_context(|| format!("the config of {name}"))?;
    if expected.len() != found.len() {
        bail!("{name} has {} layers, its config lists {}", found.len(), expected.len());
    }
    for (number, (found, expected)) in found.iter().zip(expected).enumerate() {
        if *found != expected {
            bail!(
                "layer {number} of {name} unpacks to a tar with the digest {found}, its config says {expected}"
            );
        }
    }
    Ok(())
}

fn index_bytes(indexed: &ImageIndex) -> u64 {
    indexed.layers.iter().map(|layer| layer.bytes.len() as u64).sum()
}

/// Guesses what a start most likely reads.
fn guess_start(
    indexed: &ImageIndex,
    config: &ImageConfig,
    place: &dyn Pull,
    runtime: &Runtime,
) -> Result<Option<NotedGuess>> {
    let bootstrap = IndexedBootstrap::new(indexed.bootstrap.clone(), &indexed.layers)?;
    let bootstrap = bootstrap.open()?;
    let file = |blob: &Blob| {
        let is_it = |beside: &&BuiltBlob| beside.record.blob.id == blob.id;
        indexed.beside.iter().find(is_it)?.file.as_deref()
    };
    let files: Vec<_> = bootstrap.blobs().iter().map(file).collect();
    guess::guess(config, &bootstrap, &files, place, runtime)
}

fn describe(
    manifest: &Manifest,
    indexed: &ImageIndex,
    bootstrap: &BootstrapLayer,
    guess: Option<&NotedGuess>,
) -> Result<IndexImage> {
    let layers: Vec<_> = indexed.layers.iter().filter_map(IndexedLayer::of).collect();
    let beside: Vec<_> = indexed.beside.iter().map(push::layer).collect();
    let (subject, config) = (manifest.descriptor(), &manifest.parsed.config);
    let layer = BlobLayer::new(bootstrap.digest, bootstrap.size());
    Ok(IndexImage::new(subject, config, &layers, &beside, layer, guess)?)
}

/// Stores blobs before the manifest, and has it listed. Returns the bytes that the target did not
/// have.
fn store(
    target: &dyn Repository,
    mut indexed: ImageIndex,
    bootstrap: BootstrapLayer,
    document: IndexImage,
    subject: &Digest,
    runtime: &Runtime,
) -> Result<u64> {
    let mut blobs = push::take_indexed(&mut indexed);
    let size = bootstrap.size();
    blobs.push((bootstrap.digest, size, BlobContent::Bytes(Bytes::from(bootstrap.bytes))));
    let bar = progress::bytes(Some(blobs.iter().map(|(_, size, _)| size).sum()), "storing");
    let IndexImage { manifest, descriptor } = document;
    let document = Document {
        raw: manifest.into(),
        digest: descriptor.digest,
        media_type: media_type::MANIFEST.to_owned(),
    };
    let uploaded = runtime.block_on(async {
        let uploaded = push::upload(target, blobs, None, &|bytes| bar.inc(bytes)).await?;
        target.push_document(&document, PushBy::Digest).await?;
        target.enlist_referrers(subject, &[descriptor]).await?;
        anyhow::Ok(uploaded)
    })?;
    bar.finish_and_clear();
    Ok(uploaded)
}
