//! The bytes of FUSE requests about blobs and of their answers, as `include/uapi/linux/fuse.h` lays
//! them out.
//!
//! ```text
//! struct fuse_in_header                    struct fuse_read_in, after it
//!   0  u32 len     of everything            40  u64 fh
//!   4  u32 opcode                           48  u64 offset
//!   8  u64 unique  of the request           56  u32 size
//!  16  u64 nodeid  which file
//!  24  u32 uid, gid, pid, …
//! ```
//!
//! Pure: no descriptor, no panic on any input.

use super::super::fuse::WITHOUT_ANSWER;

/// Bytes of a request's header.
const HEADER: usize = 40;

/// The node number of the root directory.
pub const ROOT: u64 = 1;

/// Maximum size of one read, in bytes: 256 pages, the kernel's largest request.
pub const MOST: u32 = 1 << 20;

/// Seconds for which the kernel may cache attributes and names, which never change.
const FOREVER: u64 = 1 << 30;

/// The version of the interface that answers are written in. Later kernels go by it.
const VERSION: [u32; 2] = [7, 31];

const ASYNC_READ: u32 = 1;
const ASYNC_DIO: u32 = 1 << 15;
const NO_OPEN: u32 = 1 << 17;
const MAX_PAGES: u32 = 1 << 22;
const NO_OPENDIR: u32 = 1 << 24;

/// A request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlobRequest<'a> {
    /// Negotiate the interface.
    Init {
        /// The kernel's capabilities.
        flags: u32,
        /// Its readahead.
        readahead: u32,
    },
    /// The file of this name in the root directory.
    Lookup(&'a [u8]),
    /// The attributes of a file.
    Attributes,
    /// Bytes of a file.
    Read {
        /// First byte. `offset + size` does not overflow.
        offset: u64,
        /// Number of bytes, [`MOST`] at most.
        size: u32,
    },
    /// Names in the root directory: there is no list of them.
    List,
    /// How full the file system is.
    Space,
    /// Nothing: the kernel expects no answer.
    Note,
    /// Something else.
    Other,
}

/// Bytes that are not a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AbiError {
    /// Shorter than a header, or than its length field.
    #[error("a request of {0} bytes is cut short")]
    Short(usize),
    /// A read that ends behind the largest offset, or is larger than was agreed on.
    #[error("a read of {size} bytes at {offset}")]
    Range {
        /// Its offset.
        offset: u64,
        /// Its size in bytes.
        size: u32,
    },
    /// A name without an end.
    #[error("a name without an end")]
    Name,
}

/// The number of a request, by which it is answered, and of the node that it is about.
pub fn numbers(bytes: &[u8]) -> Result<(u64, u64), AbiError> {
    let short = AbiError::Short(bytes.len());
    let number = |at| field(bytes, at).map(u64::from_ne_bytes).ok_or(short);
    Ok((number(8)?, number(16)?))
}

/// Parses a request.
pub fn parse(bytes: &[u8]) -> Result<BlobRequest<'_>, AbiError> {
    let short = AbiError::Short(bytes.len());
    let number = |at| field(bytes, at).map(u32::from_ne_bytes).ok_or(short);
    let opcode = number(4)?;
    if WITHOUT_ANSWER.contains(&opcode) {
        return Ok(BlobRequest::Note);
    }
    let body = bytes.get(HEADER..number(0)? as usize).ok_or(short)?;
    Ok(match opcode {
        1 => {
            let end = body.iter().position(|byte| *byte == 0).ok_or(AbiError::Name)?;
            BlobRequest::Lookup(&body[..end])
        }
        3 => BlobRequest::Attributes,
        15 => {
            let offset = field(body, 8).map(u64::from_ne_bytes).ok_or(short)?;
            let size = field(body, 16).map(u32::from_ne_bytes).ok_or(short)?;
            if size > MOST || offset.checked_add(size.into()).is_none() {
                return Err(AbiError::Range { offset, size });
            }
            BlobRequest::Read { offset, size }
        }
        17 => BlobRequest::Space,
        26 => {
            let readahead = field(body, 8).map(u32::from_ne_bytes).ok_or(short)?;
            let flags = field(body, 12).map(u32::from_ne_bytes).ok_or(short)?;
            BlobRequest::Init { flags, readahead }
        }
        28 => BlobRequest::List,
        _ => BlobRequest::Other,
    })
}

/// `struct fuse_init_out`. `requests` is how many reads the kernel may have in flight at once.
pub fn init(flags: u32, readahead: u32, requests: u16) -> Vec<u8> {
    // `open` and `opendir` are answered with ENOSYS: the kernel does not ask again. Reads past the
    // page cache are sent without waiting for the one before.
    let wanted = flags & (ASYNC_READ | ASYNC_DIO | NO_OPEN | MAX_PAGES | NO_OPENDIR);
    let mut body = Vec::with_capacity(64);
    for number in [VERSION[0], VERSION[1], readahead, wanted] {
        body.extend(number.to_ne_bytes());
    }
    for number in [requests, requests] {
        body.extend(number.to_ne_bytes());
    }
    // Maximum write size in bytes, unused (the kernel accepts no less), and the granularity of
    // times.
    for number in [4096_u32, 1] {
        body.extend(number.to_ne_bytes());
    }
    body.extend(((MOST / 4096) as u16).to_ne_bytes());
    body.resize(64, 0);
    body
}

/// `struct fuse_entry_out` of a file.
pub fn entry(node: u64, size: u64) -> Vec<u8> {
    let mut body = Vec::with_capacity(128);
    for number in [node, 0, FOREVER, FOREVER, 0] {
        body.extend(number.to_ne_bytes());
    }
    body.extend(attr(node, size));
    body
}

/// `struct fuse_attr_out` of a file, or of the root directory.
pub fn attributes(node: u64, size: u64) -> Vec<u8> {
    let mut body = Vec::with_capacity(104);
    for number in [FOREVER, 0] {
        body.extend(number.to_ne_bytes());
    }
    body.extend(attr(node, size));
    body
}

/// `struct fuse_attr`.
fn attr(node: u64, size: u64) -> Vec<u8> {
    const DIRECTORY: u32 = 0o040_500;
    const FILE: u32 = 0o100_400;
    let mode = if node == ROOT { DIRECTORY } else { FILE };
    let mut body = Vec::with_capacity(88);
    // Numbers, bytes, blocks of 512, and three times.
    for number in [node, size, size.div_ceil(512), 0, 0, 0] {
        body.extend(number.to_ne_bytes());
    }
    // Parts of seconds, mode, links, owner, group, device, block size, flags.
    for number in [0, 0, 0, mode, 1, 0, 0, 0, 4096, 0] {
        body.extend(number.to_ne_bytes());
    }
    body
}

/// `struct fuse_statfs_out`: a block size and the longest name.
pub fn space() -> Vec<u8> {
    let mut body = vec![0; 80];
    body[40..44].copy_from_slice(&4096_u32.to_ne_bytes());
    body[44..48].copy_from_slice(&255_u32.to_ne_bytes());
    body[48..52].copy_from_slice(&4096_u32.to_ne_bytes());
    body
}

fn field<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at.checked_add(N)?)?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(opcode: u32, body: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; HEADER];
        bytes[..4].copy_from_slice(&((HEADER + body.len()) as u32).to_ne_bytes());
        bytes[4..8].copy_from_slice(&opcode.to_ne_bytes());
        bytes[8..16].copy_from_slice(&77_u64.to_ne_bytes());
        bytes[16..24].copy_from_slice(&5_u64.to_ne_bytes());
        bytes.extend(body);
        bytes
    }

    fn read(offset: u64, size: u32) -> Vec<u8> {
        let mut body = vec![0; 40];
        body[8..16].copy_from_slice(&offset.to_ne_bytes());
        body[16..20].copy_from_slice(&size.to_ne_bytes());
        request(15, &body)
    }

    #[test]
    fn requests_are_parsed_as_the_kernel_writes_them() {
        assert_eq!(numbers(&read(0, 1)), Ok((77, 5)));
        assert_eq!(parse(&read(8192, MOST)), Ok(BlobRequest::Read { offset: 8192, size: MOST }));
        assert_eq!(parse(&request(1, b"name\0")), Ok(BlobRequest::Lookup(b"name")));
        assert_eq!(parse(&request(3, &[0; 16])), Ok(BlobRequest::Attributes));
        let init = request(26, &[7, 0, 0, 0, 31, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0]);
        let expected = BlobRequest::Init {
            flags: u32::from_ne_bytes([2, 0, 0, 0]),
            readahead: u32::from_ne_bytes([1, 0, 0, 0]),
        };
        assert_eq!(parse(&init), Ok(expected));
        assert_eq!(parse(&request(14, &[0; 8])), Ok(BlobRequest::Other));
        // A list of forgotten nodes is longer than a slot.
        let mut cut = request(42, &[0; 40]);
        cut[..4].copy_from_slice(&60_000_u32.to_ne_bytes());
        assert_eq!(parse(&cut), Ok(BlobRequest::Note));
    }

    #[test]
    fn impossible_requests_are_refused() {
        assert_eq!(parse(&read(0, 1)[..60]), Err(AbiError::Short(60)));
        assert_eq!(parse(&[]), Err(AbiError::Short(0)));
        assert_eq!(parse(&request(1, b"name")), Err(AbiError::Name));
        for (offset, size) in [(u64::MAX, 1), (0, MOST + 1)] {
            assert_eq!(parse(&read(offset, size)), Err(AbiError::Range { offset, size }));
        }
    }

    #[test]
    fn answers_are_as_long_as_the_kernels_structures() {
        let lengths = [init(!0, 1, 2), entry(5, 1), attributes(1, 0), space()].map(|b| b.len());
        assert_eq!(lengths, [64, 128, 104, 80]);
    }
}
