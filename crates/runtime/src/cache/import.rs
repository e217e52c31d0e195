//! Imports blobs whose decoded bytes were written before their chunk table was known.
//!
//! ```text
//! <dir>/incoming/<number>     decoded bytes at the places that they will have
//! ```

use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io,
    os::unix::fs::{DirBuilderExt as _, FileExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use lazuli_image::{Blob, Decoded};
use lazuli_sys::path_error::At as _;

use super::{Cache, CacheError, CachedBlob, layout::Layout, store::Store};
use crate::sync::lock;

const INCOMING: &str = "incoming";

/// Decoded bytes of a future blob. The file is removed unless it is imported.
#[derive(Debug)]
pub(crate) struct Incoming {
    path: PathBuf,
    file: File,
}

impl Incoming {
    /// Writes the content of a chunk.
    pub(crate) fn write(&self, at: Decoded, content: &[u8]) -> io::Result<()> {
        self.file.write_all_at(content, at.0)
    }
}

impl Drop for Incoming {
    fn drop(&mut self) {
        // Gone if it was imported.
        let _ = fs::remove_file(&self.path);
    }
}

/// Creates the directory for incoming files, empty. `dir` is the cache's.
pub(super) fn sweep(dir: &Path) -> io::Result<()> {
    let incoming = dir.join(INCOMING);
    match fs::remove_dir_all(&incoming) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    DirBuilder::new().mode(0o700).create(incoming)
}

impl Cache {
    /// A file for the decoded bytes of a blob.
    pub(crate) fn incoming(&self) -> Result<Incoming, CacheError> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let name = NUMBER.fetch_add(1, Ordering::Relaxed).to_string();
        let path = self.dir.with_file_name(INCOMING).join(name);
        let mut options = OpenOptions::new();
        let options = options.read(true).write(true).create_new(true).mode(0o600);
        let file = options.open(&path).at(&path)?;
        Ok(Incoming { path, file })
    }

    /// Makes incoming bytes the content of `blob`. The caller has checked that every chunk has the
    /// digest in `blob`. Blocks.
    pub(crate) fn import(
        &self,
        incoming: Incoming,
        blob: &Blob,
    ) -> Result<Arc<CachedBlob>, CacheError> {
        let layout = Layout::new(blob)?;
        let key = layout.key();
        let dir = self.dir.join(&key);
        incoming.file.set_len(layout.file_size()).at(&incoming.path)?;
        let created = {
            let mut blobs = lock(&self.blobs);
            match DirBuilder::new().mode(0o700).create(&dir) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => None,
                Err(source) => return Err(CacheError::Io { path: dir, source }),
                Ok(()) => {
                    fs::rename(&incoming.path, Store::data_in(&dir)).at(&dir)?;
                    let cached = CachedBlob::open(dir.clone(), Layout::new(blob)?, self)?;
                    blobs.insert(key, Arc::downgrade(&cached));
                    Some(cached)
                }
            }
        };
        if let Some(cached) = created {
            cached.adopt().at(&dir)?;
            return Ok(cached);
        }
        let cached = self.open_blob(layout)?;
        cached.fill_from(&incoming.file).at(&dir)?;
        Ok(cached)
    }
}
