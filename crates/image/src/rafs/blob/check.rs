//! Checks the tails of existing blobs against the bootstrap.

use zerocopy::FromBytes as _;

use super::{
    super::{
        BlobRecord, TailInfo,
        ci::{self, CiEntry, CiTable},
        footer,
        layout::{
            CI_ENTRY_SIZE, CI_HEADER_SIZE, CI_MAGIC, CiHeader, MAX_CHUNKS, TocEntry, features,
        },
    },
    ci_table::{join_meta_file, units},
    section::{CI, CI_HEADER, DIGEST_SIZE, DIGESTS, TOC},
};
use crate::{Blob, Digest, FormatError};

/// [`Tail::meta_file`](super::Tail::meta_file) of a blob that exists, checked as by [`check_blob`].
///
/// `tail` is the blob from [`TailInfo::ci_offset`] on, at least as far as [`TailInfo::meta_end`].
pub fn meta_file(tail: &[u8], record: &BlobRecord) -> Result<Vec<u8>, FormatError> {
    let (ci, header) = TailReader { bytes: tail, info: record.tail }.ci()?;
    check_ci_table(record, &ci)?;
    Ok(join_meta_file(ci, header))
}

/// The decoded CI table of a blob, of which `tail` are the bytes from [`TailInfo::ci_offset`] to
/// [`TailInfo::meta_end`].
pub fn ci_table_of(tail: &[u8], info: &TailInfo) -> Result<Vec<u8>, FormatError> {
    TailReader { bytes: tail, info: *info }.ci().map(|(ci, _)| ci)
}

/// Checks the tail of a blob against the bootstrap's description: the CI table, its header, and,
/// when the features name them, the footers, the digest array and the table of contents.
///
/// `tail` is the blob from [`TailInfo::ci_offset`] to its end. Chunks that the chunk table does not
/// list are not checked.
pub fn check_blob(tail: &[u8], record: &BlobRecord) -> Result<(), FormatError> {
    let info = record.tail;
    let reader = TailReader { bytes: tail, info };
    let (ci, header) = reader.ci()?;
    check_ci_table(record, &ci)?;
    if info.features & features::HAS_TAR_HEADER == 0 {
        return Ok(());
    }
    let ci_section = info.ci_stored_size + CI_HEADER_SIZE;
    let digests_at = reader.footer(ci_section, CI, ci_section)?;
    let mut sections = vec![(CI, &ci[..], 0), (CI_HEADER, header, info.ci_stored_size)];
    if info.features & features::INLINED_CHUNK_DIGEST != 0 {
        let size = u64::from(info.chunk_count) * DIGEST_SIZE;
        let digests = reader.slice(digests_at, size, "digest array")?;
        for chunk in &record.blob.chunks {
            let from = (u64::from(chunk.number) * DIGEST_SIZE) as usize;
            if digests.get(from..from + DIGEST_SIZE as usize) != Some(&chunk.digest.hash[..]) {
                let problem = format!("entry {} is not {}", chunk.number, chunk.digest);
                let at = info.ci_offset + digests_at;
                return Err(FormatError::new("digest array", at, problem));
            }
        }
        // An embedded bootstrap may follow; its tables are checked when it is opened.
        reader.footer(digests_at + size, DIGESTS, size)?;
        sections.push((DIGESTS, digests, digests_at));
    }
    if info.features & features::HAS_TOC != 0 {
        let toc = reader.toc()?;
        for (name, content, at) in sections {
            check_toc_entry(&toc, name, content, info.ci_offset + at)
                .map_err(|problem| FormatError::new("table of contents", 0, problem))?;
        }
    }
    Ok(())
}

/// Checks that `ci`, the decoded CI table, and the chunk table describe the same chunks. Chunks
/// missing from the chunk table are not checked.
pub fn check_ci_table(record: &BlobRecord, ci: &[u8]) -> Result<(), FormatError> {
    let error = |at: u64, problem: String| FormatError::new("CI table", at, problem);
    let BlobRecord { blob, tail } = record;
    let table = CiTable::new(ci, tail)
        .ok_or_else(|| error(0, format!("{} bytes for {} chunks", ci.len(), tail.chunk_count)))?;
    for chunk in &blob.chunks {
        let entry = table.get(chunk.number).map_err(|problem| error(0, problem))?;
        if entry != CiEntry::of(chunk) {
            return Err(error(0, format!("entry {} is not {chunk:?}", chunk.number)));
        }
    }
    Ok(())
}

/// Checks that `entries`, a run of the decoded CI table of version 1 from chunk `first` on, agree
/// with the chunk table. Chunks missing from the chunk table are not checked.
pub fn check_ci_entries(blob: &Blob, first: u32, entries: &[u8]) -> Result<(), FormatError> {
    let from = blob.chunks.partition_point(|chunk| chunk.number < first);
    for chunk in &blob.chunks[from..] {
        let at = u64::from(chunk.number - first) * CI_ENTRY_SIZE;
        let entry = entries.get(at as usize..).and_then(<[u8]>::first_chunk);
        match entry {
            None => break,
            Some(entry) if CiEntry::decode(entry) == CiEntry::of(chunk) => {}
            Some(_) => {
                let problem = format!("entry {} is not {chunk:?}", chunk.number);
                let at = u64::from(chunk.number) * CI_ENTRY_SIZE;
                return Err(FormatError::new("CI table", at, problem));
            }
        }
    }
    Ok(())
}

/// Checks that a CI header agrees with the blob table.
pub fn check_ci_header(info: &TailInfo, header: &[u8]) -> Result<(), FormatError> {
    let error = |problem: String| {
        FormatError::new("CI header", info.ci_offset + info.ci_stored_size, problem)
    };
    let header =
        CiHeader::ref_from_bytes(header).map_err(|_| error("it has another size".to_owned()))?;
    let is_v1 = info.features & features::CHUNK_INFO_V2 == 0;
    let facts = [
        ("magic", header.magic.get() == CI_MAGIC && header.magic2.get() == CI_MAGIC),
        ("number of entries", header.entries.get() == info.chunk_count),
        ("compressor", header.compressor.get() == info.ci_codec as u32),
        ("offset", header.offset.get() == info.ci_offset),
        ("stored size", header.stored_size.get() == info.ci_stored_size),
        ("size", header.size.get() == info.ci_size),
        (
            "place of units",
            is_v1 || [header.units_offset.get(), header.units_size.get()] == units(info),
        ),
    ];
    match facts.iter().find(|(_, holds)| !holds) {
        Some((field, _)) => Err(error(format!("bad {field}"))),
        None => Ok(()),
    }
}

/// Checks that a CI header, which was checked already, counts as many units as `ci`, the decoded
/// table before it.
pub fn check_ci_units(info: &TailInfo, ci: &[u8], header: &[u8]) -> Result<(), FormatError> {
    let header = CiHeader::ref_from_bytes(header).ok();
    let (Some(table), Some(header)) = (CiTable::new(ci, info), header) else {
        let problem = format!("{} bytes for {} chunks", ci.len(), info.chunk_count);
        return Err(FormatError::new("CI table", info.ci_offset, problem));
    };
    let (count, units) = (table.unit_count(), u64::from(header.units.get()));
    if info.features & features::CHUNK_INFO_V2 == 0 || count == units {
        return Ok(());
    }
    let problem = format!("{units} units, the table has {count}");
    Err(FormatError::new("CI header", info.ci_offset + info.ci_stored_size, problem))
}

fn check_toc_entry(
    toc: &[TocEntry],
    name: &str,
    content: &[u8],
    offset: u64,
) -> Result<(), String> {
    let entry = toc
        .iter()
        .find(|entry| entry.name.split(|byte| *byte == 0).next() == Some(name.as_bytes()))
        .ok_or_else(|| format!("no entry `{name}`"))?;
    if entry.offset.get() != offset || entry.size.get() != content.len() as u64 {
        return Err(format!("`{name}` has {} bytes at {}", entry.size, entry.offset));
    }
    if !Digest::sha256(entry.digest).matches(content) {
        return Err(format!("the digest of `{name}` is wrong"));
    }
    Ok(())
}

/// The bytes of a blob from its CI table on.
struct TailReader<'a> {
    bytes: &'a [u8],
    info: TailInfo,
}

impl<'a> TailReader<'a> {
    /// `len` bytes at `at`, counted from the CI table.
    fn slice(&self, at: u64, len: u64, object: &'static str) -> Result<&'a [u8], FormatError> {
        crate::erofs::reader::slice(self.bytes, at, len, || object.into())
    }

    /// The decoded CI table and its header, both compared with the blob table.
    fn ci(&self) -> Result<(Vec<u8>, &'a [u8]), FormatError> {
        let info = &self.info;
        if info.chunk_count > MAX_CHUNKS
            || !ci::size_fits(info.features, info.chunk_count, info.ci_size)
        {
            let problem = format!("{} bytes for {} chunks", info.ci_size, info.chunk_count);
            return Err(FormatError::new("CI table", info.ci_offset, problem));
        }
        let stored = self.slice(0, info.ci_stored_size, "CI table")?;
        let header_bytes = self.slice(info.ci_stored_size, CI_HEADER_SIZE, "CI header")?;
        check_ci_header(info, header_bytes)?;
        // At most 256 MiB, and no more of it is touched than the table decodes to.
        let mut ci = vec![0; info.ci_size as usize];
        info.ci_codec
            .decode(stored, &mut ci)
            .map_err(|problem| FormatError::new("CI table", info.ci_offset, problem.to_string()))?;
        check_ci_units(info, &ci, header_bytes)?;
        Ok((ci, header_bytes))
    }

    /// Checks the footer at `at` and returns where the next section starts.
    fn footer(&self, at: u64, name: &'static str, size: u64) -> Result<u64, FormatError> {
        let bytes = self.slice(at, footer::SIZE, name)?;
        let found = bytes.try_into().ok().and_then(footer::decode);
        if found != Some((name, size)) {
            let problem = format!("expected a footer for {size} bytes of `{name}`, got {found:?}");
            return Err(FormatError::new("footer", self.info.ci_offset + at, problem));
        }
        Ok(at + footer::SIZE)
    }

    /// The table of contents at the end of the blob, verified if the bootstrap has its digest.
    fn toc(&self) -> Result<Vec<TocEntry>, FormatError> {
        let error = |problem: &'static str| FormatError::new("table of contents", 0, problem);
        let footer_at = (self.bytes.len() as u64)
            .checked_sub(footer::SIZE)
            .ok_or_else(|| error("the blob ends before it"))?;
        let footer = self.slice(footer_at, footer::SIZE, TOC)?.try_into().ok();
        let size = match footer.and_then(footer::decode) {
            Some((TOC, size)) if size % size_of::<TocEntry>() as u64 == 0 => size,
            _ => return Err(error("the blob does not end with its footer")),
        };
        let start =
            footer_at.checked_sub(size).ok_or_else(|| error("it is bigger than the blob"))?;
        if let Some(digest) = self.info.toc_digest {
            let whole = &self.bytes[start as usize..];
            if whole.len() as u64 != u64::from(self.info.toc_size) || !digest.matches(whole) {
                return Err(error("it is not the one that the bootstrap names"));
            }
        }
        let entries =
            self.bytes[start as usize..footer_at as usize].chunks_exact(size_of::<TocEntry>());
        Ok(entries.map(|entry| TocEntry::read_from_bytes(entry).expect("whole entries")).collect())
    }
}
