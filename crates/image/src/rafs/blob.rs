//! The tail of a data blob: what describes the chunks once more, in the blob itself.
//!
//! ```text
//! chunks |H| CI table | CI header |H| digest array |H| bootstrap |H| table of contents |H|
//! ```
//! `H` is a [footer](super::footer). Upstream reads the CI table and header to find chunks, and the
//! digest array to verify them. Only the blob of a single layer holds a
//! [bootstrap](super::embedded).

use std::io;

use zerocopy::{FromBytes, IntoBytes};

use super::{
    BlobRecord, TailInfo,
    ci::{self, CiEntry, CiTable},
    embedded, footer,
    layout::{
        CI_ENTRY_SIZE, CI_HEADER_SIZE, CI_MAGIC, CI_UNIT_SIZE, CI_V2_ENTRY_SIZE, CiHeader,
        MAX_CHUNKS, TocEntry, features,
    },
};
use crate::{
    Algorithm, BLOCK_SIZE, Blob, Chunk, Codec, Digest, FormatError, Points, codec::Encoder,
    digest::Hasher, offset::round_up_to_block,
};

/// Compression level of CI tables.
const CI_LEVEL: i32 = 3;
/// Compression level of embedded bootstraps, which only converters read.
const BOOTSTRAP_LEVEL: i32 = 3;
/// Bytes of a digest in the digest array.
const DIGEST_SIZE: u64 = 32;

const CHUNKS: &str = "image.blob";
const CI: &str = "blob.meta";
const CI_HEADER: &str = "blob.meta.header";
const DIGESTS: &str = "blob.digest";
const BOOTSTRAP: &str = "image.boot";
const TOC: &str = "rafs.blob.toc";
/// Upstream's readers look sections up by their names, and do not know this one.
const SKELETON: &str = "lazuli.skeleton";

/// Everything about a blob but its chunk data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tail {
    /// What follows the chunk data in the blob.
    pub bytes: Vec<u8>,
    /// What the bootstrap says about `bytes`.
    pub info: TailInfo,
    /// The file `<blob id>.blob.meta` that ships beside the bootstrap: the decoded CI table, zeros
    /// up to a block border, the CI header.
    pub meta_file: Vec<u8>,
    /// The blob's id: SHA-256 of chunk data and tail.
    pub id: Digest,
    /// Bytes of the whole blob.
    pub stored_size: u64,
    /// Bytes of the decoded blob.
    pub decoded_size: u64,
}

/// The tail for a blob of `chunks`, which must lie back to back from byte 0 in both address spaces.
///
/// `chunk_data` is a SHA-256 computation that was fed the stored chunks and nothing else. Fails
/// when the chunks leave gaps or there are none, or too many, for the format.
pub fn blob_tail(chunks: &[Chunk], chunk_data: Hasher, codec: Codec) -> Result<Tail, FormatError> {
    tail(chunks, chunk_data, codec, None)
}

/// Writes the bootstrap that is to be embedded in the blob that it is told of, whose id does not
/// count.
type Embed<'a> = &'a dyn Fn(BlobRecord) -> Result<Vec<u8>, FormatError>;

/// [`blob_tail`] of a blob that holds its own bootstrap, compressed with zstd.
pub fn layer_tail(
    chunks: &[Chunk],
    chunk_data: Hasher,
    codec: Codec,
    bootstrap: Embed<'_>,
) -> Result<Tail, FormatError> {
    tail(chunks, chunk_data, codec, Some(bootstrap))
}

/// A blob that holds nothing but a bootstrap: that of a layer without content of its own.
pub fn bare_bootstrap(bootstrap: &[u8]) -> Result<Vec<u8>, FormatError> {
    let mut out = Section { bytes: Vec::new(), start: 0 };
    let entry = write_embedded(&mut out, bootstrap)?;
    write_toc(&mut out, &[entry]);
    Ok(out.bytes)
}

fn tail(
    chunks: &[Chunk],
    chunk_data: Hasher,
    codec: Codec,
    bootstrap: Option<Embed<'_>>,
) -> Result<Tail, FormatError> {
    validate_packed(chunks)?;
    let error = |problem: &str| FormatError::new("blob", 0, problem);
    let last = chunks.last().ok_or_else(|| error("a blob without chunks"))?;
    if last.number >= MAX_CHUNKS {
        return Err(error("too many chunks"));
    }
    let data_size = last.stored_end().0;
    let decoded_size = round_up_to_block(last.decoded_end().0).ok_or_else(|| error("too big"))?;
    let ci = ci_table(chunks)?;
    let (stored_ci, ci_codec) = compressed_ci(&ci, codec)?;

    let mut hash = chunk_data;
    let mut out = Section { bytes: Vec::new(), start: data_size };
    out.write(&footer::encode(CHUNKS, data_size));
    // The digest of `image.blob` covers the footer, unlike every other one.
    hash.update(&out.bytes);
    let chunks_digest = hash.clone().finish();
    if chunks_digest.algorithm != Algorithm::Sha256 {
        return Err(error("the id of a blob is a SHA-256 digest"));
    }

    let ci_offset = out.position();
    let inlined = if bootstrap.is_some() { features::INLINED_FS_META } else { 0 };
    let mut info = TailInfo {
        features: written_features(chunks) | inlined,
        chunk_count: chunks.len() as u32,
        ci_offset,
        ci_stored_size: stored_ci.len() as u64,
        ci_size: ci.len() as u64,
        ci_codec,
        toc_size: 0,
        toc_digest: None,
        index: None,
    };
    let [_, units_size] = units(&info);
    let units = (units_size / CI_UNIT_SIZE) as u32;
    let header = ci_header(&info, units);
    let mut toc = vec![toc_entry(CHUNKS, Codec::None, chunks_digest, 0, data_size, decoded_size)];
    toc.extend(write_ci(&mut out, &info, &stored_ci, &ci, units));
    toc.push(write_digests(&mut out, chunks));
    if let Some(bootstrap) = bootstrap {
        // Any id that no other blob has: that of the blob is not known yet.
        let id = hash.clone().finish();
        let (stored_size, chunks) = (out.position(), chunks.to_vec().into());
        let points = Points::default();
        let blob = Blob { id, codec, points, stored_size, decoded_size, chunks };
        let mut bootstrap = bootstrap(BlobRecord { blob, tail: info })?;
        embedded::forget_id(&mut bootstrap, &id)?;
        toc.push(write_embedded(&mut out, &bootstrap)?);
    }
    let toc = write_toc(&mut out, &toc);
    (info.toc_size, info.toc_digest) = (toc.len() as u32, Some(Algorithm::Sha256.digest(toc)));
    hash.update(&out.bytes[footer::SIZE as usize..]);
    let stored_size = out.position();
    let meta_file = join_meta_file(ci, header.as_bytes());
    Ok(Tail { bytes: out.bytes, info, meta_file, id: hash.finish(), stored_size, decoded_size })
}

/// The CI table as stored, and how it is compressed.
pub(super) fn compressed_ci(ci: &[u8], codec: Codec) -> Result<(Vec<u8>, Codec), FormatError> {
    let mut encoder = Encoder::new(codec, CI_LEVEL).map_err(|reason: io::Error| {
        FormatError::new("CI table", 0, format!("no compressor: {reason}"))
    })?;
    let compressed = encoder.encode(ci);
    let (stored, codec) = compressed.map_or((ci, Codec::None), |stored| (stored, codec));
    Ok((stored.to_vec(), codec))
}

/// Writes the CI table `ci`, which is stored as `stored`, with its header, and says what the table
/// of contents is to say about them.
pub(super) fn write_ci(
    out: &mut Section,
    info: &TailInfo,
    stored: &[u8],
    ci: &[u8],
    units: u32,
) -> Vec<TocEntry> {
    out.write(stored);
    let header = ci_header(info, units);
    let header_offset = out.position();
    out.write(header.as_bytes());
    let stored_size = stored.len() as u64;
    out.write(&footer::encode(CI, stored_size + CI_HEADER_SIZE));
    let sha256 = |data: &[u8]| Algorithm::Sha256.digest(data);
    let of_header = sha256(header.as_bytes());
    let size = CI_HEADER_SIZE;
    vec![
        toc_entry(CI, info.ci_codec, sha256(ci), info.ci_offset, stored_size, ci.len() as u64),
        toc_entry(CI_HEADER, Codec::None, of_header, header_offset, size, size),
    ]
}

/// Writes the digest array, and says what the table of contents is to say about it.
pub(super) fn write_digests(out: &mut Section, chunks: &[Chunk]) -> TocEntry {
    let digests: Vec<u8> = chunks.iter().flat_map(|chunk| chunk.digest.hash).collect();
    let (offset, size) = (out.position(), digests.len() as u64);
    out.write(&digests);
    out.write(&footer::encode(DIGESTS, size));
    let digest = Algorithm::Sha256.digest(&digests);
    toc_entry(DIGESTS, Codec::None, digest, offset, size, size)
}

/// Writes the skeleton of a layer, if there is one, and says what the table of contents is to say
/// about it.
pub(super) fn write_skeleton(out: &mut Section, skeleton: &[u8]) -> Option<TocEntry> {
    if skeleton.is_empty() {
        return None;
    }
    let (offset, size) = (out.position(), skeleton.len() as u64);
    out.write(skeleton);
    out.write(&footer::encode(SKELETON, size));
    let digest = Algorithm::Sha256.digest(skeleton);
    Some(toc_entry(SKELETON, Codec::None, digest, offset, size, size))
}

/// Sections of a blob that is its own index.
pub(super) struct IndexSections<'a> {
    /// None without chunks.
    pub(super) header: Option<&'a CiHeader>,
    pub(super) digests: &'a [[u8; DIGEST_SIZE as usize]],
    /// None if it is not kept.
    pub(super) skeleton: Option<&'a [u8]>,
}

impl<'a> IndexSections<'a> {
    /// Finds them by the table of contents.
    pub(super) fn find(bytes: &'a [u8]) -> Option<Self> {
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

/// Writes an embedded bootstrap, and says what the table of contents is to say about it.
fn write_embedded(out: &mut Section, bootstrap: &[u8]) -> Result<TocEntry, FormatError> {
    let offset = out.position();
    let mut encoder = Encoder::new(Codec::Zstd, BOOTSTRAP_LEVEL).map_err(|reason| {
        FormatError::new(BOOTSTRAP, offset, format!("no compressor: {reason}"))
    })?;
    let encoded = encoder.encode(bootstrap);
    let (codec, stored) = encoded.map_or((Codec::None, bootstrap), |it| (Codec::Zstd, it));
    out.write(stored);
    out.write(&footer::encode(BOOTSTRAP, stored.len() as u64));
    let digest = Algorithm::Sha256.digest(bootstrap);
    let (stored_size, size) = (stored.len() as u64, bootstrap.len() as u64);
    Ok(toc_entry(BOOTSTRAP, codec, digest, offset, stored_size, size))
}

/// Writes the table of contents with its footer, and returns both.
pub(super) fn write_toc<'a>(out: &'a mut Section, entries: &[TocEntry]) -> &'a [u8] {
    let start = out.bytes.len();
    out.write(entries.as_bytes());
    out.write(&footer::encode(TOC, size_of_val(entries) as u64));
    &out.bytes[start..]
}

fn ci_table(chunks: &[Chunk]) -> Result<Vec<u8>, FormatError> {
    ci::table(chunks).map_err(|chunk| {
        let problem = format!("does not fit a CI entry: {chunk:?}");
        FormatError::new(("chunk", chunk.number), chunk.stored.0, problem)
    })
}

/// What a blob of `chunks` made here has.
fn written_features(chunks: &[Chunk]) -> u32 {
    let is_batched = chunks.iter().any(|chunk| chunk.part.is_some());
    features::WRITTEN | if is_batched { features::WRITTEN_BATCHED } else { 0 }
}

/// The header of the CI table that `tail` describes, which has so many units.
fn ci_header(tail: &TailInfo, count: u32) -> CiHeader {
    let [offset, size] = units(tail);
    CiHeader {
        magic: CI_MAGIC.into(),
        features: tail.features.into(),
        compressor: (tail.ci_codec as u32).into(),
        entries: tail.chunk_count.into(),
        offset: tail.ci_offset.into(),
        stored_size: tail.ci_stored_size.into(),
        size: tail.ci_size.into(),
        units_offset: offset.into(),
        units_size: size.into(),
        units: count.into(),
        reserved: [0; 4032],
        magic2: CI_MAGIC.into(),
    }
}

/// Where a decoded CI table says something about units, and in how many bytes.
fn units(tail: &TailInfo) -> [u64; 2] {
    if !tail.has_units() {
        return [0; 2];
    }
    let offset = CI_V2_ENTRY_SIZE * u64::from(tail.chunk_count);
    [offset, tail.ci_size.saturating_sub(offset)]
}

fn join_meta_file(ci: Vec<u8>, header: &[u8]) -> Vec<u8> {
    let mut file = ci;
    file.resize(file.len().next_multiple_of(BLOCK_SIZE as usize), 0);
    file.extend_from_slice(header);
    file
}

/// [`Tail::meta_file`] of a blob that exists, checked as by [`check_blob`].
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

/// [`Tail::meta_file`] of a blob that [`blob_tail`] ended, from what a bootstrap says about it;
/// `None` if it may have been another writer: they describe more, and list fewer chunks.
pub fn written_meta_file(record: &BlobRecord) -> Option<Vec<u8>> {
    let BlobRecord { blob, tail } = record;
    if tail.features != written_features(&blob.chunks)
        || tail.chunk_count as usize != blob.chunks.len()
        || validate_packed(&blob.chunks).is_err()
        || tail.toc_digest.is_none()
    {
        return None;
    }
    let ci = ci_table(&blob.chunks).ok()?;
    let [_, units] = units(tail);
    let header = ci_header(tail, (units / CI_UNIT_SIZE) as u32);
    (ci.len() as u64 == tail.ci_size).then(|| join_meta_file(ci, header.as_bytes()))
}

/// Bytes with their place in the blob.
#[derive(Default)]
pub(super) struct Section {
    bytes: Vec<u8>,
    start: u64,
}

impl Section {
    fn write(&mut self, data: &[u8]) {
        self.bytes.extend_from_slice(data);
    }

    fn position(&self) -> u64 {
        self.start + self.bytes.len() as u64
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub(super) fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }
}

/// How a section is compressed, in the table of contents.
const fn toc_flags(codec: Codec) -> u32 {
    match codec {
        // No section is a piece of a gzip file.
        Codec::None | Codec::Gzip => 1,
        Codec::Zstd => 2,
        Codec::Lz4 => 4,
    }
}

fn toc_entry(
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

/// Whether `chunks` are numbered from 0 and lie back to back in both address spaces. Upstream
/// searches them by either offset and refuses gaps between decoded chunks.
pub(super) fn validate_packed(chunks: &[Chunk]) -> Result<(), FormatError> {
    let (mut stored, mut decoded) = (0, Some(0));
    // Bytes of the last batch, or chunk, that chunks account for.
    let mut filled = 0;
    let error = |problem: String| Err(FormatError::new("blob", 0, problem));
    for (number, chunk) in chunks.iter().enumerate() {
        let before = number.checked_sub(1).map(|before| &chunks[before]);
        let goes_on = before.is_some_and(|before| before.shares_unit(chunk));
        // What begins anew begins behind the last, of which nothing is missing.
        let begins =
            chunk.stored.0 == stored && before.is_none_or(|before| before.unit_size() == filled);
        let offset = if goes_on { filled } else { 0 };
        if chunk.number as usize != number
            || !(goes_on || begins)
            || chunk.part.map_or(0, |batch| batch.offset) != offset
            || !chunk.is_within_unit()
            || Some(chunk.decoded.0) != decoded
        {
            return error(format!("expected number {number} at stored byte {stored}: {chunk:?}"));
        }
        filled = offset + chunk.decoded_size;
        stored = chunk.stored_end().0;
        decoded = round_up_to_block(chunk.decoded_end().0);
    }
    match chunks.last() {
        Some(last) if last.unit_size() != filled => error("its last batch is not whole".into()),
        _ => Ok(()),
    }
}

/// Whether the tail of a blob agrees with what the bootstrap says about the blob: the CI table, its
/// header, and, when the features name them, the footers, the digest array and the table of
/// contents.
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
        // An embedded bootstrap may come next; its own tables are checked when it is opened.
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

/// Whether `ci`, the decoded CI table, says the same about the chunks of a blob as the chunk table.
/// Chunks that the chunk table does not list are not checked.
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

/// Whether `entries`, a run of the decoded CI table of version 1 whose first entry is that of chunk
/// `first`, say the same about the chunks of `blob` as the chunk table. Chunks that the chunk table
/// does not list are not checked.
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

/// Whether a CI header says the same as the blob table.
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

/// Whether a CI header, checked already, has as many units as `ci`, the decoded table before it.
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
        let error = |problem: &str| FormatError::new("table of contents", 0, problem);
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
