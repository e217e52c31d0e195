//! Makes a lazy image from another image, a tar or a directory.
//!
//! ```text
//! prepare ─▶ build ─▶ order_by_trace ─▶ publish
//!   │         │         │                 └ push, sign, keep the ordinary image
//!   │         │         └ without a trace: a guess of what a start reads
//!   │         └ source, layer cache; one layer is pushed while it is built
//!   └ policy, source, chunks of images at the target
//! ```
//!
//! Of an artifact only metadata is made: `artifact`.
//!
//! Nothing here prints, except progress: the verb reports.

mod artifact;
mod chunk_reuse;
mod keep_oci;
mod layer_cache;
pub(crate) mod source;
pub(crate) mod statement;
mod streaming_push;
mod trace_run;

use std::{collections::BTreeMap, ffi::OsString, mem, path::PathBuf, sync::Arc};

use anyhow::{Result, bail};
use lazuli_builder::{
    BootstrapLayer, Built, Dictionary, Options as BuildOptions, Progress, ReadLayer,
    bake::{Hot, hot_first},
    bootstrap_layer, build_with,
};
use lazuli_image::{
    Blob, Digest, Trace,
    oci::{BlobLayer, ImageConfig, LazyImage},
    rafs::Bootstrap,
};
use lazuli_registry::{ImageName, Options, Platform, Repository, Source};
use tokio::runtime::Runtime;

pub(crate) use self::artifact::MadeOfArtifact;
use self::{
    chunk_reuse::{Reusable, ReusableImages, Target},
    keep_oci::{InPlace, KeptImage},
    layer_cache::LayerCache,
    source::Opened,
    statement::Origin,
    streaming_push::StreamingPush,
};
use crate::{
    image::{guess, push, scratch::Scratch, sign::Signer},
    progress,
};

/// A conversion: source, target and options.
pub(crate) struct ConversionRequest {
    pub(crate) source: Source,
    pub(crate) target: ImageName,
    /// How to reach registries.
    pub(crate) access: Options,
    pub(crate) platform: Option<Platform>,
    /// The policy that the source must pass.
    pub(crate) policy: Option<PathBuf>,
    /// A lazy image in the target's registry whose chunks to reuse.
    pub(crate) dict: Option<ImageName>,
    /// Size of batches of small chunks, in bytes; 0 for none.
    pub(crate) batch_size: u32,
    pub(crate) order: Order,
    /// Whether to store the source image too.
    pub(crate) keep_oci: bool,
    pub(crate) signer: Option<Signer>,
    /// The options that change the image, for the statement of the conversion.
    pub(crate) stated: BTreeMap<String, String>,
}

/// The order of chunks in blobs.
pub(crate) enum Order {
    /// As the source has them.
    Source,
    /// Those of a trace first, which was read from this file.
    Trace(Box<Trace>, PathBuf),
    /// Those of a trial run of this command first.
    TrialRun(Vec<OsString>),
}

/// A conversion, ready to read its source.
pub(crate) struct Conversion<'a> {
    request: ConversionRequest,
    runtime: &'a Runtime,
    target: Arc<dyn Repository>,
    source: Opened,
    /// Stored bytes of the source, if they are known.
    source_size: Option<u64>,
    origin: Option<Origin>,
    kept: Option<KeptImage>,
    dictionary: Dictionary,
    reusable: ReusableImages,
    options: BuildOptions,
    cache: LayerCache,
    /// The blob that was pushed while it was built, and the bytes that were sent for it.
    streamed: Option<(Digest, u64)>,
    _scratch: Scratch,
}

/// A built image with its chunks in their final order.
pub(crate) struct Ordered {
    pub(crate) built: Built,
    /// The chunks to put first.
    pub(crate) hot: Option<Hot>,
    trace: Option<Trace>,
}

/// The result of publishing an image.
pub(crate) struct Published {
    /// Bytes of the image, with its bootstrap.
    pub(crate) stored: u64,
    /// Bytes that the target did not have.
    pub(crate) uploaded: u64,
}

impl<'a> Conversion<'a> {
    /// Opens source and target, asks the policy, and finds chunks to reuse.
    ///
    /// # Errors
    /// The policy refuses the source, or something can't be opened.
    pub(crate) fn prepare(request: ConversionRequest, runtime: &'a Runtime) -> Result<Self> {
        let ConversionRequest { source, access, platform, policy, .. } = &request;
        let target = lazuli_registry::open(&request.target, access)?;
        let mut opened = source::open(source, platform.clone(), access, runtime)?;
        if opened.is_artifact {
            artifact::must_be_plain(&request)?;
        }
        let origin = Origin::admit(policy.clone(), source, &opened, access);
        let origin = runtime.block_on(origin)?;
        let kept = request.keep_oci.then(|| keep(&mut opened, &target, &request, runtime));
        let kept = kept.transpose()?;
        let source_size = opened.stored_size();
        let scratch = Scratch::new()?;
        let batch_size = request.batch_size;
        let options = BuildOptions { batch_size, ..BuildOptions::new(scratch.path()) };
        let mut conversion = Conversion {
            request,
            runtime,
            target,
            source: opened,
            source_size,
            origin,
            kept,
            dictionary: Dictionary::default(),
            reusable: ReusableImages::default(),
            options,
            cache: LayerCache::open(),
            streamed: None,
            _scratch: scratch,
        };
        conversion.find_reusable()?;
        Ok(conversion)
    }

    /// Stored bytes of the source, if they are known.
    pub(crate) fn source_size(&self) -> Option<u64> {
        self.source_size
    }

    fn target(&self) -> Target<'_> {
        let ConversionRequest { target, access, platform, .. } = &self.request;
        let platform = platform.as_ref();
        Target { name: target, repository: &self.target, options: access, platform }
    }

    /// Finds reusable chunks at the target. Skipped for a trace: it describes an image made of its
    /// layers alone. An artifact is made of its layers in any case.
    fn find_reusable(&mut self) -> Result<()> {
        if !matches!(self.request.order, Order::Source) || self.source.is_artifact {
            return Ok(());
        }
        let found = self.runtime.block_on(self.target().reusable(self.request.dict.as_ref()));
        let Reusable { mut dictionary, images } = found?;
        if !dictionary.is_empty() {
            self.source.take_known(&mut dictionary, &self.cache, &self.options);
        }
        (self.dictionary, self.reusable) = (dictionary, images);
        Ok(())
    }

    /// Reads the source, and makes blobs and a bootstrap of it.
    ///
    /// # Errors
    /// The source can't be read, or is malformed.
    pub(crate) fn build(&mut self) -> Result<Built> {
        let bar = progress::bytes(self.source.unread_size(), "converting");
        let layers = mem::take(&mut self.source.layers);
        let dictionary = mem::take(&mut self.dictionary);
        let (digests, cache, options) = (&self.source.digests, &self.cache, &self.options);
        let mut remember = |read: ReadLayer<'_>| {
            if let Some(digest) = &digests[read.layer()] {
                cache.put(digest, options, read.record());
            }
        };
        let reading = progress::Reading(&bar);
        let pushing = StreamingPush::new(&bar, self.target.clone(), self.runtime);
        // A trace reorders blobs, so they have to be complete first.
        let streams = matches!(self.request.order, Order::Source) && *digests == [None];
        let progress: &dyn Progress = if streams { &pushing } else { &reading };
        let built = build_with(dictionary, layers, options, progress, &mut remember);
        bar.finish_and_clear();
        let pushed = self.runtime.block_on(pushing.finish(built.as_ref().ok()))?;
        self.streamed = pushed.map(|(blob, sent)| (blob.record.blob.id, sent));
        Ok(built?)
    }

    /// Moves the chunks of the requested trace to the beginning of their blobs. Without one, notes
    /// what a start most likely reads.
    ///
    /// # Errors
    /// The trial run failed, or the trace is of another image.
    pub(crate) fn order_by_trace(&mut self, built: Built) -> Result<Ordered> {
        let order = mem::replace(&mut self.request.order, Order::Source);
        let (trace, from) = match order {
            Order::Source => {
                self.note_guess(&built)?;
                return Ok(Ordered { built, hot: None, trace: None });
            }
            Order::Trace(trace, path) => (*trace, path.display().to_string()),
            Order::TrialRun(command) => {
                (self.trial_run(&built, &command)?, "the trace of the run".to_owned())
            }
        };
        let hot = hot_chunks(&built, &trace, &from, &self.request.source)?;
        Ok(Ordered { built: hot_first(built, &hot)?, hot: Some(hot), trace: Some(trace) })
    }

    /// Notes what a start most likely reads. Blobs that the target has already are read there.
    fn note_guess(&mut self, built: &Built) -> Result<()> {
        let bootstrap = Bootstrap::open(&built.bootstrap[..])?;
        let files: Vec<_> = built.blobs.iter().map(|blob| blob.file.as_deref()).collect();
        let (config, target) = (&self.source.config, &*self.target);
        if let Some(guess) = guess::guess(config, &bootstrap, &files, target, self.runtime)? {
            guess.note(&mut self.source.annotations);
        }
        Ok(())
    }

    /// The trace of a start of the image as it was built.
    fn trial_run(&self, built: &Built, command: &[OsString]) -> Result<Trace> {
        let bootstrap = bootstrap_layer(built);
        let image = describe(built, &bootstrap, &self.source.config, BTreeMap::new())?;
        let blobs = built.blobs.iter().filter_map(push::built).collect();
        self.runtime.block_on(trace_run::run(blobs, bootstrap, image, command))
    }

    /// Stores the image under its name, with signatures and the ordinary image if requested.
    ///
    /// # Errors
    /// The target failed.
    pub(crate) fn publish(mut self, ordered: &Ordered) -> Result<Published> {
        let built = &ordered.built;
        let bootstrap = bootstrap_layer(built);
        let annotations = mem::take(&mut self.source.annotations);
        let image = describe(built, &bootstrap, &self.source.config, annotations)?;
        let stored = built.report.stored_bytes + bootstrap.size();
        let mut signer = self.request.signer.take();
        if let (Some(signer), Some(origin)) = (&mut signer, self.origin.take()) {
            let reused = self.reusable.used_by(built, &image.digest);
            let stated = mem::take(&mut self.request.stated);
            signer.states(origin.converted(stated, ordered.trace.as_ref(), reused)?);
        }
        let runtime = self.runtime;
        let stored_image = self.store(built, bootstrap, image, signer.as_ref());
        Ok(Published { stored, uploaded: runtime.block_on(stored_image)? })
    }

    /// Returns the bytes that the target did not have, with those of the streaming push.
    async fn store(
        mut self,
        built: &Built,
        bootstrap: BootstrapLayer,
        image: LazyImage,
        signer: Option<&Signer>,
    ) -> Result<u64> {
        let (streamed, sent) = self.streamed.map_or((None, 0), |(blob, sent)| (Some(blob), sent));
        let blobs = built.blobs.iter().filter(|blob| Some(blob.record.blob.id) != streamed);
        let blobs = blobs.filter_map(push::built).collect();
        let linked = match &self.request.dict {
            Some(wanted) => self.target().link(wanted, built).await?,
            None => 0,
        };
        let (target, mount_from) = (&*self.target, mount_source(&self.request));
        let pushed = match self.kept.take() {
            None => push::push(target, blobs, bootstrap, image, mount_from, signer).await?,
            Some(kept) => {
                let pushed = push::push_blobs(target, blobs, bootstrap, &image, mount_from).await?;
                pushed + kept.finish(target, image, &self.source.config, signer).await?
            }
        };
        Ok(sent + linked + pushed)
    }
}

/// The source's repository, if the target's registry can mount blobs from it: lazy images are often
/// stored beside their sources, and base layers may exist there already.
fn mount_source(request: &ConversionRequest) -> Option<&str> {
    match &request.source {
        Source::Image(source) => push::mount_source(source, &request.target),
        _ => None,
    }
}

/// Begins to store the source image beside the lazy one.
fn keep(
    source: &mut Opened,
    target: &Arc<dyn Repository>,
    request: &ConversionRequest,
    runtime: &Runtime,
) -> Result<KeptImage> {
    let Some((manifest, from)) = source.image.take() else {
        bail!("--keep-oci keeps an image of a registry or of oci:DIR; SOURCE is none");
    };
    let _on = runtime.enter();
    let mount_from = mount_source(request).map(str::to_owned);
    KeptImage::begin(manifest, from, target.clone(), mount_from, in_place(request))
}

/// Returns whether the source has the same tag, perhaps beside a digest.
fn in_place(request: &ConversionRequest) -> InPlace {
    match (&request.source, &request.target) {
        (Source::Image(ImageName::Registry(source)), ImageName::Registry(target))
            if source.registry() == target.registry()
                && source.repository() == target.repository()
                && source.tag().is_some()
                && source.tag() == target.tag() =>
        {
            InPlace::Yes
        }
        _ => InPlace::No,
    }
}

/// The chunks of a trace in the image as it was built.
fn hot_chunks(built: &Built, trace: &Trace, from: &str, source: &Source) -> Result<Hot> {
    let blobs: Vec<Blob> = built.blobs.iter().map(|blob| blob.record.blob.clone()).collect();
    let hot = Hot::of(trace, &blobs);
    if hot.chunks.is_empty() {
        bail!(
            "{from} is not a trace of {source}: it has {} hot chunks, and none of them is in what \
             `lazuli convert` makes of {source} without a trace; record it with that image, or use \
             `lazuli optimize`",
            hot.unknown
        );
    }
    Ok(hot)
}

fn describe(
    built: &Built,
    bootstrap: &BootstrapLayer,
    config: &ImageConfig,
    annotations: BTreeMap<String, String>,
) -> Result<LazyImage> {
    let blobs: Vec<_> = built.blobs.iter().map(push::layer).collect();
    let layer = BlobLayer::new(bootstrap.digest, bootstrap.size());
    Ok(LazyImage::new(config, &blobs, layer, bootstrap.diff_id, annotations)?)
}
