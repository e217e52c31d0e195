//! The points of an image's gzip layers, in a file for each layer beside the bootstrap.

use std::{
    ffi::OsStr,
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};

use lazuli_image::{
    Blob, BlobIndex, Codec, Points,
    rafs::{Bootstrap, TailInfo, layout::features::ZRAN},
};
use lazuli_sys::mmap::{FinishedFile, Map};

/// Why the points of an image cannot be used.
#[derive(Debug)]
pub(super) struct Unusable {
    pub(super) path: PathBuf,
    pub(super) problem: io::Error,
}

/// The file of points for a layer of the image with its bootstrap, now or later, in the file
/// `bootstrap`.
fn path(bootstrap: &Path, BlobIndex(index): BlobIndex) -> PathBuf {
    let mut name = bootstrap.as_os_str().to_owned();
    name.push(format!(".points-{index}"));
    name.into()
}

/// All such files in an image's directory.
pub(super) fn found(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = fs::read_dir(directory)?.map(|entry| entry.map(|entry| entry.path()));
    let mut paths = entries.collect::<io::Result<Vec<_>>>()?;
    let is_ours = |path: &PathBuf| path.extension().is_some_and(is_points);
    paths.retain(is_ours);
    Ok(paths)
}

fn is_points(extension: &OsStr) -> bool {
    extension.as_encoded_bytes().starts_with(b"points-")
}

/// Writes the points beside a new bootstrap.
pub(super) fn write(bootstrap: &Path, points: &[(BlobIndex, Points)]) -> io::Result<()> {
    points.iter().try_for_each(|(layer, points)| {
        FinishedFile::create(&path(bootstrap, *layer), points.bytes()).map(drop)
    })
}

/// Removes the points beside a bootstrap that was not finished.
pub(super) fn remove(bootstrap: &Path) -> io::Result<()> {
    let Some(directory) = bootstrap.parent() else { return Ok(()) };
    let own = |path: &PathBuf| path.with_extension("") == bootstrap;
    found(directory)?.into_iter().filter(own).try_for_each(fs::remove_file)
}

/// Attaches the points of its layers to `image`, whose bootstrap is in the file `bootstrap`.
pub(super) fn attach<B: AsRef<[u8]>>(
    bootstrap: &Path,
    image: &mut Bootstrap<B>,
) -> Result<(), Unusable> {
    for layer in layers(image).collect::<Vec<_>>() {
        let path = path(bootstrap, layer);
        let mut read = || {
            let map = Map::of(FinishedFile::open(&path)?)?;
            let points = Points::parse(Arc::new(map)).map_err(io::Error::other)?;
            image.set_points(layer, points).map_err(io::Error::other)
        };
        read().map_err(|problem| Unusable { path: path.clone(), problem })?;
    }
    Ok(())
}

fn layers<B: AsRef<[u8]>>(image: &Bootstrap<B>) -> impl Iterator<Item = BlobIndex> {
    let blobs = image.blobs().iter().zip(image.tails()).zip(0..);
    let has_points =
        |(blob, tail): (&Blob, &TailInfo)| blob.codec == Codec::Gzip && tail.features & ZRAN != 0;
    blobs.filter(move |(blob, _)| has_points(*blob)).map(|(_, index)| BlobIndex(index))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_points_of_this_bootstrap_are_removed() {
        let directory = tempfile::tempdir().unwrap();
        let bootstrap = directory.path().join("bootstrap");
        for name in ["bootstrap", "bootstrap.points-0", "bootstrap.points-12", "other.points-0"] {
            fs::write(directory.path().join(name), name).unwrap();
        }
        remove(&bootstrap).unwrap();
        let left = found(directory.path()).unwrap();
        assert_eq!(left, [directory.path().join("other.points-0")]);
        assert!(bootstrap.exists());
    }
}
