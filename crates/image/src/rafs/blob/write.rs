//! Writes the tails of new blobs.

use std::io;

use zerocopy::IntoBytes as _;

use super::{
    super::{
        BlobRecord, TailInfo, embedded, footer,
        layout::{CI_HEADER_SIZE, CI_UNIT_SIZE, MAX_CHUNKS, TocEntry, features},
    },
    ci_table::{ci_header, ci_table, join_meta_file, units, written_features},
    packed::validate_packed,
    section::{BOOTSTRAP, CHUNKS, CI, CI_HEADER, DIGESTS, SKELETON, Section, toc_entry, write_toc},
};
use crate::{
    Algorithm, Blob, Chunk, Codec, Digest, FormatError, Points, codec::Encoder, digest::Hasher,
    offset::round_up_to_block,
};

/// Compression level of CI tables.
const CI_LEVEL: i32 = 3;
/// Compression level of embedded bootstraps, which only converters read.
const BOOTSTRAP_LEVEL: i32 = 3;

/// Everything about a blob but its chunk data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tail {
    /// The bytes behind the chunk data in the blob.
    pub bytes: Vec<u8>,
    /// The bootstrap's description of `bytes`.
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

/// Writes the bootstrap to embed in the blob of the given record; the record's id is ignored.
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
    let error = |problem: &'static str| FormatError::new("blob", 0, problem);
    let last = chunks.last().ok_or_else(|| error("a blob without chunks"))?;
    if last.number >= MAX_CHUNKS {
        return Err(error("too many chunks"));
    }
    let data_size = last.stored_end().0;
    let decoded_size = round_up_to_block(last.decoded_end().0).ok_or_else(|| error("too big"))?;
    let ci = ci_table(chunks)?;
    // Upstream's converter decodes tables compressed with zstd only, and leaves out others.
    let ci_codec = if codec == Codec::Lz4 { Codec::Zstd } else { codec };
    let (stored_ci, ci_codec) = compressed_ci(&ci, ci_codec)?;

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
pub(in crate::rafs) fn compressed_ci(
    ci: &[u8],
    codec: Codec,
) -> Result<(Vec<u8>, Codec), FormatError> {
    let mut encoder = Encoder::new(codec, CI_LEVEL).map_err(|reason: io::Error| {
        FormatError::new("CI table", 0, format!("no compressor: {reason}"))
    })?;
    let compressed = encoder.encode(ci);
    let (stored, codec) = compressed.map_or((ci, Codec::None), |stored| (stored, codec));
    Ok((stored.to_vec(), codec))
}

/// Writes the CI table `ci`, stored as `stored`, with its header. Returns their entries for the
/// table of contents.
pub(in crate::rafs) fn write_ci(
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

/// Writes the digest array. Returns its entry for the table of contents.
pub(in crate::rafs) fn write_digests(out: &mut Section, chunks: &[Chunk]) -> TocEntry {
    let digests: Vec<u8> = chunks.iter().flat_map(|chunk| chunk.digest.hash).collect();
    let (offset, size) = (out.position(), digests.len() as u64);
    out.write(&digests);
    out.write(&footer::encode(DIGESTS, size));
    let digest = Algorithm::Sha256.digest(&digests);
    toc_entry(DIGESTS, Codec::None, digest, offset, size, size)
}

/// Writes the skeleton of a layer, if any. Returns its entry for the table of contents.
pub(in crate::rafs) fn write_skeleton(out: &mut Section, skeleton: &[u8]) -> Option<TocEntry> {
    if skeleton.is_empty() {
        return None;
    }
    let (offset, size) = (out.position(), skeleton.len() as u64);
    out.write(skeleton);
    out.write(&footer::encode(SKELETON, size));
    let digest = Algorithm::Sha256.digest(skeleton);
    Some(toc_entry(SKELETON, Codec::None, digest, offset, size, size))
}

/// Writes an embedded bootstrap. Returns its entry for the table of contents.
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
