//! Tar files, written field by field, so that tests choose the dialect of each field.

use std::borrow::Cow;

const BLOCK: usize = 512;

/// The dialect for data that the classic header cannot hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// Extended header records (POSIX.1-2001).
    Pax,
    /// GNU long-name entries and base-256 numbers; no extended attributes, no nanoseconds.
    Gnu,
}

/// How a sparse file lists its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SparseFormat {
    /// Type `S`, map in the header and in blocks that follow it.
    Gnu,
    /// `GNU.sparse.map` in the extended header.
    Pax01,
    /// Map in front of the data.
    Pax10,
}

/// Type and content of an [`Entry`].
#[derive(Clone, Debug)]
pub enum Body {
    /// A file with all its bytes.
    File(Vec<u8>),
    /// A file with holes: pieces of data by offset, ascending, not overlapping.
    Sparse {
        /// How the map is written.
        format: SparseFormat,
        /// Size of the file with its holes, in bytes.
        size: u64,
        /// Offset in the file and the bytes there.
        pieces: Vec<(u64, Vec<u8>)>,
    },
    /// A directory.
    Directory,
    /// A symbolic link to this target.
    Symlink(Vec<u8>),
    /// Another name of the entry with this path.
    HardLink(Vec<u8>),
    /// A character device: major, minor.
    Char(u32, u32),
    /// A block device: major, minor.
    Block(u32, u32),
    /// A named pipe.
    Fifo,
}

/// One entry of a tar file.
#[derive(Clone, Debug)]
pub struct Entry {
    pub(crate) path: Vec<u8>,
    pub(crate) body: Body,
    pub(crate) mode: u32,
    pub(crate) uid: u64,
    pub(crate) gid: u64,
    pub(crate) mtime: (i64, u32),
    pub(crate) records: Vec<(Vec<u8>, Vec<u8>)>,
    dialect: Dialect,
}

impl Entry {
    /// An entry of root's, mode 0644 (0755 for directories), from November 2023.
    pub fn new(path: impl Into<Vec<u8>>, body: Body) -> Self {
        let mode = if matches!(body, Body::Directory) { 0o755 } else { 0o644 };
        let dialect = Dialect::Pax;
        let (path, mtime) = (path.into(), (1_700_000_000, 0));
        Entry { path, body, mode, uid: 0, gid: 0, mtime, records: Vec::new(), dialect }
    }

    /// A file with this content.
    pub fn file(path: impl Into<Vec<u8>>, content: impl Into<Vec<u8>>) -> Self {
        Self::new(path, Body::File(content.into()))
    }

    /// A directory.
    pub fn directory(path: impl Into<Vec<u8>>) -> Self {
        Self::new(path, Body::Directory)
    }

    /// A symbolic link.
    pub fn symlink(path: impl Into<Vec<u8>>, target: impl Into<Vec<u8>>) -> Self {
        Self::new(path, Body::Symlink(target.into())).mode(0o777)
    }

    /// A hard link to the entry with the path `target`.
    pub fn hard_link(path: impl Into<Vec<u8>>, target: impl Into<Vec<u8>>) -> Self {
        Self::new(path, Body::HardLink(target.into()))
    }

    /// Permissions with set-uid, set-gid and sticky bits.
    pub fn mode(self, mode: u32) -> Self {
        Entry { mode, ..self }
    }

    /// User and group.
    pub fn owner(self, uid: u64, gid: u64) -> Self {
        Entry { uid, gid, ..self }
    }

    /// Seconds since 1970, and nanoseconds to add to them.
    pub fn mtime(self, seconds: i64, nanoseconds: u32) -> Self {
        Entry { mtime: (seconds, nanoseconds), ..self }
    }

    /// An extended attribute.
    pub fn xattr(self, name: &str, value: impl Into<Vec<u8>>) -> Self {
        self.record(&format!("SCHILY.xattr.{name}"), value)
    }

    /// Any record of the extended header.
    pub fn record(mut self, key: &str, value: impl Into<Vec<u8>>) -> Self {
        self.records.push((key.into(), value.into()));
        self
    }

    /// Writes this entry as GNU tar does by default.
    pub fn gnu(self) -> Self {
        Entry { dialect: Dialect::Gnu, ..self }
    }

    pub(crate) fn write(&self, out: &mut Vec<u8>) {
        let mut header = Header::new(self.dialect);
        let mut records = self.records.clone();
        let mut content = Cow::Borrowed(&[][..]);
        let mut link: &[u8] = &[];
        let mut path = Cow::Borrowed(&self.path);
        let mut sparse_map = Vec::new();
        let kind = match &self.body {
            Body::File(bytes) => {
                content = Cow::Borrowed(bytes);
                b'0'
            }
            Body::Sparse { format, size, pieces } => {
                let data: Vec<u8> = pieces.iter().flat_map(|(_, bytes)| bytes).copied().collect();
                content = Cow::Owned(data);
                let mut map: Vec<(u64, u64)> =
                    pieces.iter().map(|(offset, bytes)| (*offset, bytes.len() as u64)).collect();
                if map.last().is_none_or(|(offset, length)| offset + length < *size) {
                    map.push((*size, 0));
                }
                match format {
                    SparseFormat::Gnu => {
                        sparse_map = header.sparse(*size, &map);
                        b'S'
                    }
                    SparseFormat::Pax01 => {
                        path = Cow::Owned(records_01(&mut records, &self.path, *size, &map));
                        b'0'
                    }
                    SparseFormat::Pax10 => {
                        path = Cow::Owned(records_10(&mut records, &self.path, *size));
                        content = Cow::Owned([map_10(&map), content.into_owned()].concat());
                        b'0'
                    }
                }
            }
            Body::Directory => b'5',
            Body::Symlink(target) => {
                link = target;
                b'2'
            }
            Body::HardLink(target) => {
                link = target;
                b'1'
            }
            Body::Char(major, minor) => {
                header.device(*major, *minor);
                b'3'
            }
            Body::Block(major, minor) => {
                header.device(*major, *minor);
                b'4'
            }
            Body::Fifo => b'6',
        };
        header.bytes[156] = kind;
        self.long_names(&path, link, &mut records, out);
        header.text(0, 100, &path);
        header.text(157, 100, link);
        header.number(100, 8, i128::from(self.mode));
        header.number(124, 12, content.len() as i128);
        self.owner_and_time(&mut header, &mut records);
        if !records.is_empty() {
            assert_eq!(self.dialect, Dialect::Pax, "GNU tar entries have no extended header");
            extended_header(&records, out);
        }
        header.finish(out);
        out.extend_from_slice(&sparse_map);
        padded(&content, out);
    }

    fn long_names(
        &self,
        path: &[u8],
        link: &[u8],
        records: &mut Vec<(Vec<u8>, Vec<u8>)>,
        out: &mut Vec<u8>,
    ) {
        for (name, key, kind) in [(link, "linkpath", b'K'), (path, "path", b'L')] {
            if name.len() <= 100 {
                continue;
            }
            match self.dialect {
                Dialect::Pax => records.push((key.into(), name.to_vec())),
                Dialect::Gnu => {
                    let mut header = Header::new(Dialect::Gnu);
                    header.text(0, 100, b"././@LongLink");
                    header.bytes[156] = kind;
                    header.number(124, 12, name.len() as i128 + 1);
                    header.finish(out);
                    padded(&[name, b"\0"].concat(), out);
                }
            }
        }
    }

    fn owner_and_time(&self, header: &mut Header, records: &mut Vec<(Vec<u8>, Vec<u8>)>) {
        let (seconds, nanoseconds) = self.mtime;
        for (offset, width, key, value) in [
            (108, 8, "uid", i128::from(self.uid)),
            (116, 8, "gid", i128::from(self.gid)),
            (136, 12, "mtime", i128::from(seconds)),
        ] {
            let fits = (0..1 << (3 * (width - 1))).contains(&value);
            if fits || self.dialect == Dialect::Gnu {
                header.number(offset, width, value);
            } else if key != "mtime" {
                records.push((key.into(), value.to_string().into()));
            }
        }
        let fits = (0..1 << 33).contains(&seconds) && nanoseconds == 0;
        if self.dialect == Dialect::Pax && !fits {
            records.push((b"mtime".to_vec(), decimal(seconds, nanoseconds).into()));
        }
    }
}

/// A tar file of these entries, with the two zero blocks at its end.
pub fn write<'a>(entries: impl IntoIterator<Item = &'a Entry>) -> Vec<u8> {
    let mut out = Vec::new();
    entries.into_iter().for_each(|entry| entry.write(&mut out));
    out.extend_from_slice(&[0; 2 * BLOCK]);
    out
}

/// `seconds + nanoseconds / 10⁹` as PAX writes it: a sign in front, the fraction counted away from
/// zero.
fn decimal(seconds: i64, nanoseconds: u32) -> String {
    let total = i128::from(seconds) * 1_000_000_000 + i128::from(nanoseconds);
    let sign = if total < 0 { "-" } else { "" };
    let (whole, fraction) = (total.abs() / 1_000_000_000, total.abs() % 1_000_000_000);
    format!("{sign}{whole}.{fraction:09}")
}

fn records_01(
    records: &mut Vec<(Vec<u8>, Vec<u8>)>,
    path: &[u8],
    size: u64,
    map: &[(u64, u64)],
) -> Vec<u8> {
    let list: Vec<_> = map.iter().map(|(offset, length)| format!("{offset},{length}")).collect();
    records.push((b"GNU.sparse.name".to_vec(), path.to_vec()));
    records.push((b"GNU.sparse.size".to_vec(), size.to_string().into()));
    records.push((b"GNU.sparse.numblocks".to_vec(), map.len().to_string().into()));
    records.push((b"GNU.sparse.map".to_vec(), list.join(",").into()));
    b"GNUSparseFile.0/sparse".to_vec()
}

fn records_10(records: &mut Vec<(Vec<u8>, Vec<u8>)>, path: &[u8], size: u64) -> Vec<u8> {
    records.push((b"GNU.sparse.major".to_vec(), b"1".to_vec()));
    records.push((b"GNU.sparse.minor".to_vec(), b"0".to_vec()));
    records.push((b"GNU.sparse.name".to_vec(), path.to_vec()));
    records.push((b"GNU.sparse.realsize".to_vec(), size.to_string().into()));
    b"GNUSparseFile.0/sparse".to_vec()
}

fn map_10(map: &[(u64, u64)]) -> Vec<u8> {
    let mut text = format!("{}\n", map.len());
    for (offset, length) in map {
        text.push_str(&format!("{offset}\n{length}\n"));
    }
    let mut blocks = Vec::new();
    padded(text.as_bytes(), &mut blocks);
    blocks
}

fn extended_header(records: &[(Vec<u8>, Vec<u8>)], out: &mut Vec<u8>) {
    let mut content = Vec::new();
    for (key, value) in records {
        // The length counts its own digits.
        let rest = key.len() + value.len() + 3;
        let mut length = rest + 1;
        while length.to_string().len() + rest != length {
            length += 1;
        }
        content.extend_from_slice(format!("{length} ").as_bytes());
        content.extend_from_slice(&[key, &b"="[..], value, b"\n"].concat());
    }
    let mut header = Header::new(Dialect::Pax);
    header.text(0, 100, b"PaxHeaders/entry");
    header.bytes[156] = b'x';
    header.number(100, 8, 0o644);
    header.number(124, 12, content.len() as i128);
    header.finish(out);
    padded(&content, out);
}

fn padded(content: &[u8], out: &mut Vec<u8>) {
    out.extend_from_slice(content);
    out.resize(out.len().next_multiple_of(BLOCK), 0);
}

struct Header {
    bytes: [u8; BLOCK],
}

impl Header {
    fn new(dialect: Dialect) -> Self {
        let mut header = Header { bytes: [0; BLOCK] };
        let magic: &[u8; 8] = match dialect {
            Dialect::Pax => b"ustar\x0000",
            Dialect::Gnu => b"ustar  \0",
        };
        header.text(257, 8, magic);
        header
    }

    /// Writes the part that fits; a reader takes the whole from a long-name entry or record.
    fn text(&mut self, offset: usize, width: usize, text: &[u8]) {
        let length = text.len().min(width);
        self.bytes[offset..][..length].copy_from_slice(&text[..length]);
    }

    /// Octal, or base-256 when octal cannot hold the value.
    fn number(&mut self, offset: usize, width: usize, value: i128) {
        if (0..1 << (3 * (width - 1))).contains(&value) {
            self.text(offset, width, format!("{value:0digits$o}\0", digits = width - 1).as_bytes());
        } else {
            let bytes = value.to_be_bytes();
            self.text(offset, width, &bytes[bytes.len() - width..]);
            self.bytes[offset] |= 0x80;
        }
    }

    fn device(&mut self, major: u32, minor: u32) {
        self.number(329, 8, major.into());
        self.number(337, 8, minor.into());
    }

    /// Writes the old GNU map: four segments here, the rest in the returned blocks of 21.
    fn sparse(&mut self, size: u64, map: &[(u64, u64)]) -> Vec<u8> {
        let (here, rest) = map.split_at(map.len().min(4));
        let put = |header: &mut Header, start: usize, pieces: &[(u64, u64)]| {
            for (index, (offset, length)) in pieces.iter().enumerate() {
                header.number(start + 24 * index, 12, (*offset).into());
                header.number(start + 24 * index + 12, 12, (*length).into());
            }
        };
        put(self, 386, here);
        self.bytes[482] = u8::from(!rest.is_empty());
        self.number(483, 12, size.into());
        let mut blocks = Vec::new();
        let mut chunks = rest.chunks(21).peekable();
        while let Some(pieces) = chunks.next() {
            let mut block = Header { bytes: [0; BLOCK] };
            put(&mut block, 0, pieces);
            block.bytes[504] = u8::from(chunks.peek().is_some());
            blocks.extend_from_slice(&block.bytes);
        }
        blocks
    }

    fn finish(mut self, out: &mut Vec<u8>) {
        self.text(148, 8, b"        ");
        let sum: u32 = self.bytes.iter().map(|byte| u32::from(*byte)).sum();
        self.text(148, 8, format!("{sum:06o}\0 ").as_bytes());
        out.extend_from_slice(&self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fractions_of_negative_times_count_away_from_zero() {
        assert_eq!(decimal(-2, 500_000_000), "-1.500000000");
        assert_eq!(decimal(-1, 999_999_999), "-0.000000001");
        assert_eq!(decimal(3, 1), "3.000000001");
    }
}
