//! A stored layer, unpacked while it is read.

use std::io::{self, BufRead, BufReader, Cursor, Read};

use lazuli_image::Digest;

use super::{
    background_hash::BackgroundHash,
    gunzip::{Gunzip, Mark},
    skeleton::Recorder,
};
use crate::source::stream::{Allowance, Counted, GZIP_MAGIC, is_zstd};

/// Bytes read from a layer at a time.
const BUFFER: usize = 128 << 10;

/// A layer as stored, with its first bytes put back.
type Raw<'a> = BufReader<Box<dyn Read + 'a>>;

/// The tar in a layer, or the layer as it is, with the stored place of each decoded byte.
pub(super) struct Unpacked<'a> {
    raw: Raw<'a>,
    gzip: Option<Gunzip>,
    decoded: u64,
    hash: BackgroundHash,
    skeleton: Recorder,
    allowance: Allowance,
}

/// A place in a layer.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Place {
    pub(super) decoded: u64,
    pub(super) stored: u64,
}

/// The result of reading all of a layer.
pub(super) struct Whole {
    /// SHA-256 of the tar.
    pub(super) diff_id: Digest,
    /// The points of a gzip layer.
    pub(super) marks: Vec<Mark>,
    /// The ends of its members, see [`Gunzip::finish`].
    pub(super) ends: Vec<(u64, u64)>,
    /// The recorded part of the tar, see [`Unpacked::skeleton`]; empty if recording was given up.
    pub(super) skeleton: Vec<u8>,
}

impl<'a> Unpacked<'a> {
    /// Unpacks `raw`, of `stored_size` bytes. `on_read` is called with every stored byte that is
    /// read.
    pub(super) fn new(
        mut raw: Box<dyn Read + Send + 'a>,
        stored_size: u64,
        on_read: &'a dyn Fn(u64),
    ) -> io::Result<Self> {
        let mut magic = Vec::with_capacity(4);
        raw.by_ref().take(4).read_to_end(&mut magic)?;
        if is_zstd(&magic) {
            return Err(io::Error::other(
                "it is compressed with zstd, and only gzip and plain tar can be read in places; \
                 `lazuli convert` takes any layer",
            ));
        }
        let gzip = magic.starts_with(GZIP_MAGIC).then(Gunzip::default);
        let raw = Cursor::new(magic).chain(Counted { raw, on_read });
        Self::read(raw, gzip, stored_size)
    }

    /// The same without unpacking anything.
    pub(super) fn as_it_is(
        raw: Box<dyn Read + Send + 'a>,
        stored_size: u64,
        on_read: &'a dyn Fn(u64),
    ) -> io::Result<Self> {
        Self::read(Counted { raw, on_read }, None, stored_size)
    }

    fn read(raw: impl Read + 'a, gzip: Option<Gunzip>, stored_size: u64) -> io::Result<Self> {
        Ok(Unpacked {
            raw: BufReader::with_capacity(BUFFER, Box::new(raw)),
            gzip,
            decoded: 0,
            hash: BackgroundHash::new()?,
            skeleton: Recorder::new()?,
            allowance: Allowance::of(stored_size),
        })
    }

    pub(super) fn allowance(&self) -> &Allowance {
        &self.allowance
    }

    /// The present position.
    pub(super) fn place(&self) -> Place {
        let stored = self.gzip.as_ref().map_or(self.decoded, Gunzip::stored);
        Place { decoded: self.decoded, stored }
    }

    /// The last point of a gzip layer that is not behind this decoded byte, and its number.
    pub(super) fn mark_before(&self, decoded: u64) -> Option<(usize, &Mark)> {
        self.gzip.as_ref()?.mark_before(decoded)
    }

    /// The recorder of everything but the content of chunks.
    pub(super) fn skeleton(&mut self) -> &mut Recorder {
        &mut self.skeleton
    }

    /// Returns whether the layer is gzip.
    pub(super) fn is_gzip(&self) -> bool {
        self.gzip.is_some()
    }

    /// Reads to the end, of the tar and of the layer.
    pub(super) fn finish(mut self) -> io::Result<Whole> {
        io::copy(&mut self, &mut io::sink())?;
        io::copy(&mut self.raw, &mut io::sink())?;
        let (marks, ends) = self.gzip.map_or_else(Default::default, Gunzip::finish);
        let skeleton = self.skeleton.finish()?;
        Ok(Whole { diff_id: self.hash.finish(), marks, ends, skeleton })
    }
}

impl Read for Unpacked<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = match &mut self.gzip {
            Some(gzip) => gzip.read(&mut self.raw, buffer)?,
            None => self.raw.fill_buf()?.read(buffer)?,
        };
        if self.gzip.is_none() {
            self.raw.consume(count);
        }
        self.hash.update(&buffer[..count]);
        self.skeleton.record(&buffer[..count])?;
        self.decoded += count as u64;
        if self.decoded > self.allowance.limit() {
            return Err(io::Error::other(self.allowance.exceeded()));
        }
        Ok(count)
    }
}
