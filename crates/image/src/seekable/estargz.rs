//! The end of an eStargz layer: a gzip member that holds a tar of the table of contents, and the
//! footer, an empty member whose header says where that begins.

use zlib_rs::{Inflate, InflateFlush, Status};

use super::layer::MAX_TOC;
use crate::{
    Digest, FormatError, Problem,
    gzip::{self, Header},
};

/// The name of the tar's only file.
const NAME: &[u8] = b"stargz.index.json";
/// Bytes of a tar header.
const BLOCK: usize = 512;
/// Bytes that are unpacked at a time.
const STEP: usize = 256 << 10;

/// The end of a footer, after 16 hex digits: the empty last block of deflate, CRC and size.
const EMPTY: [u8; 13] = [1, 0, 0, 0xff, 0xff, 0, 0, 0, 0, 0, 0, 0, 0];

/// Finds the member with the table: its offset in the layer, from the footer at the end of `tail`,
/// the layer's last bytes.
///
/// # Errors
/// There is no such footer.
pub fn footer(tail: &[u8], layer: Digest) -> Result<u64, FormatError> {
    let error = |problem: Problem| FormatError::new(("footer of", layer), 0, problem);
    // Bytes of the extra field, and of what identifies its only part, which the oldest writers left
    // out.
    for (extra, id) in [(26_u8, &b"SG\x16\0"[..]), (22, b"")] {
        let head = [&[0x1f, 0x8b, 8, 4, 0, 0, 0, 0, 0], &[0xff, extra, 0][..], id].concat();
        let size = head.len() + 22 + EMPTY.len();
        let Some(footer) = tail.len().checked_sub(size).map(|at| &tail[at..]) else { continue };
        // The byte between them is the operating system, which does not matter.
        let begins = footer[..9] == head[..9] && footer[10..head.len()] == head[10..];
        let (digits, rest) = footer[head.len()..].split_at(16);
        if !begins || rest[..6] != *b"STARGZ" || rest[6..] != EMPTY {
            continue;
        }
        let digits = std::str::from_utf8(digits).ok();
        let digits = digits.filter(|digits| digits.bytes().all(|byte| byte.is_ascii_hexdigit()));
        let offset = digits.and_then(|digits| u64::from_str_radix(digits, 16).ok());
        return offset.ok_or_else(|| error("its digits are none".into()));
    }
    let external = b"STARGZEXTERNALTOC";
    if tail.windows(external.len()).any(|bytes| bytes == external) {
        let problem = "a table of contents outside of the layer (`-esgztoc`)";
        return Err(error(Problem::Unsupported(problem.into())));
    }
    Err(error("the layer does not end as eStargz does".into()))
}

/// The table of contents in `member`, compared with its digest.
///
/// # Errors
/// It is another one, too large, or damaged.
pub fn toc_of_member(member: &[u8], digest: Digest, layer: Digest) -> Result<Vec<u8>, FormatError> {
    let error = |problem: String| FormatError::new(("table of contents of", layer), 0, problem);
    let blocks = match gzip::header(member) {
        Header::Ends(end) => &member[end..],
        Header::GoesOn => return Err(error("its gzip header has no end".to_owned())),
        Header::Invalid(problem) => return Err(error(problem.to_owned())),
    };
    let mut unpacked = Unpacked { inflate: Inflate::new(false, 15), rest: blocks };
    let mut bytes = Vec::new();
    unpacked.fill(&mut bytes, BLOCK).map_err(error)?;
    let header = bytes.first_chunk::<BLOCK>();
    let header = header.ok_or_else(|| error("it ends within a tar header".to_owned()))?;
    let size = size_of_file(header).map_err(error)?;
    unpacked.fill(&mut bytes, BLOCK + size).map_err(error)?;
    bytes.truncate(BLOCK + size);
    let toc = bytes.split_off(BLOCK);
    if toc.len() != size {
        return Err(error(format!("{} bytes, its tar header says {size}", toc.len())));
    }
    if !digest.matches(&toc) {
        return Err(error(format!("its digest is not {digest}, as its image says")));
    }
    Ok(toc)
}

fn size_of_file(header: &[u8; BLOCK]) -> Result<usize, String> {
    let name = header[..100].split(|byte| *byte == 0).next().unwrap_or_default();
    if name != NAME {
        return Err(format!("a file `{}` where it should be", name.escape_ascii()));
    }
    let digits = header[124..136].trim_ascii_end();
    let digits = digits.strip_suffix(b"\0").unwrap_or(digits).trim_ascii();
    let digits = std::str::from_utf8(digits).ok();
    let size = digits.and_then(|digits| u64::from_str_radix(digits, 8).ok());
    let size = size.ok_or("its tar header has no size")?;
    match size {
        0..=MAX_TOC => Ok(size as usize),
        _ => Err(format!("{size} bytes, expected at most {MAX_TOC}")),
    }
}

/// Decoder of a member.
struct Unpacked<'a> {
    inflate: Inflate,
    rest: &'a [u8],
}

impl Unpacked<'_> {
    /// Unpacks until `bytes` has at least `size` bytes, or the input ends.
    fn fill(&mut self, bytes: &mut Vec<u8>, size: usize) -> Result<(), String> {
        while bytes.len() < size {
            let here = bytes.len();
            bytes.resize(here + STEP, 0);
            let (read, written) = (self.inflate.total_in(), self.inflate.total_out());
            let to = &mut bytes[here..];
            let status = self.inflate.decompress(self.rest, to, InflateFlush::NoFlush);
            let status = status.map_err(|error| error.as_str().to_owned())?;
            let (read, written) =
                (self.inflate.total_in() - read, self.inflate.total_out() - written);
            self.rest = &self.rest[read as usize..];
            bytes.truncate(here + written as usize);
            if status == Status::StreamEnd || read + written == 0 {
                break;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Algorithm;

    fn layer() -> Digest {
        Algorithm::Sha256.digest(b"layer")
    }

    fn new_footer(offset: u64) -> Vec<u8> {
        let head = b"\x1f\x8b\x08\x04\0\0\0\0\0\xff\x1a\0SG\x16\0";
        [&head[..], format!("{offset:016x}STARGZ").as_bytes(), &EMPTY].concat()
    }

    fn old_footer(offset: u64) -> Vec<u8> {
        let head = b"\x1f\x8b\x08\x04\0\0\0\0\0\xff\x16\0";
        [&head[..], format!("{offset:016x}STARGZ").as_bytes(), &EMPTY].concat()
    }

    #[test]
    fn footers_lead_to_the_table() {
        assert_eq!((new_footer(0).len(), old_footer(0).len()), (51, 47));
        for footer_of in [new_footer, old_footer] {
            let tail = [&b"before"[..], &footer_of(0xab_cdef)].concat();
            assert_eq!(footer(&tail, layer()).unwrap(), 0xab_cdef);
            assert_eq!(footer(&tail[6..], layer()).unwrap(), 0xab_cdef);
            assert!(footer(&tail[7..], layer()).is_err());
            let digits = tail.len() - EMPTY.len() - 22;
            for (at, byte) in [(digits, b'g'), (digits, b'+'), (digits + 16, b's'), (6, 0)] {
                let mut tail = tail.clone();
                tail[at] = byte;
                assert!(footer(&tail, layer()).is_err(), "{at}");
            }
        }
        assert!(footer(b"", layer()).is_err());
        let external = b"\x1f\x8b\x08\x04\0\0\0\0\0\xff\x15\0SG\x11\0STARGZEXTERNALTOC";
        let tail = [&external[..], &EMPTY].concat();
        assert_eq!(tail.len(), 46);
        let error = footer(&tail, layer()).unwrap_err().to_string();
        assert!(error.contains("outside of the layer"), "{error}");
    }
}
