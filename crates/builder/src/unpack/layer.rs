//! The one layer of an ordinary image.

use std::io::{self, BufWriter, Write};

use flate2::{Compression, GzBuilder};
use lazuli_image::{Algorithm, Digest, digest::Hasher};

use super::{ChunkSource, EntryOrder, UnpackError, tar};
use crate::whiteout;

/// A layer that was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlatLayer {
    /// SHA-256 of the layer as stored.
    pub digest: Digest,
    /// Its size in bytes.
    pub size: u64,
    /// SHA-256 of the tar.
    pub diff_id: Digest,
}

/// Writes a gzipped tar. The same image gives the same bytes.
///
/// # Errors
/// Those of `content` and of `out`; a name that means something else in a layer.
pub fn layer<C: ChunkSource>(
    order: &EntryOrder<'_>,
    out: impl Write,
    content: &mut C,
) -> Result<FlatLayer, C::Error> {
    let is_whiteout = |at: &usize| {
        order.places[*at].name.is_some_and(|name| name.as_bytes().starts_with(whiteout::PREFIX))
    };
    if let Some(at) = (0..order.places.len()).find(is_whiteout) {
        let problem = "in a layer, a name that begins with `.wh.` removes another; unpack to a tar or a directory";
        return Err(order.error(at, problem).into());
    }
    let gzip = GzBuilder::new().mtime(0).operating_system(255);
    let gzip = gzip.write(Hashing::new(out), Compression::default());
    let mut tar_out = BufWriter::with_capacity(1 << 20, Hashing::new(gzip));
    tar(order, &mut tar_out, content)?;
    let finish = || {
        let Hashing { inner, hasher, .. } =
            tar_out.into_inner().map_err(io::IntoInnerError::into_error)?;
        let mut stored = inner.finish()?;
        stored.inner.flush()?;
        let (digest, size) = (stored.hasher.finish(), stored.size);
        Ok::<_, io::Error>(FlatLayer { digest, size, diff_id: hasher.finish() })
    };
    Ok(finish().map_err(UnpackError::from)?)
}

/// A writer that hashes its output.
struct Hashing<W> {
    inner: W,
    hasher: Hasher,
    size: u64,
}

impl<W> Hashing<W> {
    fn new(inner: W) -> Self {
        Hashing { inner, hasher: Algorithm::Sha256.hasher(), size: 0 }
    }
}

impl<W: Write> Write for Hashing<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(bytes)?;
        self.hasher.update(&bytes[..written]);
        self.size += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}
