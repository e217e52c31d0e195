//! Records of layers that were converted on this machine before, so that they are not read again.
//!
//! ```text
//! $XDG_CACHE_HOME/lazuli/layers/<sha256 of the layer>-<chunk size>
//! ```
//! A missing or damaged record costs a conversion time, nothing else.

use std::{
    fs::{self, File},
    io::{self, Write as _},
    path::{Path, PathBuf},
    time::SystemTime,
};

use lazuli_builder::{LayerContents, Options};
use lazuli_image::Digest;

/// Bytes of the cache: the layers of some five hundred images, of 1 MB for 20,000 files.
const LIMIT: u64 = 512 << 20;

/// This user's cache; disabled if neither variable gives it a directory.
pub(crate) struct LayerCache {
    directory: Option<PathBuf>,
}

impl LayerCache {
    pub(crate) fn open() -> Self {
        let of = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let caches = of("XDG_CACHE_HOME").or_else(|| Some(of("HOME")?.join(".cache")));
        LayerCache { directory: caches.map(|caches| caches.join("lazuli/layers")) }
    }

    /// The record of a layer.
    pub(crate) fn get(&self, layer: &Digest, options: &Options) -> Option<LayerContents> {
        let path = self.path(layer, options)?;
        let record = LayerContents::from_bytes(&fs::read(&path).ok()?)?;
        // The least recently used are removed first.
        let _ = File::open(&path).and_then(|file| file.set_modified(SystemTime::now()));
        Some(record)
    }

    /// Keeps the record of a layer.
    pub(crate) fn put(&self, layer: &Digest, options: &Options, record: io::Result<Vec<u8>>) {
        let Some(path) = self.path(layer, options) else { return };
        let written = record.and_then(|record| write(&path, &record));
        if let Err(error) = written.and_then(|()| prune(&path, LIMIT)) {
            tracing::debug!(path = %path.display(), %error, "the layer is not remembered");
        }
    }

    fn path(&self, layer: &Digest, options: &Options) -> Option<PathBuf> {
        let name = format!("{}-{}", layer.hex(), options.chunk_size);
        Some(self.directory.as_ref()?.join(name))
    }
}

/// Writes a file that appears whole.
fn write(path: &Path, content: &[u8]) -> io::Result<()> {
    let directory = path.parent().unwrap_or(path);
    fs::create_dir_all(directory)?;
    let mut file = tempfile::NamedTempFile::new_in(directory)?;
    file.write_all(content)?;
    file.persist(path)?;
    Ok(())
}

/// Removes the files beside `path` that were not used for longest, until there are no more than
/// `limit` bytes.
fn prune(path: &Path, limit: u64) -> io::Result<()> {
    let mut files = Vec::new();
    for entry in fs::read_dir(path.parent().unwrap_or(path))? {
        let entry = entry?;
        let metadata = entry.metadata()?;
        files.push((metadata.modified()?, metadata.len(), entry.path()));
    }
    files.sort_by(|a, b| b.cmp(a));
    let mut bytes = 0;
    for (_, size, path) in files {
        bytes += size;
        if bytes > limit {
            fs::remove_file(path)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_least_recently_used_records_are_removed() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        for (name, age) in [("old", 20), ("new", 0), ("middle", 10)] {
            write(&path(name), &[0; 100]).unwrap();
            let time = SystemTime::now() - Duration::from_secs(age);
            File::open(path(name)).unwrap().set_modified(time).unwrap();
        }
        prune(&path("new"), 200).unwrap();
        assert!(path("new").exists() && path("middle").exists() && !path("old").exists());
    }
}
