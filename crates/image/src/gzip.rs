//! Reads gzip files from a [point](crate::points) on: RFC 1951 and 1952.
//!
//! A decoder that begins at a point is given the window first, then the bits of the byte before.
//! The decoder of zlib-rs takes whole bytes only, so these bits become the upper ones of a byte
//! whose lower ones end a block without content.

use zlib_rs::{Inflate, InflateError, InflateFlush, Status};

use crate::points::Point;

/// Limit of a member's header, in bytes: its name and comment may have any length.
pub const MAX_HEADER: usize = 256 << 10;

/// Bytes behind the last block of a member: CRC-32 and size.
pub const TRAILER: usize = 8;

/// How a gzip file begins, and each of its members.
pub const MAGIC: [u8; 2] = [0x1f, 0x8b];

/// The result of parsing the first bytes of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Header {
    /// The header is complete and has this many bytes.
    Ends(usize),
    /// There is more of it, or more than [`MAX_HEADER`].
    GoesOn,
    /// Not a gzip header, with the reason.
    Invalid(&'static str),
}

/// Parses the header with which `bytes` begin.
pub fn header(bytes: &[u8]) -> Header {
    const CRC: u8 = 0x2;
    const EXTRA: u8 = 0x4;
    const NAME: u8 = 0x8;
    const COMMENT: u8 = 0x10;
    let fixed = [
        (0, MAGIC[0], "no gzip magic"),
        (1, MAGIC[1], "no gzip magic"),
        (2, 8, "a method other than deflate"),
    ];
    for (at, expected, problem) in fixed {
        if bytes.get(at).is_some_and(|byte| *byte != expected) {
            return Header::Invalid(problem);
        }
    }
    let Some(flags) = bytes.get(3) else { return Header::GoesOn };
    if flags & 0xe0 != 0 {
        return Header::Invalid("unknown flags");
    }
    let mut end = 10;
    if flags & EXTRA != 0 {
        let Some([low, high]) = bytes.get(end..end + 2) else { return Header::GoesOn };
        end += 2 + usize::from(u16::from_le_bytes([*low, *high]));
    }
    for text in [NAME, COMMENT] {
        if flags & text != 0 {
            let rest = bytes.get(end..).unwrap_or_default();
            let Some(size) = rest.iter().position(|byte| *byte == 0) else { return Header::GoesOn };
            end += size + 1;
        }
    }
    end += if flags & CRC != 0 { 2 } else { 0 };
    if end <= bytes.len() { Header::Ends(end) } else { Header::GoesOn }
}

/// Decodes from points on. Keeps its working memory.
pub(crate) struct Inflater(Inflate);

impl Default for Inflater {
    fn default() -> Self {
        Inflater(Inflate::new(false, 15))
    }
}

impl Inflater {
    /// Decodes `stored` from `point` on into `decoded`, across the ends of members. A point may be
    /// at the header of a member, since no block begins like one. Returns the number of decoded
    /// bytes, fewer than `decoded` holds at the end of the file.
    pub(crate) fn decode(
        &mut self,
        point: &Point<'_>,
        stored: &[u8],
        decoded: &mut [u8],
    ) -> Result<usize, String> {
        let window = point.window()?;
        self.0.reset(false);
        if !window.is_empty() {
            self.0.set_dictionary(&window).map_err(reason)?;
        }
        let lead = Lead::to(point.bits, point.before);
        let (mut lead, mut rest, mut filled) = (lead.bytes(), stored, 0);
        if point.bits == 0 && window.is_empty() && rest.starts_with(&MAGIC) {
            rest = blocks(rest)?.unwrap_or_default();
        }
        while filled < decoded.len() {
            let input = if lead.is_empty() { &mut rest } else { &mut lead };
            let (read, written) = (self.0.total_in(), self.0.total_out());
            let flush = InflateFlush::NoFlush;
            let status = self.0.decompress(input, &mut decoded[filled..], flush).map_err(reason)?;
            let (read, written) = (self.0.total_in() - read, self.0.total_out() - written);
            *input = &input[read as usize..];
            filled += written as usize;
            if status == Status::StreamEnd {
                // Some tools pad gzip files with zeros behind the last member.
                if filled == decoded.len() {
                    break;
                }
                let Some(next) = next_member(rest)? else { break };
                rest = next;
                self.0.reset(false);
            } else if lead.is_empty() && (rest.is_empty() || read + written == 0) {
                break;
            }
        }
        Ok(filled)
    }
}

fn reason(error: InflateError) -> String {
    error.as_str().to_owned()
}

/// Returns the blocks of the member behind the trailer at the start of `rest`; `None` if its header
/// is not complete.
fn next_member(rest: &[u8]) -> Result<Option<&[u8]>, String> {
    let next = rest.get(TRAILER..).unwrap_or_default();
    blocks(next).map_err(|problem| format!("behind a gzip member: {problem}"))
}

/// The blocks of the member with which `member` begins; `None` if there is no whole header.
fn blocks(member: &[u8]) -> Result<Option<&[u8]>, &'static str> {
    match header(member) {
        Header::Ends(end) => Ok(Some(&member[end..])),
        Header::GoesOn => Ok(None),
        Header::Invalid(problem) => Err(problem),
    }
}

/// Blocks without content, and the first bits of a block that does not begin with a byte.
struct Lead {
    bits: u128,
    count: usize,
}

impl Lead {
    /// The upper `bits` bits of `before`, behind as much as makes whole bytes.
    fn to(bits: u8, before: u8) -> Self {
        let mut lead = Lead { bits: 0, count: 0 };
        if bits == 0 {
            return lead;
        }
        let free = 8 - usize::from(bits);
        if free % 2 == 1 {
            lead.add_dynamic();
        }
        while lead.count % 8 != free {
            lead.add_fixed();
        }
        lead.add((before >> free).into(), bits.into());
        lead
    }

    fn add(&mut self, value: u128, count: usize) {
        self.bits |= value << self.count;
        self.count += count;
    }

    /// A block of type 1: only its end, 7 zeros.
    fn add_fixed(&mut self) {
        self.add(0b010, 10);
    }

    /// A block of type 2 with an odd number of bits and no symbols but its end.
    fn add_dynamic(&mut self) {
        self.add(0b100, 3);
        // 257 literals and lengths, 1 distance, 19 lengths of codes.
        self.add(15 << 10, 14);
        // In the order of the format 18 is the third, 1 the eighteenth: both get codes of one bit.
        self.add(1 << (2 * 3) | 1 << (17 * 3), 19 * 3);
        // 138 and 118 times nothing; then a code of one bit for the end, and one for the distance.
        for zeros in [138, 118] {
            self.add(1 | (zeros - 11) << 1, 8);
        }
        self.add(0, 2);
        // The end.
        self.add(0, 1);
    }

    fn bytes(&self) -> &[u8] {
        // Little endian, as deflate counts bits.
        &zerocopy::IntoBytes::as_bytes(&self.bits)[..self.count.div_ceil(8)]
    }
}

#[cfg(test)]
mod tests {
    use zlib_rs::{Deflate, DeflateFlush};

    use super::*;
    use crate::{Points, Stored, points::NewPoint};

    fn deflate(data: &[u8]) -> Vec<u8> {
        let mut out = vec![0; data.len() + 100];
        let mut raw = Deflate::new(6, false, 15);
        raw.compress(data, &mut out, DeflateFlush::Finish).unwrap();
        out.truncate(raw.total_out() as usize);
        out
    }

    fn decode(point: NewPoint, stored: &[u8], size: usize) -> Result<Vec<u8>, String> {
        let at = point.stored;
        let points: Points = [point].into_iter().collect();
        let mut decoded = vec![0; size];
        let filled = Inflater::default().decode(&points.at(at).unwrap(), stored, &mut decoded)?;
        decoded.truncate(filled);
        Ok(decoded)
    }

    fn point(bits: u8, before: u8, window: &[u8]) -> NewPoint {
        NewPoint { stored: Stored(1), bits, before, window: window.to_vec() }
    }

    #[test]
    fn a_block_may_begin_at_any_bit() {
        let text = b"a block may begin at any bit, may it not? ".repeat(20);
        let blocks = deflate(&text);
        for offset in 0..8 {
            let mut shifted = vec![0_u8; blocks.len() + 1];
            for (at, byte) in blocks.iter().enumerate() {
                let [low, high] = (u16::from(*byte) << offset).to_le_bytes();
                shifted[at] |= low;
                shifted[at + 1] |= high;
            }
            // Bits before the block belong to the one before it.
            shifted[0] |= (1 << offset) - 1;
            let (point, stored) = match offset {
                0 => (point(0, 0, b""), &shifted[..]),
                _ => (point(8 - offset, shifted[0], b""), &shifted[1..]),
            };
            assert_eq!(decode(point, stored, text.len()).unwrap(), text, "{offset}");
        }
    }

    #[test]
    fn a_window_holds_the_bytes_before_its_point() {
        let window = b"what came before".repeat(3);
        // Nothing but a reference: 16 bytes, 48 back, in a last block with fixed codes.
        let mut bits = Lead { bits: 0, count: 0 };
        bits.add(0b011, 3);
        // Length 15 to 16 is symbol 267, whose code of 7 bits is 11; codes come highest bit first.
        bits.add(0b1101000, 7);
        bits.add(1, 1);
        // Distance 33 to 48 is symbol 10.
        bits.add(0b01010, 5);
        bits.add(15, 4);
        bits.add(0, 7);
        let decoded = decode(point(0, 0, &window), bits.bytes(), 16).unwrap();
        assert_eq!(decoded, b"what came before");
        assert!(decode(point(0, 0, b"too short"), bits.bytes(), 16).is_err());
    }

    #[test]
    fn members_follow_each_other() {
        let member = |flags: u8, extra: &[u8], data: &[u8]| {
            let head = [0x1f, 0x8b, 8, flags, 0, 0, 0, 0, 0, 255];
            [&head[..], extra, &deflate(data), &[0; TRAILER]].concat()
        };
        let first = member(0, b"", b"one ");
        let odd = member(0x1e, b"\x03\0abcname\0comment\0xx", b"two ");
        let all = [&first[10..], &odd, &member(0, b"", b"three")].concat();
        assert_eq!(decode(point(0, 0, b""), &all, 13).unwrap(), b"one two three");
        // A part is a part.
        assert_eq!(decode(point(0, 0, b""), &all, 6).unwrap(), b"one tw");
        assert_eq!(decode(point(0, 0, b""), &all, 14).unwrap(), b"one two three");
        // From the first header on as well.
        let whole = [&first[..], &odd].concat();
        assert_eq!(decode(point(0, 0, b""), &whole, 8).unwrap(), b"one two ");
        let garbage = [&first[10..], b"garbage"].concat();
        assert!(decode(point(0, 0, b""), &garbage, 9).is_err());
    }

    #[test]
    fn gzip_headers_end_where_their_flags_say() {
        let plain = [0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3];
        assert_eq!(header(&plain), Header::Ends(10));
        for end in 0..10 {
            assert_eq!(header(&plain[..end]), Header::GoesOn);
        }
        for (at, byte) in [(0, 0x1e), (1, 0), (2, 7), (3, 0x20)] {
            let mut wrong = plain;
            wrong[at] = byte;
            assert!(matches!(header(&wrong), Header::Invalid(_)), "{at}");
        }
        let mut named = plain.to_vec();
        named[3] = 0x8;
        assert_eq!(header(&named), Header::GoesOn);
        named.extend_from_slice(b"name");
        assert_eq!(header(&named), Header::GoesOn);
        named.push(0);
        assert_eq!(header(&named), Header::Ends(15));
    }
}
