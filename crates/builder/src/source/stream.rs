//! Layers as they are stored: gzip, zstd or plain, told apart by their first bytes.

use std::{
    cell::Cell,
    io::{self, BufRead, BufReader, Cursor, Read},
    rc::Rc,
};

use flate2::bufread::GzDecoder;
use zstd::stream::read as zstd;

/// Unpacked bytes allowed to any layer, whatever its size: 1 GiB.
const FREE_EXPANSION: u64 = 1 << 30;

/// Unpacked bytes allowed on top of [`FREE_EXPANSION`], per stored byte.
///
/// Real layers stay below 20. Deflate cannot exceed 1032, so a gzip layer of zeros, which may be
/// legitimate, is just about accepted, while zstd (which reaches 20,000 and more) and sparse maps
/// cannot turn a few KB into a full disk.
const EXPANSION: u64 = 1000;

pub(crate) const GZIP_MAGIC: &[u8] = &[0x1f, 0x8b];
const ZSTD_MAGIC: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];

/// Bytes read from a layer at a time.
const BUFFER: usize = 128 << 10;

/// Counts the stored bytes read from a layer, which limit its unpacked size.
#[derive(Clone, Debug)]
pub(crate) struct Allowance {
    declared: u64,
    stored: Rc<Cell<u64>>,
}

impl Allowance {
    /// Starts with no bytes read of a layer of `stored_size` bytes.
    pub(crate) fn of(stored_size: u64) -> Self {
        Allowance { declared: stored_size, stored: Rc::default() }
    }

    /// Maximum number of bytes that the layer may unpack to.
    pub(crate) fn limit(&self) -> u64 {
        let stored = self.declared.max(self.stored.get());
        stored.saturating_mul(EXPANSION).saturating_add(FREE_EXPANSION)
    }

    /// The error of a layer beyond its limit.
    pub(crate) fn exceeded(&self) -> String {
        format!(
            "unpacks to more than {} bytes, the limit of 1 GiB and {EXPANSION} times the stored \
             size: refused as a decompression bomb",
            self.limit()
        )
    }
}

/// Unpacks `raw`. `on_read` is called with every stored byte that is read.
///
/// Read the result to its end to have `raw` read to its end.
pub(crate) fn expand<'a>(
    mut raw: Box<dyn Read + Send + 'a>,
    stored_size: Option<u64>,
    on_read: impl Fn(u64) + 'a,
) -> io::Result<(BufReader<Expanded<'a>>, Allowance)> {
    let mut magic = Vec::with_capacity(4);
    raw.by_ref().take(4).read_to_end(&mut magic)?;
    let allowance = Allowance::of(stored_size.unwrap_or(0));
    let kind = magic.clone();
    let stored = Stored {
        inner: Cursor::new(magic).chain(raw),
        on_read,
        count: Rc::clone(&allowance.stored),
    };
    let inner: Box<dyn Read + 'a> = if kind.starts_with(GZIP_MAGIC) {
        Box::new(Frames::new(Format::Gzip, BufReader::with_capacity(BUFFER, stored))?)
    } else if is_zstd(&kind) {
        Box::new(Frames::new(Format::Zstd, BufReader::with_capacity(BUFFER, stored))?)
    } else {
        Box::new(stored)
    };
    let expanded = Expanded { inner, allowance: allowance.clone(), count: 0 };
    Ok((BufReader::with_capacity(BUFFER, expanded), allowance))
}

/// Returns whether a layer with these first four bytes is compressed with zstd.
pub(crate) fn is_zstd(magic: &[u8]) -> bool {
    // Skippable frames, with which some parallel compressors begin, have any last digit.
    magic == ZSTD_MAGIC || matches!(magic, [first, 0x2a, 0x4d, 0x18] if first & 0xf0 == 0x50)
}

/// Reports the bytes that are read.
pub(crate) struct Counted<'a, R> {
    pub(crate) raw: R,
    pub(crate) on_read: &'a dyn Fn(u64),
}

impl<R: Read> Read for Counted<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.raw.read(buffer)?;
        (self.on_read)(count as u64);
        Ok(count)
    }
}

/// A layer as stored.
struct Stored<R, F> {
    inner: R,
    on_read: F,
    count: Rc<Cell<u64>>,
}

impl<R: Read, F: Fn(u64)> Read for Stored<R, F> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.count.set(self.count.get() + count as u64);
        (self.on_read)(count as u64);
        Ok(count)
    }
}

#[derive(Clone, Copy)]
enum Format {
    Gzip,
    Zstd,
}

/// Compressed frames (gzip calls them members) back to back. Zeros may follow the last: libarchive
/// fills up its last block with them.
struct Frames<'a, R: BufRead> {
    format: Format,
    frame: Option<Frame<'a, R>>,
}

enum Frame<'a, R: BufRead> {
    Gzip(Box<GzDecoder<R>>),
    Zstd(zstd::Decoder<'a, R>),
}

impl<R: BufRead> Frames<'_, R> {
    fn new(format: Format, stored: R) -> io::Result<Self> {
        let frame = match format {
            Format::Gzip => Frame::Gzip(Box::new(GzDecoder::new(stored))),
            Format::Zstd => Frame::Zstd(zstd::Decoder::with_buffer(stored)?.single_frame()),
        };
        Ok(Frames { format, frame: Some(frame) })
    }
}

impl<R: BufRead> Read for Frames<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let count = match &mut self.frame {
                None => return Ok(0),
                Some(Frame::Gzip(frame)) => frame.read(buffer)?,
                Some(Frame::Zstd(frame)) => frame.read(buffer)?,
            };
            if count > 0 || buffer.is_empty() {
                return Ok(count);
            }
            let mut stored = match self.frame.take() {
                None => return Ok(0),
                Some(Frame::Gzip(frame)) => frame.into_inner(),
                Some(Frame::Zstd(frame)) => frame.finish(),
            };
            if !ends_here(&mut stored)? {
                *self = Frames::new(self.format, stored)?;
            }
        }
    }
}

/// Returns whether only zeros follow.
fn ends_here(stored: &mut impl BufRead) -> io::Result<bool> {
    let mut zeros = false;
    loop {
        let bytes = stored.fill_buf()?;
        if bytes.is_empty() {
            return Ok(true);
        }
        if bytes.iter().any(|&byte| byte != 0) {
            let padded = zeros || bytes[0] == 0;
            let problem =
                "the end of the layer or zeros were expected after its last compressed frame";
            return if padded { Err(io::Error::other(problem)) } else { Ok(false) };
        }
        zeros = true;
        let count = bytes.len();
        stored.consume(count);
    }
}

/// A layer as unpacked. Fails when it exceeds its [`Allowance`].
pub(crate) struct Expanded<'a> {
    inner: Box<dyn Read + 'a>,
    allowance: Allowance,
    count: u64,
}

impl Read for Expanded<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.count += count as u64;
        if self.count > self.allowance.limit() {
            return Err(io::Error::other(self.allowance.exceeded()));
        }
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use ::zstd::{bulk::compress, stream::write::Encoder};

    use super::*;

    fn gzip(data: &[u8]) -> Vec<u8> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(data).unwrap();
        encoder.finish().unwrap()
    }

    fn unpack(stored: Vec<u8>) -> io::Result<Vec<u8>> {
        let mut out = Vec::new();
        let (mut reader, _) = expand(Box::new(Cursor::new(stored)), None, |_| {})?;
        reader.read_to_end(&mut out).map(|_| out)
    }

    #[test]
    fn layer_compressions_are_recognized() {
        let zstd = |data: &[u8]| compress(data, 1).unwrap();
        let skippable = [&[0x5e, 0x2a, 0x4d, 0x18, 2, 0, 0, 0, 9, 9][..], &zstd(b"hello")].concat();
        for stored in [
            b"hello".to_vec(),
            gzip(b"hello"),
            [gzip(b"he"), gzip(b""), gzip(b"llo")].concat(),
            zstd(b"hello"),
            [zstd(b"he"), zstd(b"llo")].concat(),
            [gzip(b"hello"), vec![0; 300_000]].concat(),
            [zstd(b"hello"), vec![0; 7]].concat(),
            skippable,
        ] {
            assert_eq!(unpack(stored.clone()).unwrap(), b"hello", "{}", stored.escape_ascii());
        }
        assert_eq!(unpack(Vec::new()).unwrap(), b"");
    }

    #[test]
    fn damaged_streams_are_errors() {
        let mut cut = gzip(b"hello");
        cut.pop();
        let mut wrong = gzip(b"hello");
        let crc = wrong.len() - 8;
        wrong[crc] ^= 1;
        let mut zstd = compress(b"hello", 1).unwrap();
        zstd.pop();
        let behind = [gzip(b"hello"), b"\0\0x".to_vec()].concat();
        let garbage = [gzip(b"hello"), b"garbage".to_vec()].concat();
        for stored in [cut, wrong, zstd, behind, garbage] {
            assert!(unpack(stored).is_err());
        }
    }

    #[test]
    fn a_bomb_stops_at_its_allowance() {
        let mut encoder = Encoder::new(Vec::new(), 1).unwrap();
        let zeros = vec![0; 1 << 20];
        for _ in 0..1200 {
            encoder.write_all(&zeros).unwrap();
        }
        let bomb = encoder.finish().unwrap();
        assert!((1 << 30) + 1000 * bomb.len() < 1200 << 20);
        let (mut reader, allowance) = expand(Box::new(Cursor::new(bomb)), None, |_| {}).unwrap();
        let error = io::copy(&mut reader, &mut io::sink()).unwrap_err().to_string();
        assert_eq!(error, allowance.exceeded());
        assert!(error.contains("decompression bomb"), "{error}");
    }
}
