//! The directory of an image, and those of all images.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use lazuli_sys::{mmap::FinishedFile, path_error::At as _};

use super::{error::ImageError, point_files};

pub(super) const MANIFEST: &str = "manifest.json";
pub(super) const CONFIG: &str = "config.json";
pub(super) const BOOTSTRAP: &str = "bootstrap";
pub(super) const BOOTSTRAP_DIGEST: &str = "bootstrap.digest";
pub(super) const DIFF_ID: &str = "layer.diff-id";

/// Waits until all of the image in `directory` is on the disk. A start doesn't wait for that:
/// damage by a power cut is detected and fetched again.
pub(crate) fn sync(directory: &Path) -> Result<(), ImageError> {
    let names = [MANIFEST, CONFIG, BOOTSTRAP, BOOTSTRAP_DIGEST];
    let files = names.iter().map(|name| directory.join(name));
    let points = point_files::found(directory).at(directory)?;
    let files = files.chain(points).chain([directory.to_owned()]);
    for path in files.chain(directory.parent().map(Path::to_owned)) {
        let synced = File::open(&path).and_then(|file| file.sync_all());
        synced.at(path)?;
    }
    Ok(())
}

/// The bootstrap's path in an image's directory.
pub fn bootstrap_path(directory: &Path) -> PathBuf {
    directory.join(BOOTSTRAP)
}

/// The directories in `images` of images that were fetched whole, in the order of their names.
pub(crate) fn directories(images: &Path) -> io::Result<Vec<PathBuf>> {
    let mut directories = Vec::new();
    for entry in fs::read_dir(images)? {
        let entry = entry?;
        if !entry.file_name().as_encoded_bytes().starts_with(b".") {
            directories.push(entry.path());
        }
    }
    directories.sort();
    Ok(directories)
}

/// Removes the remains of interrupted pulls in `images`. No other process may use the directory.
pub(crate) fn sweep(images: &Path) {
    for entry in fs::read_dir(images).into_iter().flatten().flatten() {
        if entry.file_name().as_encoded_bytes().starts_with(PARTIAL.as_bytes())
            && let Err(error) = fs::remove_dir_all(entry.path())
        {
            tracing::warn!(path = %entry.path().display(), %error, "cannot remove");
        }
    }
}

/// How the names of directories begin that are being filled.
pub(super) const PARTIAL: &str = ".partial-";

/// A directory that is being filled; removed unless it is committed.
pub(super) struct Partial(pub(super) PathBuf);

impl Partial {
    pub(super) fn create(images: &Path) -> Result<Self, ImageError> {
        use std::sync::atomic::{AtomicU64, Ordering};
        static COUNTER: AtomicU64 = AtomicU64::new(0);
        let number = COUNTER.fetch_add(1, Ordering::Relaxed);
        let path = images.join(format!("{PARTIAL}{}-{number}", std::process::id()));
        fs::create_dir_all(&path).at(&path)?;
        Ok(Partial(path))
    }

    pub(super) fn commit(self, to: &Path) -> Result<(), ImageError> {
        match fs::rename(&self.0, to) {
            // Another task fetched the same image meanwhile; its copy is as good.
            Err(_) if to.exists() => Ok(()),
            Err(source) => Err(ImageError::Io { path: to.to_owned(), source }),
            Ok(()) => {
                std::mem::forget(self);
                Ok(())
            }
        }
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

pub(super) fn write(directory: &Path, name: &str, content: &[u8]) -> Result<(), ImageError> {
    let path = directory.join(name);
    FinishedFile::create(&path, content).at(&path)?;
    Ok(())
}

pub(super) fn read(directory: &Path, name: &str) -> Result<Vec<u8>, ImageError> {
    let path = directory.join(name);
    Ok(fs::read(&path).at(&path)?)
}
