//! Makes archives byte by byte, also ones that no sane writer makes.

use lazuli_builder::{Entry, EntryKind, Layer, LayerSource, SourceError, source::tar::Archive};
use std::io::Read as _;

/// A header block with a correct checksum, whatever the rest is.
pub(crate) struct Header(pub(crate) [u8; 512]);

impl Header {
    /// A GNU-style header: no prefix field.
    pub(crate) fn new(kind: u8, name: &[u8], size: u64) -> Self {
        let mut block = [0; 512];
        block[..name.len()].copy_from_slice(name);
        block[156] = kind;
        block[257..265].copy_from_slice(b"ustar  \0");
        let mut header = Header(block);
        header.octal(100..108, 0o644).octal(108..116, 0).octal(116..124, 0);
        header.octal(124..136, size).octal(136..148, 0).octal(329..337, 0).octal(337..345, 0);
        header
    }

    /// Writes a number field.
    pub(crate) fn octal(&mut self, field: std::ops::Range<usize>, value: u64) -> &mut Self {
        let digits = format!("{value:0width$o}\0", width = field.len() - 1);
        self.bytes(field.start, digits.as_bytes())
    }

    /// Writes raw bytes.
    pub(crate) fn bytes(&mut self, at: usize, bytes: &[u8]) -> &mut Self {
        self.0[at..at + bytes.len()].copy_from_slice(bytes);
        self
    }

    /// The block with its checksum filled in.
    pub(crate) fn finish(&self) -> [u8; 512] {
        let mut block = self.0;
        block[148..156].fill(b' ');
        let sum: u32 = block.iter().map(|&byte| u32::from(byte)).sum();
        block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        block
    }
}

/// An archive that grows.
#[derive(Clone, Default)]
pub(crate) struct Tar(pub(crate) Vec<u8>);

impl Tar {
    /// A header and its content, padded.
    pub(crate) fn member(mut self, header: &Header, content: &[u8]) -> Self {
        self.0.extend(header.finish());
        self.0.extend(content);
        self.0.resize(self.0.len().next_multiple_of(512), 0);
        self
    }

    pub(crate) fn file(self, name: &str, content: &[u8]) -> Self {
        self.member(&Header::new(b'0', name.as_bytes(), content.len() as u64), content)
    }

    pub(crate) fn dir(self, name: &str) -> Self {
        self.member(&Header::new(b'5', name.as_bytes(), 0), b"")
    }

    pub(crate) fn link(self, kind: u8, name: &str, target: &str) -> Self {
        self.member(Header::new(kind, name.as_bytes(), 0).bytes(157, target.as_bytes()), b"")
    }

    /// An extended header of this type (`x` or `g`).
    pub(crate) fn pax(self, kind: u8, records: &[(&str, &[u8])]) -> Self {
        let records: Vec<u8> = records.iter().flat_map(|(key, value)| record(key, value)).collect();
        self.member(&Header::new(kind, b"PaxHeaders/x", records.len() as u64), &records)
    }

    /// The bytes with the two zero blocks at the end.
    pub(crate) fn end(mut self) -> Vec<u8> {
        self.0.extend([0; 1024]);
        self.0
    }
}

/// One PAX record.
pub(crate) fn record(key: &str, value: &[u8]) -> Vec<u8> {
    let body = key.len() + value.len() + 3;
    let mut length = body;
    while length.to_string().len() + body != length {
        length += 1;
    }
    [format!("{length} {key}=").as_bytes(), value, b"\n"].concat()
}

/// All entries with the content of regular files.
pub(crate) fn entries(tar: &[u8]) -> Result<Vec<(Entry, Vec<u8>)>, SourceError> {
    let mut archive = Archive::new(tar);
    let mut entries = Vec::new();
    while let Some(entry) = archive.next_entry()? {
        let mut content = Vec::new();
        if let EntryKind::Regular { size, .. } = entry.kind {
            archive.content().read_to_end(&mut content).map_err(|error| SourceError::Entry {
                entry: entry.path.to_string(),
                offset: entry.offset,
                problem: error.to_string(),
            })?;
            assert_eq!(content.len() as u64, size);
        }
        entries.push((entry, content));
    }
    Ok(entries)
}

/// A layer with these stored bytes.
pub(crate) fn layer(name: &str, bytes: Vec<u8>) -> Layer {
    let stored_size = Some(bytes.len() as u64);
    let source = LayerSource::Tar(Box::new(std::io::Cursor::new(bytes)));
    Layer { name: name.into(), stored_size, source }
}
