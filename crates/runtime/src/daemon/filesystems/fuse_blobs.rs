//! The cache behind FUSE mounts.

use std::{fs, io, ops::Range, sync::Arc};

use lazuli_image::{BlobIndex, Decoded};
use tokio::runtime::Handle;

use crate::{
    cache::CachedBlob,
    kernel::{errno::errno, fuse::BlobReader},
};

/// The blobs of an image.
#[derive(Debug)]
pub(in crate::daemon) struct Blobs {
    pub(in crate::daemon) blobs: Arc<[Arc<CachedBlob>]>,
    pub(in crate::daemon) runtime: Handle,
}

impl Blobs {
    fn get(&self, blob: BlobIndex) -> io::Result<&Arc<CachedBlob>> {
        self.blobs.get(usize::from(blob.0)).ok_or_else(|| io::Error::other("no such blob"))
    }
}

impl BlobReader for Blobs {
    fn ensure(&self, blob: BlobIndex, range: Range<Decoded>, reader: i32) -> io::Result<()> {
        let blob = self.get(blob)?;
        if blob.is_ready(&range) {
            return Ok(());
        }
        self.runtime.block_on(blob.ensure(range.clone())).map_err(|error| {
            blob.report_failed_read(&range, &error, Some(reader));
            errno(&error).into()
        })
    }

    fn file(&self, blob: BlobIndex) -> io::Result<&fs::File> {
        Ok(self.get(blob)?.file())
    }
}
