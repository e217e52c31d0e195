//! Scrubs the whole cache. The client requests step by step, so that the death of a worker loses
//! nothing, and a disconnected client ends the scrub.

use std::{
    collections::HashMap,
    fs::{self, File},
    io,
    path::Path,
};

use lazuli_image::Digest;
use lazuli_sys::path_error::At as _;

use crate::{
    cache::{Cache, CacheError},
    daemon::{
        DaemonError,
        api::{ScrubBlob, ScrubPlan, ScrubStep, UnusedBlob},
        node::Node,
        served::image::ServedImage,
    },
    image::{self, StoredImage},
    kernel::pages,
};

impl Node {
    /// The blobs to check.
    pub(in crate::daemon) async fn scrub_plan(&self) -> Result<ScrubPlan, DaemonError> {
        let images = self.root.join("images");
        let described = tokio::task::spawn_blocking(move || describe(&images)).await;
        let (described, damaged) = described
            .unwrap_or_else(|error| Err(io::Error::other(error)))
            .at(self.root.join("images"))?;
        let mut plan = ScrubPlan { damaged, ..ScrubPlan::default() };
        let served = self.mounts.served().await;
        for (directory, bytes) in self.cache.directories()? {
            let Some(found) = described.get(&directory) else {
                plan.unused.push(UnusedBlob { directory, bytes });
                continue;
            };
            let has = |image: &ServedImage| found.images.contains(&image.manifest_digest());
            let mounted = served.iter().filter(|(_, image)| has(image));
            plan.blobs.push(ScrubBlob {
                blob: found.blob,
                bytes,
                images: found.images.clone(),
                position: found.position,
                mountpoints: mounted.map(|(mountpoint, _)| mountpoint.clone()).collect(),
            });
        }
        Ok(plan)
    }

    /// Checks some chunks of the blob at `position` in an image's table, from `from` on. Wrong
    /// bytes go from the page cache, too, as far as images are mounted that have the blob.
    pub(in crate::daemon) async fn scrub(
        &self,
        image: Digest,
        position: usize,
        from: usize,
    ) -> Result<ScrubStep, DaemonError> {
        let directory = self.root.join("images").join(image.hex());
        let cache = self.cache.clone();
        let open = move || -> Result<_, DaemonError> {
            let image = StoredImage::open(&directory)?;
            let blob = image.bootstrap.blobs().get(position);
            Ok(blob.map(|blob| cache.find(blob)).transpose()?.flatten())
        };
        let opened = tokio::task::spawn_blocking(open).await;
        let opened = opened
            .unwrap_or_else(|error| Ok(Err(io::Error::other(error)).at(self.root.join("images"))?));
        // Given up since the plan was made: nothing is wrong with it.
        let Some(blob) = opened? else { return Ok(ScrubStep::default()) };
        let step = blob.scrub(from).await;
        let (is_wrong, is_last) = (!step.wrong.is_empty(), step.next.is_none());
        if is_wrong || is_last && !blob.is_complete() {
            let served = self.mounts.served().await;
            let drop_pages = move || {
                for (mountpoint, image) in served.iter().filter(|(_, image)| image.has(&blob)) {
                    let dropped = if is_wrong {
                        tracing::warn!(mountpoint = %mountpoint.display(), "dropping its pages");
                        forget_pages(mountpoint).and(image.close_gap(mountpoint))
                    } else {
                        // No reader should have got missing data, but that doesn't only depend on
                        // the disk.
                        image.forget_missing(mountpoint)
                    };
                    dropped.unwrap_or_else(
                        |error| tracing::error!(%error, "wrong bytes may be in memory"),
                    );
                }
            };
            let dropped = tokio::task::spawn_blocking(drop_pages).await;
            dropped.unwrap_or_else(|error| tracing::error!(%error, "wrong bytes may be in memory"));
        }
        Ok(step.into())
    }
}

/// A blob as images describe it.
#[derive(Debug)]
struct Described {
    blob: Digest,
    images: Vec<Digest>,
    position: usize,
}

/// The blobs of all images in a directory, by the names of their directories in the cache; and
/// images that cannot be used.
fn describe(images: &Path) -> io::Result<(HashMap<String, Described>, Vec<String>)> {
    let mut damaged = Vec::new();
    let mut described: HashMap<String, Described> = HashMap::new();
    for path in image::directories(images)? {
        let image = match StoredImage::open(&path) {
            Ok(image) => image,
            Err(error) => {
                damaged.push(format!("{}: {error}", path.display()));
                continue;
            }
        };
        for (position, blob) in image.bootstrap.blobs().iter().enumerate() {
            let name = Cache::directory_name(blob).map_err(|error: CacheError| {
                damaged.push(format!("{}: {error}", path.display()));
            });
            let Ok(name) = name else { continue };
            let new = Described { blob: blob.id, images: Vec::new(), position };
            described.entry(name).or_insert(new).images.push(image.manifest_digest);
        }
    }
    Ok((described, damaged))
}

/// Drops the pages of every file below `dir`, except those that a program has mapped.
fn forget_pages(dir: &Path) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let kind = entry.file_type()?;
        if kind.is_dir() {
            forget_pages(&entry.path())?;
        } else if kind.is_file() {
            let file = File::open(entry.path())?;
            pages::forget(&file, &(0..entry.metadata()?.len()))?;
        }
    }
    Ok(())
}
