//! Sections of a tail, and the table of contents that names them.

use zerocopy::{FromBytes as _, IntoBytes as _};

use super::super::{
    footer,
    layout::{CiHeader, TocEntry},
};
use crate::{Codec, Digest};

/// Bytes of a digest in the digest array.
pub(super) const DIGEST_SIZE: u64 = 32;

pub(super) const CHUNKS: &str = "image.blob";
pub(super) const CI: &str = "blob.meta";
pub(super) const CI_HEADER: &str = "blob.meta.header";
pub(super) const DIGESTS: &str = "blob.digest";
pub(super) const BOOTSTRAP: &str = "image.boot";
pub(super) const TOC: &str = "rafs.blob.toc";
/// Upstream's readers look up sections by name and ignore this one.
pub(super) const SKELETON: &str = "lazuli.skeleton";

/// Bytes with their place in the blob.
#[derive(Default)]
pub(in crate::rafs) struct Section {
    pub(super) bytes: Vec<u8>,
    pub(super) start: u64,
}

impl Section {
    pub(super) fn write(&mut self, data: &[u8]) {
        self.bytes.extend_from_slice(data);
    }

    pub(super) fn position(&self) -> u64 {
        self.start + self.bytes.len() as u64
    }

    pub(in crate::rafs) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub(in crate::rafs) fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }
}

/// How a section is compressed, in the table of contents.
const fn toc_flags(codec: Codec) -> u32 {
    match codec {
        // No section is a piece of an ordinary layer.
        Codec::None | Codec::Gzip | Codec::ZstdLayer => 1,
        Codec::Zstd => 2,
        Codec::Lz4 => 4,
    }
}

pub(super) fn toc_entry(
    name: &str,
    codec: Codec,
    digest: Digest,
    offset: u64,
    stored_size: u64,
    size: u64,
) -> TocEntry {
    let mut padded = [0; 16];
    padded[..name.len()].copy_from_slice(name.as_bytes());
    TocEntry {
        flags: toc_flags(codec).into(),
        reserved: 0.into(),
        name: padded,
        digest: digest.hash,
        offset: offset.into(),
        stored_size: stored_size.into(),
        size: size.into(),
        reserved2: [0; 48],
    }
}

/// Writes the table of contents with its footer, and returns both.
pub(in crate::rafs) fn write_toc<'a>(out: &'a mut Section, entries: &[TocEntry]) -> &'a [u8] {
    let start = out.bytes.len();
    out.write(entries.as_bytes());
    out.write(&footer::encode(TOC, size_of_val(entries) as u64));
    &out.bytes[start..]
}

/// Sections of a blob that is its own index.
pub(in crate::rafs) struct IndexSections<'a> {
    /// `None` without chunks.
    pub(in crate::rafs) header: Option<&'a CiHeader>,
    pub(in crate::rafs) digests: &'a [[u8; DIGEST_SIZE as usize]],
    /// `None` if the skeleton is not kept.
    pub(in crate::rafs) skeleton: Option<&'a [u8]>,
}

impl<'a> IndexSections<'a> {
    /// Finds them by the table of contents.
    pub(in crate::rafs) fn find(bytes: &'a [u8]) -> Option<Self> {
        let end = bytes.len().checked_sub(footer::SIZE as usize)?;
        let (name, size) = footer::decode(bytes[end..].first_chunk()?)?;
        let start = end.checked_sub(usize::try_from(size).ok()?).filter(|_| name == TOC)?;
        let toc = <[TocEntry]>::ref_from_bytes(&bytes[start..end]).ok()?;
        let find = |name: &str| {
            let is_it = |entry: &&TocEntry| {
                entry.name.split(|byte| *byte == 0).next() == Some(name.as_bytes())
            };
            toc.iter().find(is_it)
        };
        let section = |entry: &TocEntry| {
            let start = usize::try_from(entry.offset.get()).ok()?;
            let end = start.checked_add(usize::try_from(entry.stored_size.get()).ok()?)?;
            bytes.get(start..end)
        };
        let header = match find(CI_HEADER) {
            Some(entry) => Some(CiHeader::ref_from_bytes(section(entry)?).ok()?),
            None => None,
        };
        let digests = find(DIGESTS).map_or(Some(&[][..]), section)?;
        let (digests, rest) = digests.as_chunks();
        let skeleton = match find(SKELETON) {
            Some(entry) => Some(section(entry)?),
            None => None,
        };
        rest.is_empty().then_some(IndexSections { header, digests, skeleton })
    }
}
