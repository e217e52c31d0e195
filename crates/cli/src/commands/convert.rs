use std::{collections::BTreeMap, ffi::OsString, path::PathBuf, sync::Arc, time::Instant};

use anyhow::{Result, bail};
use clap::Args;
use indicatif::BinaryBytes;
use lazuli_builder::{
    BootstrapLayer, Built, Options, Progress, ReadLayer,
    bake::{Hot, hot_first},
    bootstrap_layer, build_with,
};
use lazuli_image::{
    Blob, Trace,
    oci::{BlobLayer, ImageConfig, LazyImage},
};
use lazuli_registry::{ImageName, Repository, Source};
use tokio::runtime::Runtime;

use crate::{
    Session,
    chunk_reuse::{Known, Target},
    conversion::Origin,
    image_args,
    keep_oci::Ordinary,
    layer_cache::LayerCache,
    progress, push, sign,
    source::{self, Opened},
    streaming_push::Pushing,
    trace, trace_run,
};

/// Convert an image into a lazy one and store it
///
/// SOURCE is a registry reference, oci:DIR[:TAG], docker-archive:FILE, tar:FILE, tar:- for standard
/// input, or dir:PATH; TARGET a registry reference or oci:DIR[:TAG]. Layers and chunks that a lazy
/// image in TARGET's repository has are not made again: the image that has TARGET's name now, or
/// those with the nearest tags. The same input, and the same images there, give the same bytes.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// What to convert
    #[arg(value_name = "SOURCE")]
    source: String,
    /// Where the lazy image goes
    #[arg(value_name = "TARGET")]
    target: String,
    /// Use the chunks of this lazy image in TARGET's registry, too
    #[arg(long, value_name = "IMAGE", conflicts_with_all = ["trace", "trace_run"])]
    dict: Option<String>,
    /// Compress small files that lie together in batches of up to so many KiB, a power of two:
    /// smaller images, but a start fetches more, and Nydus before 2.3 cannot mount them. Without it
    /// each is compressed on its own
    #[arg(long, value_name = "KIB", default_value_t = 0, hide_default_value = true)]
    batch: u32,
    /// Put first in each blob what this trace says that a start reads; it is one of SOURCE,
    /// converted without this option
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// The same after running the image once, without a network, to see what a start reads: CMD, or
    /// the image's command without one. Ends with CMD, or when nothing new was read for 5 s. Must
    /// be the last option; needs root and runc
    #[arg(
        long,
        value_name = "CMD",
        num_args = 0..,
        allow_hyphen_values = true,
        conflicts_with = "trace"
    )]
    trace_run: Option<Vec<OsString>>,
    /// Store the image itself, too: TARGET becomes an index of both, of which nodes without Lazuli
    /// take the ordinary one. SOURCE is an image in a registry or oci:DIR
    #[arg(long)]
    keep_oci: bool,
    #[command(flatten)]
    sign: sign::Sign,
    #[command(flatten)]
    access: image_args::Access,
}

impl Arguments {
    /// The options that make a difference to the image, for the statement of the conversion. The
    /// trace has a place of its own.
    fn stated(&self) -> BTreeMap<String, String> {
        let batch = (self.batch > 0).then(|| self.batch.to_string());
        let keep_oci = self.keep_oci.then(|| "true".to_owned());
        let (platform, dict) = (self.access.platform.clone(), self.dict.clone());
        let options =
            [("batch", batch), ("dict", dict), ("keep-oci", keep_oci), ("platform", platform)];
        options.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect()
    }
}

pub(crate) fn run(session: &Session, arguments: &Arguments) -> Result<()> {
    let started = Instant::now();
    lazuli_sys::heap::give_back();
    let source: Source = arguments.source.parse()?;
    let name: ImageName = arguments.target.parse()?;
    // Teams keep lazy images beside the images that they come from, so the source's repository may
    // hold the blobs of shared base layers already.
    let neighbour = match &source {
        Source::Image(source) => push::neighbour(source, &name),
        _ => None,
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let access = arguments.access.options(&session.config)?;
    let mut signer = arguments.sign.signer(&name, &access)?;
    let target = lazuli_registry::open(&name, &access)?;
    let known = arguments.trace.as_deref().map(trace::read).transpose()?;
    let opened = source::open(&source, &arguments.access, &session.config, &runtime)?;
    let origin = Origin::admit(session, &source, &opened, &access);
    let origin = runtime.block_on(origin)?;
    let mut source = opened;
    let ordinary = arguments.keep_oci.then(|| keep(&mut source, &target, neighbour, &runtime));
    let ordinary = ordinary.transpose()?;
    let total = source.stored_size();
    let scratch = push::Scratch::new()?;
    let batch_size = arguments.batch.saturating_mul(1 << 10);
    let options = Options { batch_size, ..Options::new(scratch.path()) };
    let cache = LayerCache::open();
    let Known { mut dictionary, mut found } = Known::default();
    let platform = arguments.access.platform()?;
    let platform = platform.as_ref();
    let place = Target { name: &name, repository: &target, options: &access, platform };
    let wanted = arguments.dict.as_deref().map(str::parse).transpose()?;
    // A trace speaks of an image that was made of its layers alone.
    if known.is_none() && arguments.trace_run.is_none() {
        Known { dictionary, found } = runtime.block_on(place.known(wanted.as_ref()))?;
        if !dictionary.is_empty() {
            source.take_known(&mut dictionary, &cache, &options);
        }
    }
    let bar = progress::bytes(source.unread_size(), "converting");
    let digests = source.digests;
    let mut remember = |read: ReadLayer<'_>| {
        if let Some(digest) = &digests[read.layer()] {
            cache.put(digest, &options, read.record());
        }
    };
    let (reading, pushing) =
        (progress::Reading(&bar), Pushing::new(&bar, target.clone(), &runtime));
    // What a trace puts in order has to be whole first.
    let is_plain = arguments.trace.is_none() && arguments.trace_run.is_none();
    let progress: &dyn Progress = if is_plain && digests == [None] { &pushing } else { &reading };
    let built = build_with(dictionary, source.layers, &options, progress, &mut remember);
    bar.finish_and_clear();
    let pushed = runtime.block_on(pushing.finish(built.as_ref().ok()))?;
    let (ahead, sent) = pushed.map_or((None, 0), |(blob, sent)| (Some(blob.record.blob.id), sent));
    let mut built = built?;
    let trace = match &arguments.trace_run {
        Some(command) => Some(trial_run(&built, &source.config, command, &runtime)?),
        None => known,
    };
    let hot = trace.as_ref().map(|trace| hot_chunks(&built, trace, arguments)).transpose()?;
    if let Some(hot) = &hot {
        built = hot_first(built, hot)?;
    }
    let bootstrap = bootstrap_layer(&built);
    let image = describe(&built, &bootstrap, &source.config, source.origin)?;
    if let (Some(signer), Some(origin)) = (&mut signer, origin) {
        let reused = found.used_by(&built, &image.digest);
        signer.states(origin.converted(arguments.stated(), trace.as_ref(), reused)?);
    }
    let stored = built.report.stored_bytes + bootstrap.size();
    let blobs = built.blobs.iter().filter(|blob| Some(blob.record.blob.id) != ahead);
    let blobs = blobs.filter_map(push::built).collect();
    let signer = signer.as_ref();
    let uploaded = runtime.block_on(async {
        let linked = match &wanted {
            Some(wanted) => place.link(wanted, &built).await?,
            None => 0,
        };
        let Some(ordinary) = ordinary else {
            let pushed = push::push(&*target, blobs, bootstrap, image, neighbour, signer).await?;
            return Ok::<_, anyhow::Error>(linked + pushed);
        };
        let lazy = push::push_blobs(&*target, blobs, bootstrap, &image, neighbour).await?;
        Ok(linked + lazy + ordinary.finish(&*target, image, &source.config, signer).await?)
    })?;
    report(&name, &built, hot.as_ref(), stored, sent + uploaded, total, started);
    Ok(())
}

/// Begins to store the source beside the lazy image.
fn keep(
    source: &mut Opened,
    target: &Arc<dyn Repository>,
    neighbour: Option<&str>,
    runtime: &Runtime,
) -> Result<Ordinary> {
    let Some((manifest, from)) = source.image.take() else {
        bail!("--keep-oci keeps an image of a registry or of oci:DIR; SOURCE is none");
    };
    let _on = runtime.enter();
    Ordinary::store(manifest, from, target.clone(), neighbour.map(str::to_owned))
}

/// The trace of a start of the image as it is before anything was moved.
fn trial_run(
    built: &Built,
    config: &ImageConfig,
    command: &[OsString],
    runtime: &Runtime,
) -> Result<Trace> {
    let bootstrap = bootstrap_layer(built);
    let image = describe(built, &bootstrap, config, BTreeMap::new())?;
    let blobs = built.blobs.iter().filter_map(push::built).collect();
    runtime.block_on(trace_run::run(blobs, bootstrap, image, command))
}

/// What the trace says about the image as it is before anything was moved.
fn hot_chunks(built: &Built, trace: &Trace, arguments: &Arguments) -> Result<Hot> {
    let blobs: Vec<Blob> = built.blobs.iter().map(|blob| blob.record.blob.clone()).collect();
    let hot = Hot::of(trace, &blobs);
    if hot.chunks.is_empty() {
        let source = &arguments.source;
        let from = arguments
            .trace
            .as_ref()
            .map_or("the trace of the run".into(), |path| path.display().to_string());
        bail!(
            "{from} says nothing about {source}: it has {} hot chunks, and none of them is in what `lazuli convert` makes of \
             {source} without a trace; record it with that image, or use `lazuli optimize`",
            hot.unknown
        );
    }
    Ok(hot)
}

fn describe(
    built: &Built,
    bootstrap: &BootstrapLayer,
    config: &ImageConfig,
    origin: BTreeMap<String, String>,
) -> Result<LazyImage> {
    let blobs: Vec<_> = built.blobs.iter().map(push::layer).collect();
    let layer = BlobLayer { digest: bootstrap.digest, size: bootstrap.size(), hot_bytes: None };
    Ok(LazyImage::new(config, &blobs, layer, bootstrap.diff_id, origin)?)
}

fn report(
    name: &ImageName,
    built: &Built,
    hot: Option<&Hot>,
    stored: u64,
    uploaded: u64,
    source: Option<u64>,
    started: Instant,
) {
    let report = &built.report;
    println!("{name}");
    if let Some(source) = source {
        let known = match report.layers - report.read_layers {
            0 => String::new(),
            known => format!(", {known} of them known"),
        };
        println!("  source    {} in {} layers{known}", BinaryBytes(source), report.layers);
    }
    println!(
        "  image     {} in {} blobs, metadata {} for {} files",
        BinaryBytes(stored),
        report.blobs,
        BinaryBytes(report.bootstrap_bytes),
        report.inodes
    );
    if report.known_blobs > 0 {
        let bytes = BinaryBytes(report.known_bytes);
        println!("  reused    {bytes} in {} blobs that the target has", report.known_blobs);
    }
    println!(
        "  dedup     {} of content, {} distinct in {} of {} chunks",
        BinaryBytes(report.content_bytes),
        BinaryBytes(report.distinct_bytes),
        report.distinct_chunks,
        report.chunks
    );
    if let Some(hot) = hot {
        let bytes: u64 = built.blobs.iter().filter_map(|blob| blob.hot_bytes).sum();
        println!("  hot       {} in {} chunks come first", BinaryBytes(bytes), hot.chunks.len());
        trace::report_unknown(hot, "SOURCE");
    }
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
