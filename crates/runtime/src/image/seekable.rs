//! Images whose layers have tables of contents: the node makes their bootstrap from these tables.
//! Their digests are in the manifest.

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use bytes::Bytes;
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use lazuli_builder::{
    BuildError,
    index::{LayerToc, SeekableImage},
};
use lazuli_image::{
    FormatError, Stored,
    oci::{Descriptor, media_type},
    rafs::{self, Bootstrap},
    seekable::{MAX_TOC, SeekableLayer, TocPlace, footer, toc_of_frame, toc_of_member},
};
use lazuli_registry::{Document, Manifest, Parsed, Pull, RegistryError};
use lazuli_sys::mmap::{FinishedFile, Map};
use serde_json::json;
use tokio::sync::Mutex;

use super::{
    chunk_limit::Reservation,
    error::ImageError,
    fetched::Fetched,
    point_files,
    unpack::{self, UnpackError, blocking},
};

/// Bytes at the end of an eStargz layer that are fetched first: the footer, and of small layers the
/// table of contents.
const TAIL: u64 = 64 << 10;

/// Maximum size of all tables of an image in bytes, stored and unpacked together.
const LIMIT: u64 = MAX_TOC;

/// Maximum size of the tables of all images that are being opened. One image may have half of what
/// others leave.
const ALL: u64 = 4 * LIMIT;

/// Bytes of the tables of all images that are being opened.
static HELD: AtomicU64 = AtomicU64::new(0);

/// Layers whose tables are fetched at the same time.
const LAYERS: usize = 8;

/// Makes an image of layers from their tables.
type Assemble = fn(&[LayerToc]) -> Result<SeekableImage, BuildError>;

/// Makes the bootstrap of the image that `assemble` makes of `layers` in the new file `path`.
pub(super) async fn make_bootstrap(
    repository: &Arc<dyn Pull>,
    layers: &[SeekableLayer],
    assemble: Assemble,
    path: &Path,
) -> Result<(Bootstrap<Map>, Reservation, Fetched), ImageError> {
    let image = repository.describe();
    let places = repository.clone().places();
    let tables = Tables::new(&image, &places);
    let fetches = layers.iter().map(|layer| tables.fetch(layer));
    let fetches = stream::iter(fetches.collect::<Vec<_>>()).buffered(LAYERS);
    let (tocs, fetched): (Vec<_>, Vec<_>) =
        fetches.try_collect::<Vec<_>>().await?.into_iter().unzip();
    let fetched = fetched.into_iter().fold(Fetched::default(), |sum, it: Fetched| Fetched {
        bytes: sum.bytes + it.bytes,
        requests: sum.requests + it.requests,
    });
    let failed = |error| match error {
        UnpackError::Format(source) => ImageError::Format { image: image.clone(), source },
        source => ImageError::Unpack { image: image.clone(), source },
    };
    let make = move || Ok(assemble(&tocs));
    let made = blocking(make).await.map_err(failed)?;
    let made = made.map_err(|source| ImageError::Seekable { image: image.clone(), source })?;
    let path = path.to_owned();
    let open = move || {
        let SeekableImage { bootstrap, points } = made;
        let bootstrap = FinishedFile::create(&path, &bootstrap[..])?;
        point_files::write(&path, &points)?;
        let (mut bootstrap, reservation) = unpack::open_own(bootstrap)?;
        let attached = point_files::attach(&path, &mut bootstrap);
        attached.map_err(|unusable| UnpackError::Io(unusable.problem))?;
        // The kernel will believe what it says.
        rafs::check(&bootstrap).map_err(UnpackError::Format)?;
        Ok((bootstrap, reservation))
    };
    let (bootstrap, reservation) = blocking(open).await.map_err(failed)?;
    Ok((bootstrap, reservation, fetched))
}

/// The manifest under which this node keeps one layer of `image`, which overlayfs puts on others.
/// The type of artifact tells it from a manifest that a registry may send: an image of the same
/// layer shows no whiteouts.
pub(crate) fn lone_layer(image: &Manifest, layer: &Descriptor) -> Result<Manifest, RegistryError> {
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": media_type::MANIFEST,
        "artifactType": media_type::SEEKABLE_LAYER,
        "config": image.parsed.config,
        "layers": [layer],
        "subject": image.descriptor(),
    });
    let document = Document::new(manifest.to_string().into_bytes(), media_type::MANIFEST);
    match document.parse("this node")? {
        Parsed::Image(manifest) => Ok(*manifest),
        Parsed::Index(..) => unreachable!("it has the type of an image's manifest"),
    }
}

/// For each blob, the stored bytes at its beginning that a start reads: to the end of the content
/// of the files in the bootstrap's prefetch table.
pub(super) fn hot<B: AsRef<[u8]>>(bootstrap: &Bootstrap<B>) -> Vec<u64> {
    let mut hot = vec![0; bootstrap.blobs().len()];
    for file in bootstrap.prefetch() {
        let chunks = bootstrap.chunks(*file).into_iter().flatten().flatten();
        for (chunk, _) in chunks {
            let blob = usize::from(chunk.blob.0);
            if let Some(found) = bootstrap.blobs()[blob].chunk(chunk.number) {
                hot[blob] = found.stored_end().0.max(hot[blob]);
            }
        }
    }
    hot
}

/// The tables of contents of an image's layers.
struct Tables<'a> {
    image: &'a str,
    places: &'a [Arc<dyn Pull>],
    /// Bytes of the tables held so far, and their limit.
    bytes: AtomicU64,
    limit: u64,
}

/// Held while a table is unpacked and counted: its size is known only afterwards, so the tables of
/// all images take at most [`LIMIT`] more than they may.
static UNPACKING: Mutex<()> = Mutex::const_new(());

impl Drop for Tables<'_> {
    fn drop(&mut self) {
        HELD.fetch_sub(*self.bytes.get_mut(), Ordering::Relaxed);
    }
}

impl<'a> Tables<'a> {
    fn new(image: &'a str, places: &'a [Arc<dyn Pull>]) -> Self {
        let left = ALL.saturating_sub(HELD.load(Ordering::Relaxed));
        Tables { image, places, bytes: AtomicU64::new(0), limit: LIMIT.min(left / 2) }
    }

    /// The table of `layer`, from the first place that has the right one.
    async fn fetch(&self, layer: &SeekableLayer) -> Result<(LayerToc, Fetched), ImageError> {
        let mut fetched = Fetched::default();
        let (mut failures, mut wrong) = (Vec::new(), None);
        for place in self.places {
            match self.fetch_from(place, layer, &mut fetched).await {
                Ok(toc) => return Ok((toc, fetched)),
                Err(ImageError::Registry(error)) => failures.push(error),
                // Another place may have other bytes.
                Err(error) => wrong = Some(error),
            }
        }
        Err(wrong.unwrap_or(RegistryError::Everywhere { failures }.into()))
    }

    async fn fetch_from(
        &self,
        place: &Arc<dyn Pull>,
        layer: &SeekableLayer,
        fetched: &mut Fetched,
    ) -> Result<LayerToc, ImageError> {
        let failed = |source| self.wrong(place, source);
        let digest = layer.digest;
        let (toc, end, _unpacking) = match layer.toc {
            TocPlace::Member { digest: of_toc } => {
                let begin = layer.size.saturating_sub(TAIL);
                let tail = read(place, layer, begin..layer.size, fetched).await?;
                let at = footer(&tail, digest).map_err(failed)?;
                self.must_be_within(place, layer, at, layer.size)?;
                let member = match at.checked_sub(begin) {
                    Some(here) => tail.slice(here as usize..),
                    None => {
                        let before = read(place, layer, at..begin, fetched).await?;
                        [&before[..], &tail].concat().into()
                    }
                };
                let unpack = move || Ok(toc_of_member(&member, of_toc, digest));
                let unpacking = UNPACKING.lock().await;
                (self.unpack(unpack).await?.map_err(failed)?, at, unpacking)
            }
            TocPlace::Frame { offset, stored_size, size, digest: of_toc } => {
                let end = offset.saturating_add(stored_size);
                self.must_be_within(place, layer, offset, end)?;
                let stored = read(place, layer, offset..end, fetched).await?;
                let unpack = move || Ok(toc_of_frame(&stored, size, of_toc, digest));
                let unpacking = UNPACKING.lock().await;
                let toc = self.unpack(unpack).await?.map_err(failed)?;
                // The header of its skippable frame comes before it.
                (toc, offset.saturating_sub(FRAME_HEADER), unpacking)
            }
        };
        self.count(place, layer, toc.len() as u64)?;
        Ok(LayerToc { layer: *layer, toc, end: Stored(end) })
    }

    fn must_be_within(
        &self,
        place: &Arc<dyn Pull>,
        layer: &SeekableLayer,
        begin: u64,
        end: u64,
    ) -> Result<(), ImageError> {
        if begin >= end || end > layer.size {
            let size = layer.size;
            let problem = format!("it is said to be at {begin} to {end} of {size} bytes");
            let object = ("table of contents of", layer.digest);
            return Err(self.wrong(place, FormatError::new(object, begin, problem)));
        }
        self.count(place, layer, end - begin)
    }

    /// Counts bytes that are held.
    fn count(
        &self,
        place: &Arc<dyn Pull>,
        layer: &SeekableLayer,
        bytes: u64,
    ) -> Result<(), ImageError> {
        let all = self.bytes.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes);
        HELD.fetch_add(bytes, Ordering::Relaxed);
        if all <= self.limit {
            return Ok(());
        }
        let problem = format!("the image's tables have more than {} bytes", self.limit);
        let object = ("table of contents of", layer.digest);
        Err(self.wrong(place, FormatError::new(object, 0, problem)))
    }

    async fn unpack<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, UnpackError> + Send + 'static,
    ) -> Result<T, ImageError> {
        let image = || self.image.to_owned();
        blocking(work).await.map_err(|source| ImageError::Unpack { image: image(), source })
    }

    fn wrong(&self, place: &Arc<dyn Pull>, source: FormatError) -> ImageError {
        ImageError::Toc { image: self.image.to_owned(), place: place.describe(), source }
    }
}

/// Bytes before the payload of a skippable frame.
const FRAME_HEADER: u64 = 8;

/// Reads stored bytes of a layer.
async fn read(
    place: &Arc<dyn Pull>,
    layer: &SeekableLayer,
    range: std::ops::Range<u64>,
    fetched: &mut Fetched,
) -> Result<Bytes, ImageError> {
    let range = Stored(range.start)..Stored(range.end);
    let bytes = place.read(&layer.digest, layer.size, range, &|_| {}).await?;
    fetched.bytes += bytes.len() as u64;
    fetched.requests += 1;
    Ok(bytes)
}
