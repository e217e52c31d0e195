//! Chain ids of a lazy image's layers, by content.
//!
//! containerd computes a layer's chain id from the image's configuration, and doesn't look at the
//! content of a layer that a snapshotter reports present. So a snapshotter has to compare. A data
//! layer is stored as it is, so its digest in the manifest is that of its tar. The manifest names
//! the compressed form of the bootstrap layer, so its tar is hashed while it is unpacked.

use std::{fs, path::Path, sync::Arc};

use lazuli_image::{
    Digest,
    oci::{self, Manifest},
};
use lazuli_registry::{self as registry, Pull, SeekableLayers};
use lazuli_sys::path_error::At as _;

use super::{
    StoredImage,
    directory::{DIFF_ID, MANIFEST, Partial, read, write},
    error::ImageError,
    fetch::{begin, find_bootstrap},
};

/// Chain ids of the data layers of a lazy image, lowest first; `None` for an ordinary image.
pub fn of_data(manifest: &Manifest) -> Option<Vec<Digest>> {
    let (data, _) = manifest.lazy_base()?;
    Some(oci::chain_ids(data.iter().map(|layer| layer.digest)))
}

/// The chain id of the bootstrap layer of the image with the digest `manifest`, if `images` has the
/// metadata to compute it.
pub fn stored(images: &Path, manifest: &Digest) -> Option<Digest> {
    let directory = images.join(manifest.hex());
    let raw = read(&directory, MANIFEST).ok().filter(|raw| manifest.matches(raw))?;
    of_bootstrap(&Manifest::parse(&raw).ok()?, diff_id(&directory)?)
}

/// The chain id of the bootstrap layer. Fetches missing metadata once the image is admitted: all of
/// it or, for an image that an earlier version fetched, the bootstrap layer once more.
pub async fn fetched<T, E: From<ImageError>>(
    repository: Arc<dyn Pull>,
    manifest: &registry::Manifest,
    images: &Path,
    admission: impl Future<Output = Result<T, E>>,
) -> Result<Digest, E> {
    let place = repository.describe();
    let not_lazy = || ImageError::NotLazy { image: place.clone() };
    let (_, layer) = manifest.parsed.lazy_base().ok_or_else(not_lazy)?;
    let seekable = SeekableLayers::Ordinary;
    let fetch =
        StoredImage::fetch_admitted(repository.clone(), manifest, images, seekable, admission);
    let fetched = fetch.await;
    let (image, ..) = fetched?;
    let diff_id = match diff_id(&image.directory) {
        Some(diff_id) => diff_id,
        None => {
            let partial = Partial::create(images)?;
            let begun = begin(&*repository, layer).await;
            let path = partial.0.join("again");
            let from = (&manifest.parsed, layer);
            let unpacked = find_bootstrap(&repository, from, begun, &path).await?;
            let diff_id = unpacked.0.diff_id;
            write(&partial.0, DIFF_ID, diff_id.to_string().as_bytes())?;
            let path = image.directory.join(DIFF_ID);
            fs::rename(partial.0.join(DIFF_ID), &path).at(&path).map_err(ImageError::from)?;
            diff_id
        }
    };
    Ok(of_bootstrap(&manifest.parsed, diff_id).ok_or_else(not_lazy)?)
}

fn of_bootstrap(manifest: &Manifest, diff_id: Digest) -> Option<Digest> {
    let (data, _) = manifest.lazy_base()?;
    let layers = data.iter().map(|layer| layer.digest).chain([diff_id]);
    oci::chain_ids(layers).pop()
}

/// The DiffID recorded when the bootstrap was unpacked. A power cut may have damaged the file.
fn diff_id(directory: &Path) -> Option<Digest> {
    let noted = read(directory, DIFF_ID).ok()?;
    std::str::from_utf8(&noted).ok()?.parse().ok()
}
