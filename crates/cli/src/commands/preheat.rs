use std::{ops::Range, sync::Arc};

use anyhow::{Context, Result, bail};
use clap::Args;
use futures_util::stream::{TryStreamExt as _, iter};
use indicatif::{BinaryBytes, ProgressBar};
use lazuli_image::{Digest, Stored};
use lazuli_registry::{ImageName, Options, Pull, RegistryError, lazy_manifest};
use tokio::io::AsyncReadExt as _;

use crate::{
    Session,
    image::{
        open::{self, OpenedImage},
        trace,
    },
    image_args, progress,
};

/// Have Dragonfly fetch an image before a roll-out, so that nodes find it with its seed peers
///
/// Asks the daemon of [p2p] in the configuration, which fetches through the seed peers as if this
/// node needed the whole image. Lazuli keeps none of the data. Returns when everything has arrived.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// An image, lazy or not: a registry reference
    #[arg(value_name = "IMAGE")]
    image: String,
    /// Fetch only the metadata and what starts read: by the trace that the node has recorded, else
    /// the one beside the image, else the image's own order
    #[arg(long)]
    hot: bool,
    #[command(flatten)]
    access: image_args::Access,
}

/// Requests at a time. Seed peers take several pieces of each at the same time.
const REQUESTS: usize = 4;

/// Maximum size of one request for a part of a blob, in bytes: they are in memory for a moment.
const PART: u64 = 16 << 20;

/// A blob, or a part of it.
enum Wanted {
    Whole(Digest, u64),
    /// A range of a blob of this size.
    Part(Digest, u64, Range<Stored>),
}

impl Wanted {
    fn blob(&self) -> &Digest {
        match self {
            Wanted::Whole(blob, _) | Wanted::Part(blob, ..) => blob,
        }
    }

    fn bytes(&self) -> u64 {
        match self {
            Wanted::Whole(_, size) => *size,
            Wanted::Part(_, _, range) => range.end.0 - range.start.0,
        }
    }
}

pub(crate) fn run(session: &Session, arguments: &Arguments) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let name: ImageName = arguments.image.parse()?;
    let plain_http = arguments.access.plain_http;
    let options = Options { plain_http, ..session.config.node_registries()? };
    if options.dragonfly.is_none() {
        bail!("there is no Dragonfly to ask: the configuration has no [p2p] table");
    }
    let shared = lazuli_registry::open_shared(&name, &options)?;
    let shared = shared.with_context(|| format!("{name} is not in a registry"))?;
    let repository = lazuli_registry::open(&name, &options)?;
    let wanted = if arguments.hot {
        let image = open::open_with(
            &arguments.image,
            &options,
            &arguments.access,
            &session.config,
            &runtime,
        )?;
        hot(session, &image, &runtime)?
    } else {
        let platform = arguments.access.platform()?;
        let replacement = options.referrers.replacement(&name);
        let manifest =
            lazy_manifest(&*repository, &name, platform.as_ref(), replacement, options.indexes);
        let manifest = runtime.block_on(manifest)?.manifest.parsed;
        let layers = manifest.layers.iter();
        let mut wanted: Vec<_> =
            layers.map(|layer| Wanted::Whole(layer.digest, layer.size)).collect();
        if manifest.layers.iter().any(|layer| layer.index_of().is_some()) {
            // The data of an index is in the layers of the image that it belongs to.
            let image = runtime.block_on(repository.manifest(platform.as_ref()))?.parsed;
            let layers = image.layers.iter();
            wanted.extend(layers.map(|layer| Wanted::Whole(layer.digest, layer.size)));
        }
        wanted
    };
    let bytes = wanted.iter().map(Wanted::bytes).sum();
    let bar = progress::bytes(Some(bytes), "preheating");
    let places = &Places { shared, repository };
    let asked = wanted.into_iter().map(|wanted| Ok(places.bring(wanted, &bar)));
    let all = iter(asked).try_buffer_unordered(REQUESTS).try_collect::<()>();
    runtime.block_on(all).with_context(|| format!("cannot preheat {name}"))?;
    bar.finish_and_clear();
    println!("{name}: {} are with Dragonfly", BinaryBytes(bytes));
    Ok(())
}

/// The reads of an image's starts, and its metadata.
fn hot(
    session: &Session,
    image: &OpenedImage,
    runtime: &tokio::runtime::Runtime,
) -> Result<Vec<Wanted>> {
    let blobs = image.image.bootstrap.blobs();
    let spans: Vec<_> = match trace::find(&session.root, image, runtime) {
        Ok(trace) => trace.spans().collect(),
        Err(unknown) => {
            let baked = |blob| Some((blob, image.hot_bytes(blob)?));
            let baked = blobs.iter().filter_map(baked);
            let baked: Vec<_> =
                baked.map(|(blob, bytes)| (blob.id, Stored(0)..Stored(bytes))).collect();
            if baked.is_empty() {
                return Err(unknown);
            }
            baked
        }
    };
    let metadata = image.manifest.parsed.layers.iter();
    let metadata = metadata.filter(|layer| blobs.iter().all(|blob| blob.id != layer.digest));
    let whole = metadata.map(|layer| Wanted::Whole(layer.digest, layer.size));
    // A trace of another node may not fit the image.
    let fitting = spans.into_iter().filter_map(|(id, span)| {
        let blob = blobs.iter().find(|blob| blob.id == id)?;
        (span.end.0 <= blob.stored_size).then_some((blob, span))
    });
    let parts = fitting.flat_map(|(blob, span)| {
        let starts = (span.start.0..span.end.0).step_by(PART as usize);
        starts.map(move |start| {
            let part = Stored(start)..Stored(span.end.0.min(start + PART));
            Wanted::Part(blob.id, blob.stored_size, part)
        })
    });
    Ok(whole.chain(parts).collect())
}

/// The repositories to read an image from.
struct Places {
    /// Dragonfly alone.
    shared: Arc<dyn Pull>,
    /// All of them.
    repository: Arc<dyn Pull>,
}

impl Places {
    /// Makes Dragonfly fetch something, and drops the bytes. Renews the credentials that Dragonfly
    /// shows to the registry when they have expired.
    async fn bring(&self, wanted: Wanted, bar: &ProgressBar) -> Result<()> {
        match self.fetch(&wanted, bar).await {
            Err(error) if is_denied(&error) => {
                self.repository.has_blob(wanted.blob()).await?;
                self.fetch(&wanted, bar).await
            }
            fetched => fetched,
        }
    }

    async fn fetch(&self, wanted: &Wanted, bar: &ProgressBar) -> Result<()> {
        match wanted {
            Wanted::Whole(blob, size) => {
                let mut reader = self.shared.blob(blob, *size).await?;
                let mut buffer = vec![0; 64 << 10];
                loop {
                    match reader.read(&mut buffer).await? {
                        0 => break,
                        read => bar.inc(read as u64),
                    }
                }
            }
            Wanted::Part(blob, size, range) => {
                let counted = |bytes| bar.inc(bytes);
                self.shared.read(blob, *size, range.clone(), &counted).await?;
            }
        }
        Ok(())
    }
}

fn is_denied(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(RegistryError::Denied { .. }))
}
