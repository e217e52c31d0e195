//! Points: places in a gzip file where a decoder can begin, with the state it needs there.
//!
//! ```text
//! magic | number of points | points, 20 bytes each | windows, each a zstd frame | BLAKE3 of these
//! ```
//! Nodes keep this beside an image with unconverted layers. They make it of the tables that come
//! with an index, so it has one form, whichever tool made that. `docs/format.md` has every byte.

use std::{fmt, sync::Arc};

use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    little_endian::{U16, U32, U64},
};

use crate::{Algorithm, Digest, FormatError, Stored};

/// Maximum size of a window, in bytes: deflate reaches no further back.
pub const MAX_WINDOW: usize = 32 << 10;

const MAGIC: [u8; 16] = *b"lazuli points 1\0";
/// Bytes of magic and number.
const HEADER: usize = 20;
/// Bytes of the digest at the end.
const DIGEST: usize = 32;
/// Compression level of windows. They are nearly all zeros.
const LEVEL: i32 = 3;

/// A point as it lies in memory.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Row {
    /// First whole stored byte.
    stored: U64,
    /// First byte of the window's frame among the windows.
    frame_at: U32,
    /// Bytes of that; 0 without a window.
    frame_size: U32,
    /// Bytes of the window.
    window: U16,
    /// Number of upper bits of `before` that belong to the following data.
    bits: u8,
    /// The byte before `stored`; 0 without bits.
    before: u8,
}

const _: () = assert!(size_of::<Row>() == 20);

/// A place where a decoder can begin.
#[derive(Clone, Copy, Debug)]
pub struct Point<'a> {
    /// Number of upper bits of [`Point::before`] to decode first, 0 to 7.
    pub bits: u8,
    /// The byte before the point; its upper bits count.
    pub before: u8,
    window: u16,
    frame: &'a [u8],
}

impl Point<'_> {
    /// The decoded bytes before the point, as far as anything refers to them; others are zeros.
    pub fn window(&self) -> Result<Vec<u8>, String> {
        let size = usize::from(self.window);
        let window = match size {
            0 => Vec::new(),
            _ => zstd::bulk::decompress(self.frame, size).map_err(|error| error.to_string())?,
        };
        if window.len() == size {
            Ok(window)
        } else {
            Err(format!("a window of {} bytes, expected {size}", window.len()))
        }
    }
}

/// The points of one blob. Copies share them.
#[derive(Clone, Default)]
pub struct Points(Option<Table>);

#[derive(Clone)]
struct Table {
    bytes: Arc<dyn AsRef<[u8]> + Send + Sync>,
    count: usize,
    digest: Digest,
}

impl Points {
    /// Checks `bytes`, and keeps them as they are: they may be a mapped file.
    pub fn parse(bytes: Arc<dyn AsRef<[u8]> + Send + Sync>) -> Result<Self, FormatError> {
        let (count, digest) = validate((*bytes).as_ref())?;
        Ok(Points(Some(Table { bytes, count, digest })))
    }

    /// Returns whether there are no points.
    pub fn is_empty(&self) -> bool {
        self.0.as_ref().is_none_or(|table| table.count == 0)
    }

    /// The digest at the end of the table.
    pub fn digest(&self) -> Option<Digest> {
        self.0.as_ref().map(|table| table.digest)
    }

    /// The bytes given to [`Points::parse`]; empty without points.
    pub fn bytes(&self) -> &[u8] {
        self.0.as_ref().map_or(&[], |table| (*table.bytes).as_ref())
    }

    /// The point at this stored byte.
    pub fn at(&self, stored: Stored) -> Option<Point<'_>> {
        let table = self.0.as_ref()?;
        let bytes = (*table.bytes).as_ref();
        let rows = rows(bytes, table.count)?;
        let row = rows.binary_search_by_key(&stored.0, |row| row.stored.get()).ok()?;
        let Row { frame_at, frame_size, window, bits, before, .. } = rows[row];
        let frames = frames(bytes, table.count)?;
        let frame = frames.get(frame_at.get() as usize..)?.get(..frame_size.get() as usize)?;
        Some(Point { bits, before, window: window.get(), frame })
    }
}

fn rows(bytes: &[u8], count: usize) -> Option<&[Row]> {
    let rows = bytes.get(HEADER..)?.get(..count.checked_mul(size_of::<Row>())?)?;
    <[Row]>::ref_from_bytes(rows).ok()
}

fn frames(bytes: &[u8], count: usize) -> Option<&[u8]> {
    bytes.get(HEADER + count * size_of::<Row>()..bytes.len().checked_sub(DIGEST)?)
}

/// The number of points, and the digest of `bytes`.
fn validate(bytes: &[u8]) -> Result<(usize, Digest), FormatError> {
    let error = |offset: usize, problem: &'static str| {
        Err(FormatError::new("table of points", offset as u64, problem))
    };
    if bytes.len() < HEADER + DIGEST || bytes[..MAGIC.len()] != MAGIC {
        return error(0, "it is none");
    }
    let (content, hash) = bytes.split_at(bytes.len() - DIGEST);
    let digest = Algorithm::Blake3.digest(content);
    if digest.hash != hash {
        return error(content.len(), "it is not what was written");
    }
    let [a, b, c, d] = [0, 1, 2, 3].map(|at| bytes[MAGIC.len() + at]);
    let count = u32::from_le_bytes([a, b, c, d]) as usize;
    let (Some(rows), Some(frames)) = (rows(content, count), frames(bytes, count)) else {
        return error(MAGIC.len(), "more points than bytes");
    };
    for (number, row) in rows.iter().enumerate() {
        let at = HEADER + number * size_of::<Row>();
        let end = u64::from(row.frame_at.get()) + u64::from(row.frame_size.get());
        if number > 0 && rows[number - 1].stored.get() >= row.stored.get() {
            return error(at, "points are not in order");
        }
        if end > frames.len() as u64
            || usize::from(row.window.get()) > MAX_WINDOW
            || row.bits > 7
            || (row.window.get() == 0) != (row.frame_size.get() == 0)
        {
            return error(at, "a point that cannot be");
        }
    }
    Ok((count, digest))
}

impl PartialEq for Points {
    fn eq(&self, other: &Self) -> bool {
        self.digest() == other.digest()
    }
}

impl Eq for Points {}

impl fmt::Debug for Points {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = self.0.as_ref().map_or(0, |table| table.count);
        f.debug_struct("Points").field("count", &count).finish_non_exhaustive()
    }
}

/// A point before it is encoded in a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewPoint {
    /// First whole stored byte.
    pub stored: Stored,
    /// See [`Point::bits`].
    pub bits: u8,
    /// See [`Point::before`].
    pub before: u8,
    /// At most [`MAX_WINDOW`] bytes, the nearest last.
    pub window: Vec<u8>,
}

impl FromIterator<NewPoint> for Points {
    /// Takes points in any order. Of several at one byte, the first is kept.
    fn from_iter<I: IntoIterator<Item = NewPoint>>(points: I) -> Self {
        let mut points: Vec<_> = points.into_iter().collect();
        points.sort_by_key(|point| point.stored);
        points.dedup_by_key(|point| point.stored);
        // To make one for each window takes nearly as long as to compress it.
        let compressor = zstd::bulk::Compressor::new(LEVEL);
        let mut compressor = compressor.expect("there is memory for it");
        let mut frames = Vec::new();
        let mut bytes = MAGIC.to_vec();
        let count = points.len();
        bytes.extend_from_slice(&(count as u32).to_le_bytes());
        for NewPoint { stored, bits, before, window } in points {
            let nearest = &window[window.len().saturating_sub(MAX_WINDOW)..];
            let frame = match nearest {
                [] => Vec::new(),
                _ => compressor.compress(nearest).expect("there is memory for it"),
            };
            let row = Row {
                stored: stored.0.into(),
                frame_at: (frames.len() as u32).into(),
                frame_size: (frame.len() as u32).into(),
                window: (nearest.len() as u16).into(),
                bits,
                before,
            };
            bytes.extend_from_slice(row.as_bytes());
            frames.extend(frame);
        }
        bytes.append(&mut frames);
        let digest = Algorithm::Blake3.digest(&bytes);
        bytes.extend_from_slice(&digest.hash);
        Points(Some(Table { bytes: Arc::new(bytes), count, digest }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(stored: u64, bits: u8, window: &[u8]) -> NewPoint {
        NewPoint { stored: Stored(stored), bits, before: 0xa5, window: window.to_vec() }
    }

    #[test]
    fn points_are_found_again() {
        let long = vec![7; MAX_WINDOW];
        let points: Points =
            [point(900, 3, &long), point(10, 0, b""), point(500, 7, b"abc")].into_iter().collect();
        let again = Points::parse(Arc::new(points.bytes().to_vec())).unwrap();
        assert_eq!(again, points);
        for (stored, bits, window) in [(10, 0, &b""[..]), (500, 7, b"abc"), (900, 3, &long)] {
            let found = again.at(Stored(stored)).unwrap();
            assert_eq!((found.bits, found.window().unwrap()), (bits, window.to_vec()));
        }
        assert!(again.at(Stored(11)).is_none());
        assert!(Points::default().at(Stored(10)).is_none());
    }

    #[test]
    fn any_other_byte_is_noticed() {
        let points: Points = [point(10, 0, b""), point(500, 7, b"abc")].into_iter().collect();
        for at in 0..points.bytes().len() {
            let mut bytes = points.bytes().to_vec();
            bytes[at] ^= 1;
            assert!(Points::parse(Arc::new(bytes)).is_err(), "{at}");
            let cut = points.bytes()[..at].to_vec();
            assert!(Points::parse(Arc::new(cut)).is_err(), "{at}");
        }
    }

    #[test]
    fn impossible_points_are_refused_despite_their_digest() {
        let points: Points = [point(10, 0, b""), point(500, 7, b"abc")].into_iter().collect();
        let content = points.bytes().len() - DIGEST;
        // More points; the first behind the second; 8 bits; a window far away.
        for (at, value) in [(16, 200), (HEADER, 0xff), (HEADER + 18, 8), (HEADER + 20 + 8, 99)] {
            let mut bytes = points.bytes()[..content].to_vec();
            bytes[at] = value;
            if at == HEADER {
                bytes[at + 1] = 0xff;
            }
            let digest = Algorithm::Blake3.digest(&bytes);
            bytes.extend_from_slice(&digest.hash);
            assert!(Points::parse(Arc::new(bytes)).is_err(), "{at}");
        }
    }
}
