//! Reads tar archives as a stream, from whatever writer: V7, ustar, PAX, GNU, star, libarchive.

mod acl;
mod content;
mod header;
mod metadata;
mod number;
mod pax;
mod sparse;

use std::io::{self, Read};

pub use self::content::MemberContent;
pub(crate) use self::pax::check_xattr;
use self::{
    content::Layout,
    header::{BLOCK, Header},
    metadata::{device, metadata, not_a_number},
    pax::Attributes,
};
use crate::{
    entry::{Entry, EntryKind, EntryPath},
    error::SourceError,
    whiteout,
};

/// Maximum size of one extended header in bytes. Linux limits the xattrs of a file to 64 KiB on
/// common file systems, and a path to 4 KiB; only sparse maps of versions 0.0 and 0.1 grow larger.
const MAX_EXTENSION: u64 = 1 << 20;

/// Maximum size of all global headers in bytes: they apply to every member, so each costs time at
/// every member.
const MAX_GLOBAL: u64 = 64 << 10;

/// Maximum size in bytes of what all members together inherit from global headers: each copies it.
const MAX_INHERITED: u64 = 64 << 20;

/// Maximum number of members of one archive: 4 Mi, ten times the largest images known, about 1 GiB
/// of memory.
const MAX_MEMBERS: u64 = 4 << 20;

/// A tar archive, read sequentially.
///
/// Call [`Archive::next_entry`] until it gives `None`; read the content of a regular file from
/// [`Archive::content`] in between, or not at all.
#[derive(Debug)]
pub struct Archive<R> {
    reader: R,
    /// Bytes read so far.
    offset: u64,
    members: u64,
    global: Attributes,
    global_bytes: u64,
    /// Bytes that members have inherited.
    inherited: u64,
    content: Layout,
}

/// Names that GNU headers give to the next member.
#[derive(Debug, Default)]
struct LongNames {
    name: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
}

impl<R: Read> Archive<R> {
    /// Starts at the first byte of an unpacked archive. Reads in small pieces: give it a buffer.
    pub fn new(reader: R) -> Self {
        Archive {
            reader,
            offset: 0,
            members: 0,
            global: Attributes::default(),
            global_bytes: 0,
            inherited: 0,
            content: Layout::default(),
        }
    }

    /// Reads the next member, without its content; `None` at the end.
    pub fn next_entry(&mut self) -> Result<Option<Entry>, SourceError> {
        loop {
            match self.next_member()? {
                Some(entry) if whiteout::is_aufs_metadata(&entry.path) => {}
                other => return Ok(other),
            }
        }
    }

    fn next_member(&mut self) -> Result<Option<Entry>, SourceError> {
        let mut attributes = self.inherit()?;
        let mut long = LongNames::default();
        let mut start = None;
        loop {
            self.skip_content()?;
            let offset = self.offset;
            let start = *start.get_or_insert(offset);
            let mut block = [0; BLOCK];
            if !self.read_header(&mut block, start != offset)? {
                return Ok(None);
            }
            let fail = |problem: String| SourceError::Archive { offset, problem };
            let header = Header::new(&block).map_err(|bad| fail(bad.to_string()))?;
            let size = || {
                number::parse_unsigned(header.size()).ok_or_else(|| {
                    fail(format!(
                        "the size field holds `{}`, expected a number",
                        header.size().escape_ascii()
                    ))
                })
            };
            match header.kind() {
                b'x' | b'X' => {
                    let records = self.extension(offset, size()?, MAX_EXTENSION, "PAX header")?;
                    attributes.apply(&records).map_err(fail)?;
                }
                b'g' => {
                    let size = size()?;
                    self.global_bytes = self.global_bytes.saturating_add(size);
                    let limit = MAX_GLOBAL.saturating_sub(self.global_bytes - size);
                    let records = self.extension(offset, size, limit, "global PAX header")?;
                    self.global.apply(&records).map_err(&fail)?;
                    attributes.apply(&records).map_err(fail)?;
                }
                b'L' | b'K' => {
                    let limit = EntryPath::MAX as u64 + 1;
                    let name = self.extension(offset, size()?, limit, "GNU long name")?;
                    let end = name.iter().position(|&byte| byte == 0).unwrap_or(name.len());
                    let name = Some(name[..end].to_vec());
                    if header.kind() == b'L' { long.name = name } else { long.link = name }
                }
                // A volume label: a name for the tape, not a file.
                b'V' => self.begin_content(offset, size()?)?,
                _ => return self.member(start, &header, attributes, long).map(Some),
            }
        }
    }

    /// The attributes that global headers give to the next member.
    fn inherit(&mut self) -> Result<Attributes, SourceError> {
        self.inherited += self.global.bytes();
        if self.inherited > MAX_INHERITED {
            let problem = format!(
                "members inherit more than {MAX_INHERITED} bytes of names and attributes from \
                 global PAX headers"
            );
            return Err(SourceError::Archive { offset: self.offset, problem });
        }
        Ok(self.global.clone())
    }

    /// The content of the entry that [`Archive::next_entry`] gave last, holes as zeros.
    pub fn content(&mut self) -> MemberContent<'_, R> {
        MemberContent(self)
    }

    /// Bytes read so far.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Returns whether that entry is a sparse file, whose content is not contiguous in the archive.
    pub fn is_sparse(&self) -> bool {
        self.content.segments.is_some()
    }

    /// The reader.
    pub fn get_ref(&self) -> &R {
        &self.reader
    }

    /// The underlying reader. Bytes read from it here are lost to the archive.
    pub(crate) fn get_mut(&mut self) -> &mut R {
        &mut self.reader
    }

    /// The reader, wherever it is now.
    pub fn into_inner(self) -> R {
        self.reader
    }

    fn member(
        &mut self,
        offset: u64,
        header: &Header<'_>,
        mut attributes: Attributes,
        long: LongNames,
    ) -> Result<Entry, SourceError> {
        let sparse_name = attributes.sparse.name.take();
        let raw =
            sparse_name.or(attributes.path.take()).or(long.name).unwrap_or_else(|| header.name());
        let fail = |problem: String| SourceError::Entry {
            entry: raw[..raw.len().min(EntryPath::MAX)].escape_ascii().to_string(),
            offset,
            problem,
        };
        self.members += 1;
        if self.members > MAX_MEMBERS {
            return Err(fail(format!(
                "this is member {}, expected at most {MAX_MEMBERS}",
                self.members
            )));
        }
        let path = EntryPath::parse(&raw).map_err(|problem| fail(problem.to_string()))?;
        let link = attributes
            .link_path
            .take()
            .or(long.link)
            .unwrap_or_else(|| header.link_name().to_vec());
        let slash = raw.ends_with(b"/");
        let size = match attributes.size {
            Some(size) => size,
            None => number::parse_unsigned(header.size())
                .ok_or_else(|| fail(not_a_number("size", header.size())))?,
        };

        let regular = EntryKind::Regular { size, chunks: Vec::new() };
        let (kind, stored) = match header.kind() {
            _ if attributes.socket => (EntryKind::Socket, 0),
            // Writers before POSIX mark directories by a slash only.
            0 | b'0' | b'7' if slash && size == 0 => (EntryKind::Directory, 0),
            0 | b'0' | b'7' if slash => {
                return Err(fail(format!(
                    "a directory (its name ends in /) with {size} bytes of content"
                )));
            }
            0 | b'0' | b'7' | b'S' => (regular, size),
            // Writers fill in the size of the target, but there is no content.
            b'1' => {
                let target = EntryPath::parse(&link);
                let target = target.map_err(|problem| {
                    fail(format!("hard link target `{}`: {problem}", link.escape_ascii()))
                })?;
                (EntryKind::HardLink(target), 0)
            }
            b'2' => {
                if !(1..EntryPath::MAX).contains(&link.len()) || link.contains(&0) {
                    return Err(fail(format!(
                        "a symbolic link to {} bytes, expected 1 to 4095 without NUL",
                        link.len()
                    )));
                }
                (EntryKind::Symlink(link.into()), 0)
            }
            b'3' => (EntryKind::CharDevice(device(header, &attributes).map_err(fail)?), 0),
            b'4' => (EntryKind::BlockDevice(device(header, &attributes).map_err(fail)?), 0),
            b'5' => (EntryKind::Directory, 0),
            // A GNU incremental dump: a directory with a list of names as its content.
            b'D' => (EntryKind::Directory, size),
            b'6' => (EntryKind::Fifo, 0),
            b'M' => {
                return Err(fail(
                    "the rest of a file from another volume; join the volumes first".into(),
                ));
            }
            other => {
                return Err(fail(format!(
                    "members of type `{}` are not known",
                    other.escape_ascii()
                )));
            }
        };
        self.begin_content(offset, stored)?;
        let hidden = whiteout::hidden(&path).transpose().map_err(fail)?;
        let (path, mut kind) = hidden.unwrap_or((path, kind));
        if let EntryKind::Regular { size, .. } = &mut kind {
            self.sparse(header, &mut attributes).map_err(fail)?;
            *size = self.content.left;
        }
        let metadata = metadata(header, &kind, attributes).map_err(fail)?;
        Ok(Entry { path, offset, metadata, kind })
    }

    /// Reads an extended header's content.
    fn extension(
        &mut self,
        offset: u64,
        size: u64,
        limit: u64,
        what: &str,
    ) -> Result<Vec<u8>, SourceError> {
        if size > limit {
            let problem = format!("a {what} of {size} bytes, expected at most {limit}");
            return Err(SourceError::Archive { offset, problem });
        }
        self.begin_content(offset, size)?;
        let mut bytes = vec![0; usize::try_from(size).unwrap_or(0)];
        self.content().read_exact(&mut bytes).map_err(|error| SourceError::Archive {
            offset,
            problem: format!("in a {what}: {error}"),
        })?;
        Ok(bytes)
    }

    /// Reads the next header block. `false` at the end: no more bytes, or a block of zeros.
    fn read_header(
        &mut self,
        block: &mut [u8; BLOCK],
        extended: bool,
    ) -> Result<bool, SourceError> {
        let offset = self.offset;
        let fail = |problem: String| SourceError::Archive { offset, problem };
        let mut filled = 0;
        while filled < BLOCK {
            match self.reader.read(&mut block[filled..]) {
                Ok(0) => break,
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(fail(error.to_string())),
            }
        }
        self.offset += filled as u64;
        let end = filled == 0 || (filled == BLOCK && block.iter().all(|&byte| byte == 0));
        if end && extended {
            return Err(fail(
                "the archive ends after an extended header, expected the member it belongs to"
                    .into(),
            ));
        }
        if !end && filled < BLOCK {
            return Err(fail(format!("the archive ends {filled} bytes into a header of {BLOCK}")));
        }
        Ok(!end)
    }

    fn read_exact(&mut self, buffer: &mut [u8]) -> io::Result<()> {
        let mut filled = 0;
        while filled < buffer.len() {
            filled += self.read_some(&mut buffer[filled..])?;
        }
        Ok(())
    }

    /// Reads at least one byte.
    fn read_some(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.reader.read(buffer) {
                Ok(0) => {
                    let problem = format!(
                        "the archive is cut off at byte {}, in the middle of a member",
                        self.offset
                    );
                    return Err(io::Error::new(io::ErrorKind::UnexpectedEof, problem));
                }
                Ok(count) => {
                    self.offset += count as u64;
                    return Ok(count);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}
