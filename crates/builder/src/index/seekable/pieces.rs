//! The pieces of files in a layer, and the chunks that they become.

use lazuli_image::{
    BLOCK_SIZE, BlobIndex, Chunk, ChunkRef, Decoded, Digest, Stored,
    chunk::{MAX_UNIT, Part},
    offset::round_up_to_block,
    rafs::layout::MAX_CHUNKS,
    seekable::TocEntry,
};

/// Maximum stored bytes of a unit, as in any ordinary layer.
const MAX_STORED: u32 = 2 * MAX_UNIT;

/// A piece of a file, in a gzip member or a zstd frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Piece {
    /// First stored byte of the member or frame.
    offset: u64,
    /// Its offset in the decoded member or frame, and that one's size as far as it is needed.
    part: (u32, u32),
    size: u32,
    digest: Digest,
    /// Its end, if the table has it.
    end: Option<u64>,
    /// Maximum stored bytes fetched for it.
    longest: u32,
}

/// A file whose pieces are read.
pub(super) struct File {
    size: u64,
    digest: Option<Digest>,
    end: Option<u64>,
    pieces: Vec<Said>,
    /// Bytes of these.
    found: u64,
}

/// A table's description of a piece.
struct Said {
    offset: u64,
    inner: u64,
    size: u64,
    digest: Option<Digest>,
}

impl File {
    /// A file of `size` bytes, without pieces yet.
    pub(super) fn new(size: u64, entry: &TocEntry<'_>) -> Self {
        let end = Some(entry.end_offset).filter(|end| *end > 0);
        File { size, digest: entry.digest(), end, pieces: Vec::new(), found: 0 }
    }

    /// Adds the next piece.
    pub(super) fn add(&mut self, entry: &TocEntry<'_>) -> Result<(), String> {
        let begin = self.found;
        let left = self.size - begin;
        let size = if entry.chunk_size == 0 { left } else { entry.chunk_size };
        if size == 0 && self.pieces.is_empty() {
            // An empty file has no piece.
            return Ok(());
        }
        if entry.chunk_offset != begin || size > left || size == 0 {
            return Err(format!(
                "a piece of {size} bytes at {}, expected {left} at most at {begin}",
                entry.chunk_offset
            ));
        }
        let (offset, inner) = (entry.offset, entry.inner_offset);
        self.pieces.push(Said { offset, inner, size, digest: entry.chunk_digest() });
        self.found += size;
        Ok(())
    }

    /// The pieces that become chunks: those of the table, or one for the whole file where they do
    /// not begin on block borders.
    fn settle(self) -> Result<Vec<Piece>, String> {
        let File { size, digest, end, pieces, found } = self;
        let Some((last, before)) = pieces.split_last() else {
            return if size == 0 { Ok(Vec::new()) } else { Err("it has no pieces".to_owned()) };
        };
        if found != size {
            return Err(format!("its pieces have {found} bytes, it has {size}"));
        }
        let begins = before.iter().all(|piece| piece.size.is_multiple_of(BLOCK_SIZE));
        if begins {
            let own = |piece: &Said| match pieces.len() {
                1 => piece.digest.or(digest),
                _ => piece.digest,
            };
            let ends = |piece: &Said| end.filter(|_| piece.offset == last.offset);
            return pieces.iter().map(|piece| settle(piece, own(piece), ends(piece))).collect();
        }
        if size > MAX_UNIT.into() {
            return Err(format!(
                "{size} bytes in pieces that do not begin on block borders, which can be read up \
                 to {MAX_UNIT} bytes only"
            ));
        }
        let longest = pieces.iter().fold(0, |sum: u64, it| sum.saturating_add(longest(it.size)));
        let whole = Said { size, ..pieces.into_iter().next().expect("there is a last one") };
        let whole = settle(&whole, digest, end)?;
        Ok(vec![Piece { longest: longest.min(MAX_STORED.into()) as u32, ..whole }])
    }
}

fn settle(piece: &Said, digest: Option<Digest>, end: Option<u64>) -> Result<Piece, String> {
    let digest = digest.ok_or("a piece without a digest")?;
    let unit = piece.inner.checked_add(piece.size).filter(|unit| *unit <= MAX_UNIT.into());
    let unit = unit.ok_or_else(|| {
        let Said { inner, size, .. } = piece;
        format!("a piece of {size} bytes behind {inner}, expected {MAX_UNIT} at most together")
    })?;
    let longest = longest(unit).min(MAX_STORED.into()) as u32;
    // Both are smaller than a unit.
    let (inner, unit, size) = (piece.inner as u32, unit as u32, piece.size as u32);
    Ok(Piece { offset: piece.offset, part: (inner, unit), size, digest, end, longest })
}

/// The pieces of all files of a layer.
#[derive(Default)]
pub(super) struct Pieces {
    all: Vec<Piece>,
    /// Bits that are set in the size of a piece that is not its file's last.
    sizes: u32,
}

impl Pieces {
    /// Adds a file of layer `layer`. The chunks are numbered as they come, see
    /// [`Pieces::into_chunks`].
    pub(super) fn add(&mut self, file: File, layer: u8) -> Result<Vec<ChunkRef>, String> {
        let pieces = file.settle()?;
        let before = pieces.len().saturating_sub(1);
        self.sizes |= pieces[..before].iter().fold(0, |sizes, piece| sizes | piece.size);
        let first = self.all.len() as u32;
        self.all.extend_from_slice(&pieces);
        if self.all.len() > MAX_CHUNKS as usize {
            return Err(format!("the layer has more than {MAX_CHUNKS} pieces"));
        }
        let blob = BlobIndex(layer);
        Ok((first..).take(pieces.len()).map(|number| ChunkRef { blob, number }).collect())
    }

    /// See [`Read::divisor`](super::layer::Read::divisor).
    pub(super) fn divisor(&self) -> u32 {
        1 << self.sizes.trailing_zeros().min(MAX_UNIT.trailing_zeros())
    }

    /// The chunks of the layer, whose files' content ends at `end`, in the order in which they are
    /// stored; and for each piece, as it came, the number of its chunk. Equal pieces are one chunk.
    pub(super) fn into_chunks(self, end: Stored) -> Result<(Vec<Chunk>, Vec<u32>), String> {
        let mut order: Vec<usize> = (0..self.all.len()).collect();
        order.sort_by_key(|at| self.all[*at]);
        let mut sorted: Vec<Piece> = Vec::new();
        let mut numbers = vec![0; self.all.len()];
        for at in order {
            if sorted.last() != Some(&self.all[at]) {
                sorted.push(self.all[at]);
            }
            numbers[at] = sorted.len() as u32 - 1;
        }
        let (mut chunks, mut decoded) = (Vec::with_capacity(sorted.len()), 0);
        let mut next = end.0;
        // From the last to the first: each ends before the next one begins.
        let mut ends = vec![0; sorted.len()];
        for at in (0..sorted.len()).rev() {
            let Piece { offset, .. } = sorted[at];
            ends[at] = match sorted.get(at + 1) {
                Some(later) if later.offset == offset => ends[at + 1],
                Some(later) => later.offset,
                None => next,
            };
            next = offset;
        }
        for ((piece, end), number) in sorted.iter().zip(ends).zip(0..) {
            let Piece { offset, part: (inner, unit), size, digest, end: said, longest } = *piece;
            let wrong = || format!("a piece at {offset}, where no content of a file can be");
            let stored = said.unwrap_or(u64::MAX).min(end).checked_sub(offset);
            let stored = stored.filter(|stored| *stored > 0 && offset > 0).ok_or_else(wrong)?;
            chunks.push(Chunk {
                number,
                digest,
                stored: Stored(offset),
                stored_size: stored.min(longest.into()) as u32,
                decoded: Decoded(decoded),
                decoded_size: size,
                part: Some(Part { offset: inner, size: unit }),
            });
            decoded = round_up_to_block(decoded + u64::from(size)).ok_or_else(wrong)?;
        }
        Ok((chunks, numbers))
    }
}

/// Maximum stored bytes fetched for `decoded` bytes; more may follow in the member or frame.
/// Encoders add a few bytes to each block that does not compress. zstd decodes a block, of up to
/// 128 KiB, only once it has all of it.
fn longest(decoded: u64) -> u64 {
    const BLOCK_AND_HEADERS: u64 = 160 << 10;
    decoded.saturating_add(decoded / 8).saturating_add(BLOCK_AND_HEADERS)
}
