//! Fetching the metadata of an image.

use std::{fs, io, path::Path, sync::Arc};

use futures_util::future::join_all;
use lazuli_builder::index::{assemble_seekable, assemble_seekable_one};
use lazuli_image::{
    Algorithm, Digest,
    oci::{Descriptor, Manifest},
    rafs::{self, BlobRecord, Bootstrap},
    seekable::SeekableLayer,
};
use lazuli_registry::{
    self as registry, Pull, RegistryError, SeekableLayers, SmallBlob, into_blocking,
    manifest::DOCUMENT_LIMIT,
};
use lazuli_sys::mmap::Map;

use super::{
    chunk_limit::Reservation,
    directory::{BOOTSTRAP, BOOTSTRAP_DIGEST, CONFIG, DIFF_ID, MANIFEST, write},
    error::ImageError,
    fetched::Fetched,
    point_files, seekable,
    tables::{self, Tables},
    unpack::{self, UnpackError, blocking},
};

/// The files of an image's directory.
pub(super) struct FetchedMetadata {
    pub(super) manifest: Vec<u8>,
    pub(super) config: Vec<u8>,
    pub(super) bootstrap: Arc<Bootstrap<Map>>,
    /// Held until the bootstrap is shared.
    pub(super) reservation: Option<Reservation>,
}

/// The source of an image's bootstrap.
pub(super) enum Form<'a> {
    /// A layer.
    Lazy(&'a Descriptor),
    /// The tables of contents of its layers.
    Seekable(Vec<SeekableLayer>),
    /// The table of contents of its only layer, which overlayfs puts on others.
    SeekableLayer(SeekableLayer),
}

impl<'a> Form<'a> {
    /// Returns the form of the image with this manifest; `None` for an ordinary one.
    pub(super) fn of(manifest: &'a Manifest, seekable: SeekableLayers) -> Option<Self> {
        match (manifest.lazy_base(), seekable) {
            (Some((_, layer)), _) => Some(Form::Lazy(layer)),
            (None, SeekableLayers::Lazy) => SeekableLayer::all_of(manifest).map(Form::Seekable),
            (None, SeekableLayers::Ordinary) => None,
        }
    }
}

/// Fetches everything into `directory`, once the image is admitted.
pub(super) async fn fill<T, E: From<ImageError>>(
    repository: &Arc<dyn Pull>,
    manifest: &registry::Manifest,
    form: Form<'_>,
    directory: &Path,
    fetched: &mut Fetched,
    admission: impl Future<Output = Result<T, E>>,
) -> Result<(FetchedMetadata, T), E> {
    let path = directory.join(BOOTSTRAP);
    let bootstrap = async {
        match form {
            Form::Lazy(layer) => {
                let (admitted, begun) = tokio::join!(admission, begin(&**repository, layer));
                let admitted = admitted?;
                let from = (&manifest.parsed, layer);
                let (unpacked, fetched) = find_bootstrap(repository, from, begun, &path).await?;
                let Unpacked { bootstrap, reservation, diff_id } = unpacked;
                write(directory, DIFF_ID, diff_id.to_string().as_bytes())?;
                Ok::<_, E>((admitted, bootstrap, reservation, fetched))
            }
            Form::Seekable(layers) => {
                let admitted = admission.await?;
                let made =
                    seekable::make_bootstrap(repository, &layers, assemble_seekable, &path).await?;
                let (bootstrap, reservation, fetched) = made;
                Ok((admitted, bootstrap, reservation, fetched))
            }
            Form::SeekableLayer(layer) => {
                let admitted = admission.await?;
                let assemble = |tocs: &[_]| assemble_seekable_one(&tocs[0]);
                let made = seekable::make_bootstrap(repository, &[layer], assemble, &path).await?;
                let (bootstrap, reservation, fetched) = made;
                Ok((admitted, bootstrap, reservation, fetched))
            }
        }
    };
    // Concurrently: a mount saves one round trip. Both run to their ends: the directory is removed
    // if one fails, and the thread that writes the bootstrap to it cannot be stopped.
    let config = repository.small_blob(&manifest.parsed.config);
    let (config, bootstrap) = tokio::join!(config, bootstrap);
    let (admitted, bootstrap, reservation, of_bootstrap) = bootstrap?;
    let config = config.map_err(ImageError::from)?;
    write(directory, MANIFEST, &manifest.raw)?;
    write(directory, CONFIG, &config.content)?;
    let digest = Algorithm::Blake3.digest(bootstrap.bytes());
    write(directory, BOOTSTRAP_DIGEST, digest.to_string().as_bytes())?;
    fetched.bytes += config.content.len() as u64 + of_bootstrap.bytes;
    fetched.requests += config.requests + of_bootstrap.requests;
    let (manifest, config) = (manifest.raw.to_vec(), config.content.to_vec());
    let content = FetchedMetadata {
        manifest,
        config,
        bootstrap: Arc::new(bootstrap),
        reservation: Some(reservation),
    };
    Ok((content, admitted))
}

/// A bootstrap layer that is being fetched, and the number of requests for it.
pub(super) struct Begun {
    reader: Box<dyn io::Read + Send>,
    requests: u64,
}

/// Requests a bootstrap layer. A small one is read into memory, which is faster; a larger one is
/// streamed.
pub(super) async fn begin(
    repository: &dyn Pull,
    layer: &Descriptor,
) -> Result<Begun, RegistryError> {
    if layer.size <= DOCUMENT_LIMIT {
        let SmallBlob { content, requests } = repository.small_blob(layer).await?;
        return Ok(Begun { reader: Box::new(io::Cursor::new(content)), requests });
    }
    let reader = repository.blob(&layer.digest, layer.size).await?;
    let reader = Box::new(into_blocking(reader, tokio::runtime::Handle::current()));
    Ok(Begun { reader, requests: 1 })
}

/// A bootstrap that was checked, and the digest of the tar that it came in.
pub(super) struct Unpacked {
    pub(super) bootstrap: Bootstrap<Map>,
    reservation: Reservation,
    pub(super) diff_id: Digest,
}

/// Unpacks the bootstrap from the layer, which has `begun` to arrive, to the new file `path`, from
/// whichever place has the right bytes.
pub(super) async fn find_bootstrap(
    repository: &Arc<dyn Pull>,
    from: (&Manifest, &Descriptor),
    begun: Result<Begun, RegistryError>,
    path: &Path,
) -> Result<(Unpacked, Fetched), ImageError> {
    let (_, layer) = from;
    let mut fetched = Fetched::default();
    let places = repository.clone().places();
    let mut unpacked =
        fetch_bootstrap(&**repository, &places, from, begun, path, &mut fetched).await;
    let mut is_again = false;
    // A mirror that broke off or had other bytes may not be the only place.
    for (at, place) in places.iter().enumerate().filter(|_| places.len() > 1) {
        let error = match &unpacked {
            Err(ImageError::Unpack { source: UnpackError::Io(error), .. }) => error.to_string(),
            Err(error @ ImageError::Misplaced { .. }) => error.to_string(),
            // From one place, unless all of them were asked at first.
            Err(ImageError::Registry(error)) if is_again => error.to_string(),
            _ => break,
        };
        is_again = true;
        tracing::warn!(
            error,
            place = place.describe(),
            "fetching the bootstrap from another place"
        );
        let removed = match fs::remove_file(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => removed,
        };
        let removed = removed.and_then(|()| point_files::remove(path));
        removed.map_err(|source| ImageError::Io { path: path.to_owned(), source })?;
        // Request its tables as well, unless it has none.
        let order = [&places[at..], &places[..at]].concat();
        let begun = begin(&**place, layer).await;
        unpacked = fetch_bootstrap(&**place, &order, from, begun, path, &mut fetched).await;
    }
    unpacked.map(|unpacked| (unpacked, fetched))
}

/// Unpacks the bootstrap from the layer to the new file `to`.
async fn fetch_bootstrap(
    repository: &dyn Pull,
    places: &[Arc<dyn Pull>],
    (manifest, layer): (&Manifest, &Descriptor),
    begun: Result<Begun, RegistryError>,
    to: &Path,
    fetched: &mut Fetched,
) -> Result<Unpacked, ImageError> {
    let Begun { reader, requests } = begun?;
    fetched.bytes += layer.size;
    fetched.requests += requests;
    let to = to.to_owned();
    let image = repository.describe();
    let unpack = move || unpack::unpack(reader, &to);
    let unpacked = blocking(unpack).await.map_err(|error| unusable(&image, error))?;
    complete(repository, places, manifest, unpacked, fetched).await
}

/// Fetches the tables that did not come with the bootstrap, and checks all of it.
pub(super) async fn complete(
    repository: &dyn Pull,
    places: &[Arc<dyn Pull>],
    manifest: &Manifest,
    mut unpacked: unpack::Unpacked,
    fetched: &mut Fetched,
) -> Result<Unpacked, ImageError> {
    let image = repository.describe();
    let misplaced = |blob: Digest, place: &Arc<dyn Pull>, problem: String| {
        let (image, place) = (repository.describe(), place.describe());
        ImageError::Misplaced { image, blob, place, problem }
    };
    // Converters that make batches do not always send the tables along.
    let mut unproven = Vec::new();
    let wanted = unpacked.wanted();
    let tables = wanted.iter().map(|(_, record)| tables::fetch(places, manifest, record));
    for ((index, BlobRecord { blob, tail }), found) in wanted.iter().zip(join_all(tables).await) {
        let Tables { bytes, place, is_checked, read } = found?;
        fetched.bytes += read;
        fetched.requests += 1;
        let table = rafs::ci_table_of(&bytes, tail);
        let table = table.map_err(|error| misplaced(blob.id, &place, error.to_string()))?;
        unpacked.give(*index, table);
        unproven.extend((!is_checked).then_some((*index, blob.id, place)));
    }
    let diff_id = unpacked.diff_id();
    let open = move || {
        let (bootstrap, reservation) = unpacked.open()?;
        // Refuse a bad image here, where its name is known, and before any of it is kept. All of it
        // is walked, since the kernel trusts it: the chunk table must have all chunks that files
        // refer to, or they could not be checked.
        rafs::check(&bootstrap).map_err(UnpackError::Format)?;
        Ok(Unpacked { bootstrap, reservation, diff_id })
    };
    let opened = blocking(open).await.map_err(|error| match (error, unproven.first()) {
        (error @ (UnpackError::Format(_) | UnpackError::Meta { .. }), Some((_, blob, place))) => {
            misplaced(*blob, place, error.to_string())
        }
        (error, _) => unusable(&image, error),
    });
    let unpacked = opened?;
    for (index, id, place) in unproven {
        let read = tables::prove(places, &unpacked.bootstrap.blobs()[usize::from(index.0)]).await?;
        fetched.bytes += read.bytes;
        fetched.requests += read.requests;
        read.proof.map_err(|problem| misplaced(id, &place, problem))?;
    }
    Ok(unpacked)
}

/// The error of the image named `image` for that of its bootstrap.
pub(super) fn unusable(image: &str, error: UnpackError) -> ImageError {
    let image = image.to_owned();
    match error {
        UnpackError::Format(source) => ImageError::Format { image, source },
        source => ImageError::Unpack { image, source },
    }
}
