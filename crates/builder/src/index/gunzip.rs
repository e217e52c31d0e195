//! Unpacks gzip, and notes where a decoder could begin.

use std::io::{self, BufRead};

use lazuli_image::{
    Stored,
    gzip::{self, Header, TRAILER},
    points::{MAX_WINDOW, NewPoint},
};

use super::{
    inflate::{Inflate, Output, SLACK, Stop},
    window::Thinner,
};

/// Minimum distance of points, in decoded bytes. Half of it doubles the index, and saves a fifth of
/// a start's fetches: the decision on indexes has the figures.
const SPAN: u64 = 1 << 20;

/// Decoded bytes that are kept: a window, and space for new ones.
const KEPT: usize = MAX_WINDOW + (256 << 10);

/// A place where a decoder can begin, with its offset in the unpacked file.
#[derive(Clone, Debug)]
pub(super) struct Mark {
    pub(super) point: NewPoint,
    pub(super) decoded: u64,
}

/// What follows the data that was decoded last.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Following {
    /// More data of the member.
    Data,
    /// The end of the member.
    End,
}

/// A gzip file while it is unpacked, one piece after the other.
pub(super) struct Gunzip {
    decoder: Box<Inflate>,
    in_member: bool,
    /// The last decoded bytes, up to `filled`.
    buffer: Vec<u8>,
    filled: usize,
    /// First decoded byte of this member.
    member: u64,
    /// Stored bytes that were taken, the last of which the decoder may not have used yet.
    taken: u64,
    decoded: u64,
    /// The last eight stored bytes that were taken, the last one lowest.
    last: u64,
    marks: Vec<Mark>,
    thinner: Thinner,
    /// Stored bytes since the last mark, as long as they may refer to its window.
    follow: Option<Vec<u8>>,
    /// For the ends of members: the decoded place, and the stored one behind the trailer.
    ends: Vec<(u64, u64)>,
}

impl Default for Gunzip {
    fn default() -> Self {
        Gunzip {
            decoder: Box::default(),
            in_member: false,
            buffer: vec![0; KEPT + SLACK],
            filled: 0,
            member: 0,
            taken: 0,
            decoded: 0,
            last: 0,
            marks: Vec::new(),
            thinner: Thinner::default(),
            follow: None,
            ends: Vec::new(),
        }
    }
}

impl Gunzip {
    /// Stored bytes consumed so far.
    pub(super) fn stored(&self) -> u64 {
        self.taken - u64::from(self.decoder.bits_ahead() / 8)
    }

    /// The last point that is not behind this decoded byte: its number, and the point.
    pub(super) fn mark_before(&self, decoded: u64) -> Option<(usize, &Mark)> {
        let number = self.marks.partition_point(|mark| mark.decoded <= decoded).checked_sub(1)?;
        Some((number, &self.marks[number]))
    }

    /// At the end of the file: the points in their order, and for the ends of members the decoded
    /// places with the stored ones behind the trailers.
    pub(super) fn finish(self) -> (Vec<Mark>, Vec<(u64, u64)>) {
        (self.marks, self.ends)
    }

    /// Unpacks at most `out.len()` bytes, consuming no more of `input` than they need. Returns 0 at
    /// the end.
    pub(super) fn read(&mut self, input: &mut impl BufRead, out: &mut [u8]) -> io::Result<usize> {
        if out.is_empty() {
            return Ok(0);
        }
        loop {
            if !self.in_member && !self.begin_member(input)? {
                return Ok(0);
            }
            if self.filled == KEPT {
                self.buffer.copy_within(KEPT - MAX_WINDOW..KEPT, 0);
                self.filled = MAX_WINDOW;
            }
            let bytes = input.fill_buf()?;
            let start = self.filled;
            let mut output = Output {
                buffer: &mut self.buffer,
                // Members are independent.
                floor: start - start.min((self.decoded - self.member) as usize),
                at: start,
                end: KEPT.min(start + out.len()),
            };
            let (stop, taken) = self.decoder.decode(bytes, &mut output);
            let (is_at_end, written) = (bytes.is_empty(), output.at - start);
            self.note(&bytes[..taken]);
            input.consume(taken);
            self.filled += written;
            self.decoded += written as u64;
            match stop.map_err(|problem| self.error(&format!("it is damaged: {problem}")))? {
                Stop::End => self.end_member(input)?,
                Stop::BlockEnd => self.end_block(),
                Stop::NoInput if is_at_end => return Err(self.error("it is cut off")),
                Stop::Full | Stop::NoInput => {}
            }
            self.thin(Following::Data)?;
            if written > 0 {
                out[..written].copy_from_slice(&self.buffer[start..start + written]);
                return Ok(written);
            }
        }
    }

    /// Notes that these stored bytes were used.
    fn note(&mut self, bytes: &[u8]) {
        self.taken += bytes.len() as u64;
        for byte in &bytes[bytes.len().saturating_sub(8)..] {
            self.last = self.last << 8 | u64::from(*byte);
        }
        if let Some(follow) = &mut self.follow {
            follow.extend_from_slice(bytes);
        }
    }

    /// Reads the header of the next member; `false` if there is none. Zeros may follow the last
    /// member: libarchive fills its last block with them.
    fn begin_member(&mut self, input: &mut impl BufRead) -> io::Result<bool> {
        let mut header = Vec::new();
        loop {
            let bytes = input.fill_buf()?;
            if bytes.is_empty() {
                return if header.is_empty() {
                    Ok(false)
                } else {
                    Err(self.error("it is cut off"))
                };
            }
            if self.taken > 0 && header.is_empty() && bytes[0] == 0 {
                return self.skip_zeros(input);
            }
            let known = header.len();
            header.extend_from_slice(bytes);
            let (used, ends) = match gzip::header(&header) {
                Header::Ends(end) => (end - known, true),
                Header::GoesOn if header.len() <= gzip::MAX_HEADER => (bytes.len(), false),
                Header::GoesOn => return Err(self.error("a header that does not end")),
                Header::Invalid(problem) => return Err(self.error(problem)),
            };
            self.note(&header[known..known + used]);
            input.consume(used);
            if ends {
                break;
            }
        }
        self.in_member = true;
        self.member = self.decoded;
        self.mark(Vec::new());
        Ok(true)
    }

    fn skip_zeros(&mut self, input: &mut impl BufRead) -> io::Result<bool> {
        loop {
            let bytes = input.fill_buf()?;
            if bytes.is_empty() {
                return Ok(false);
            }
            if bytes.iter().any(|byte| *byte != 0) {
                return Err(self.error("the end or zeros were expected behind its last member"));
            }
            let count = bytes.len();
            self.taken += count as u64;
            input.consume(count);
        }
    }

    fn end_member(&mut self, input: &mut impl BufRead) -> io::Result<()> {
        self.thin(Following::End)?;
        // The decoder takes no more than a part of the trailer ahead.
        let mut trailer = [0; TRAILER];
        let rest = &mut trailer[self.decoder.bytes_ahead().len()..];
        io::Read::read_exact(input, rest).map_err(|_| self.error("it is cut off"))?;
        self.note(rest);
        self.decoder.restart(0, 0);
        self.ends.push((self.decoded, self.taken));
        self.in_member = false;
        Ok(())
    }

    /// A block has ended, and another one follows.
    fn end_block(&mut self) {
        let last = self.marks.last().map_or(0, |mark| mark.decoded);
        if self.decoded - last < SPAN {
            return;
        }
        // Members are independent: the window ends at the start of this one.
        let size = MAX_WINDOW.min((self.decoded - self.member) as usize);
        let window = self.buffer[self.filled - size..self.filled].to_vec();
        self.mark(window);
    }

    fn mark(&mut self, window: Vec<u8>) {
        let ahead = self.decoder.bytes_ahead();
        let bits = (self.decoder.bits_ahead() % 8) as u8;
        let before = if bits == 0 { 0 } else { (self.last >> (8 * ahead.len())) as u8 };
        let point = NewPoint { stored: Stored(self.stored()), bits, before, window };
        self.follow = (!point.window.is_empty()).then_some(ahead);
        self.marks.push(Mark { point, decoded: self.decoded });
    }

    /// Removes unreferenced bytes from the window of the last mark, once all data that may refer to
    /// it is known.
    fn thin(&mut self, following: Following) -> io::Result<()> {
        let Some(mark) = self.marks.last() else { return Ok(()) };
        let followed = self.decoded - mark.decoded;
        if following == Following::Data && followed < MAX_WINDOW as u64 {
            return Ok(());
        }
        if let Some(follow) = self.follow.take() {
            let size = followed.min(MAX_WINDOW as u64) as usize;
            let window = self.thinner.used(&mark.point, &follow, size);
            let window = window.map_err(|problem| self.error(problem))?;
            if let Some(mark) = self.marks.last_mut() {
                mark.point.window = window;
            }
        }
        Ok(())
    }

    fn error(&self, problem: &str) -> io::Error {
        io::Error::other(format!("gzip data at stored byte {}: {problem}", self.stored()))
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufReader, Cursor, Read, Write as _};

    use flate2::{Compress, Compression, FlushCompress, GzBuilder, write::GzEncoder};
    use lazuli_image::{Blob, Chunk, Codec, Decoded, Digest, Points, chunk::Part, codec::Decoder};

    use super::*;

    /// Text that compresses to a half, of which no two pieces are alike.
    fn text(size: usize) -> Vec<u8> {
        let mut state = 1_u64;
        let mut text = Vec::with_capacity(size + 8);
        while text.len() < size {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            text.extend_from_slice(format!("{state:x}").as_bytes());
        }
        text.truncate(size);
        text
    }

    fn gzip(level: u32, data: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::new(level));
        encoder.write_all(data).unwrap();
        encoder.finish().unwrap()
    }

    fn unpack(stored: &[u8]) -> io::Result<(Vec<u8>, Vec<Mark>)> {
        let mut input = BufReader::with_capacity(1000, Cursor::new(stored));
        let (mut gunzip, mut all, mut out) = (Gunzip::default(), Vec::new(), vec![0; 70_000]);
        loop {
            let count = gunzip.read(&mut input, &mut out)?;
            if count == 0 {
                let mut rest = Vec::new();
                input.read_to_end(&mut rest)?;
                assert!(rest.is_empty());
                return Ok((all, gunzip.finish().0));
            }
            all.extend_from_slice(&out[..count]);
        }
    }

    /// Decodes `size` bytes from each point, like the reader of an image.
    fn decode_from(mark: &Mark, stored: &[u8], size: usize) -> Vec<u8> {
        let points: Points = [mark.point.clone()].into_iter().collect();
        let at = mark.point.stored;
        let blob = Blob {
            id: Digest::sha256([0; 32]),
            codec: Codec::Gzip,
            points,
            stored_size: stored.len() as u64,
            decoded_size: 0,
            chunks: Vec::new().into(),
        };
        let chunk = Chunk {
            number: 0,
            digest: Digest::sha256([0; 32]),
            stored: at,
            stored_size: 1,
            decoded: Decoded(0),
            decoded_size: 1,
            part: Some(Part { offset: 0, size: size as u32 }),
        };
        let mut buffer = Vec::new();
        let stored = &stored[at.0 as usize..];
        let decoded = Decoder::new().unit(&blob.unit(&chunk), stored, &mut buffer);
        decoded.unwrap_or_else(|error| panic!("{size} bytes from {mark:?}: {error}")).to_vec()
    }

    #[test]
    fn any_encoder_can_be_read_from_any_point() {
        let data = text(5 << 20);
        let stored_blocks = gzip(0, &data);
        let members: Vec<u8> = data.chunks(1_300_000).flat_map(|part| gzip(6, part)).collect();
        let named = GzBuilder::new().filename("name").comment("comment").extra(b"extra".to_vec());
        let mut named = named.write(Vec::new(), Compression::new(6));
        named.write_all(&data).unwrap();
        let padded = [gzip(6, &data), vec![0; 5000]].concat();
        let mut kinds: Vec<_> = (1..=9).map(|level| gzip(level, &data)).collect();
        kinds.extend([stored_blocks, members, named.finish().unwrap(), padded]);
        for (kind, stored) in kinds.iter().enumerate() {
            let (unpacked, marks) = unpack(stored).unwrap();
            assert!(unpacked == data, "{kind}");
            // At level 1 some encoders end a block only when they have to.
            assert!(kind == 0 || marks.len() >= 4, "{kind}: {} points", marks.len());
            for mark in &marks {
                let rest = &data[mark.decoded as usize..];
                for size in [1, 1000, 40_000, 2 << 20].map(|size| rest.len().min(size)) {
                    assert!(decode_from(mark, stored, size) == rest[..size], "{kind}: {mark:?}");
                }
            }
        }
        // Windows are thin: bytes that nothing refers to are zeros.
        let (_, marks) = unpack(&kinds[5]).unwrap();
        let used = marks.iter().flat_map(|mark| &mark.point.window).filter(|byte| **byte != 0);
        assert!((1..marks.len() * MAX_WINDOW).contains(&used.count()));
    }

    #[test]
    fn one_block_has_one_point() {
        // Fixed codes all the way.
        let data = vec![7; 3 << 20];
        let (unpacked, marks) = unpack(&gzip(1, &data)).unwrap();
        assert!(unpacked == data);
        assert_eq!(marks[0].decoded, 0);
    }

    #[test]
    fn a_member_does_not_refer_to_the_one_before() {
        let first = text(2000);
        // Behind the copy there is much that the text has not, and nothing.
        for new in [500_u32, 0] {
            let new = (0..new).map(|at| (at * at / 7) as u8 | 0x80).collect();
            let second = [first[100..160].to_vec(), new].concat();
            let mut raw = Compress::new(Compression::new(9), false);
            let mut compress = |bytes: &[u8], flush| {
                let mut stored = Vec::with_capacity(10_000);
                raw.compress_vec(bytes, &mut stored, flush).unwrap();
                stored
            };
            compress(&first, FlushCompress::Sync);
            let blocks = compress(&second, FlushCompress::Finish);
            let member = [&gzip(9, b"")[..10], &blocks, &[0; TRAILER]].concat();
            let Err(error) = unpack(&[gzip(9, &first), member].concat()) else {
                panic!("{}", second.len())
            };
            let error = error.to_string();
            assert!(error.contains("a match that begins before the data"), "{error}");
        }
    }

    #[test]
    fn damage_is_named() {
        let good = gzip(6, &text(100_000));
        let garbage = [&good[..], b"garbage"].concat();
        let padded = [&good[..], b"\0\0\0x"].concat();
        let mut damaged = good.clone();
        // There is no block of type 3.
        damaged[10] = 0xff;
        for (stored, problem) in [
            (&good[..good.len() - 1], "cut off"),
            (&good[..5000], "cut off"),
            (&good[..5], "cut off"),
            (&garbage, "no gzip magic"),
            (&padded, "zeros were expected"),
            (&damaged, "damaged"),
        ] {
            let Err(error) = unpack(stored) else { panic!("expected: {problem}") };
            let error = error.to_string();
            assert!(error.contains(problem), "{error}");
        }
    }
}
