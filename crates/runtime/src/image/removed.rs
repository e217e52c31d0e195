//! Images that containerd has removed, marked on the disk until nothing uses them: the marks
//! survive restarts.

use std::{
    collections::HashSet,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use lazuli_image::{Algorithm, Digest, oci::Manifest};

use super::directory::{MANIFEST, PARTIAL, directories, read};

const REMOVED: &str = "removed";

/// Marks an image.
pub(crate) fn mark(images: &Path, manifest: &Digest) -> io::Result<()> {
    match File::create(images.join(manifest.hex()).join(REMOVED)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// The images in `images` that are indexes of the image with this manifest.
pub(crate) fn indexes_of(images: &Path, subject: &Digest) -> Vec<Digest> {
    let is_of = |directory: &PathBuf| {
        let manifest = read(directory, MANIFEST).ok().and_then(|raw| Manifest::parse(&raw).ok());
        let refers = manifest.and_then(|manifest| manifest.subject).map(|it| it.digest);
        refers == Some(*subject)
    };
    let paths = directories(images).unwrap_or_default().into_iter().filter(is_of);
    paths
        .filter_map(|path| Digest::from_hex(Algorithm::Sha256, path.file_name()?.to_str()?))
        .collect()
}

/// Takes the mark away: the image is used again.
pub(crate) fn unmark(images: &Path, manifest: &Digest) {
    // Most have no mark. A mark that remains costs a fetch of the metadata.
    let _ = fs::remove_file(images.join(manifest.hex()).join(REMOVED));
}

/// The marked images.
pub(crate) fn marked(images: &Path) -> Vec<Digest> {
    let paths = directories(images).unwrap_or_default().into_iter();
    let marked = paths.filter(|path| path.join(REMOVED).exists());
    marked
        .filter_map(|path| Digest::from_hex(Algorithm::Sha256, path.file_name()?.to_str()?))
        .collect()
}

/// Moves an image out of `images` atomically; [`delete`] removes the rest.
pub(crate) fn take_away(images: &Path, manifest: &Digest) -> io::Result<()> {
    let hex = manifest.hex();
    fs::rename(images.join(&hex), images.join(format!("{PARTIAL}{hex}")))
}

/// Deletes an image that was moved away.
pub(crate) fn delete(images: &Path, manifest: &Digest) -> io::Result<()> {
    fs::remove_dir_all(images.join(format!("{PARTIAL}{}", manifest.hex())))
}

/// The layers of an image, data blobs included, that no other image has, as far as manifests can be
/// read.
pub(crate) fn only_in(images: &Path, manifest: &Digest) -> HashSet<Digest> {
    let own = images.join(manifest.hex());
    let mut layers = layers_in(&own);
    for other in directories(images).unwrap_or_default().iter().filter(|other| **other != own) {
        for layer in layers_in(other) {
            layers.remove(&layer);
        }
    }
    layers
}

fn layers_in(directory: &Path) -> HashSet<Digest> {
    let manifest = read(directory, MANIFEST).ok().and_then(|raw| Manifest::parse(&raw).ok());
    let layers = manifest.into_iter().flat_map(|manifest| manifest.layers);
    layers.flat_map(|layer| layer.index_of().into_iter().chain([layer.digest])).collect()
}
