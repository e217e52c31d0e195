//! Writes bootstraps. See [`crate::erofs`]'s writer for why everything runs twice.

use zerocopy::IntoBytes;

use super::{
    BlobRecord,
    layout::{
        self, BlobEntry, CHUNK_SIZES, ChunkEntry, ExtendedSuperBlock, MAPPED_ALIGN, MAX_ROWS,
        Origin, chunk_flags, features, flags,
    },
    tables::{digester, largest_chunk, validate_chunk, validate_order},
};
use crate::{
    Algorithm, BLOCK_SIZE, Blob, Chunk, Codec, FormatError, InodeId, Problem, Tree,
    erofs::{
        layout::{
            BLOCK_BITS, COMPAT_RAFS_V6, DEVICE_SLOT, DeviceSlot, INCOMPAT_CHUNKED_FILE,
            INCOMPAT_DEVICE_TABLE, MAX_DEVICES, SUPERBLOCK_MAGIC, SUPERBLOCK_OFFSET, SuperBlock,
        },
        plan::{Content, Plan, Slot, plan},
        writer::{Mark, Output, write_inodes},
    },
};

/// Parameters of a bootstrap beyond its tree and blobs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BootstrapOptions {
    /// Bytes per chunk: a power of two from 4 KiB to 16 MiB; 1 MiB by default.
    pub chunk_size: u32,
    /// The algorithm of the chunk digests; BLAKE3 by default.
    pub digest: Algorithm,
}

impl Default for BootstrapOptions {
    fn default() -> Self {
        BootstrapOptions { chunk_size: 0x10_0000, digest: Algorithm::Blake3 }
    }
}

/// The image of `tree`, whose files consist of chunks of `blobs`. Equal input gives equal bytes.
///
/// The chunk table lists every chunk of every blob, as far as its record does. Fails when the tree
/// or the blobs do not fit the format or each other; see `docs/format.md` for the limits.
pub fn write_bootstrap(
    tree: &Tree,
    blobs: &[BlobRecord],
    options: &BootstrapOptions,
) -> Result<Vec<u8>, FormatError> {
    write_bootstrap_with_prefetch(tree, blobs, options, &[])
}

/// [`write_bootstrap`] with a prefetch table: the files that upstream's readers fetch first. Inodes
/// without a name are left out.
pub fn write_bootstrap_with_prefetch(
    tree: &Tree,
    blobs: &[BlobRecord],
    options: &BootstrapOptions,
    prefetch: &[InodeId],
) -> Result<Vec<u8>, FormatError> {
    write(tree, blobs, options, prefetch, Origin::V6)
}

/// The same image, which was something else before.
pub(super) fn write(
    tree: &Tree,
    blobs: &[BlobRecord],
    options: &BootstrapOptions,
    prefetch: &[InodeId],
    origin: Origin,
) -> Result<Vec<u8>, FormatError> {
    let codec = validate(blobs, options, origin)?;
    let plain: Vec<&Blob> = blobs.iter().map(|record| &record.blob).collect();
    let plan = plan(tree, &plain, options.chunk_size)?;
    let prefetch = prefetch.iter().filter_map(|file| plan.slots.get(file).copied()).collect();
    let chunk_table = chunk_table(blobs, &plan, options);
    let image = Image { plan, blobs, chunk_table, prefetch, options, codec, origin };

    let mut measured = Output::measure(image.plan.inodes.len());
    image.write(&mut measured)?;
    let mut emitted = Output::emit(measured);
    image.write(&mut emitted)?;
    Ok(emitted.into_bytes())
}

struct Image<'a> {
    plan: Plan<'a>,
    blobs: &'a [BlobRecord],
    chunk_table: Vec<ChunkEntry>,
    /// Files to fetch first.
    prefetch: Vec<Slot>,
    options: &'a BootstrapOptions,
    codec: Codec,
    origin: Origin,
}

impl Image<'_> {
    fn write(&self, out: &mut Output) -> Result<(), FormatError> {
        // Superblocks: of EROFS, of RAFS behind it, and the device table with a slot for each blob.
        out.write(&[0; SUPERBLOCK_OFFSET as usize]);
        out.write(self.superblock(out)?.as_bytes());
        out.write(self.extended_superblock(out).as_bytes());
        for slot in self.device_slots(out)? {
            out.write(slot.as_bytes());
        }
        out.pad(BLOCK_SIZE);

        // Blob table: fields of blobs that EROFS has no room for.
        out.mark(Mark::BlobTable);
        for (index, record) in self.blobs.iter().enumerate() {
            out.write(self.blob_entry(index, record).as_bytes());
        }

        // Prefetch table: nids, in the order in which files are to be fetched.
        out.mark(Mark::PrefetchTable);
        for file in &self.prefetch {
            let nid = out.nid(*file);
            let nid = u32::try_from(nid).map_err(|_| {
                let problem = format!("inode {nid} is beyond 2^32 - 1");
                FormatError::new("prefetch table", out.place(Mark::PrefetchTable), problem)
            })?;
            out.write(&nid.to_le_bytes());
        }
        out.pad(BLOCK_SIZE);

        // Inode area: inodes with their inline data, then their blocks.
        out.mark(Mark::Meta);
        // Upstream takes a root directory at the very start of the inode area for a missing one.
        out.write(&[0; BLOCK_SIZE as usize]);
        write_inodes(&self.plan, out);
        out.pad(BLOCK_SIZE);

        // Chunk table: a row for each chunk of each blob.
        out.mark(Mark::ChunkTable);
        out.write(self.chunk_table.as_bytes());
        out.pad(BLOCK_SIZE);
        out.mark(Mark::End);
        Ok(())
    }

    fn superblock(&self, out: &Output) -> Result<SuperBlock, FormatError> {
        let blocks: u64 =
            self.blobs.iter().map(|record| record.blob.decoded_size / BLOCK_SIZE).sum();
        let error = |problem: String| FormatError::new("superblock", SUPERBLOCK_OFFSET, problem);
        Ok(SuperBlock {
            magic: SUPERBLOCK_MAGIC.into(),
            checksum: 0.into(),
            feature_compat: COMPAT_RAFS_V6.into(),
            block_bits: BLOCK_BITS,
            extension_slots: 0,
            root_nid: (out.nid(0) as u16).into(),
            inode_count: self.plan.names.into(),
            epoch: 0.into(),
            fixed_nanoseconds: 0.into(),
            blocks: u32::try_from(blocks)
                .map_err(|_| error(format!("{blocks} blocks of decoded data, 2^32 - 1 fit")))?
                .into(),
            meta_block: ((out.place(Mark::Meta) / BLOCK_SIZE) as u32).into(),
            xattr_block: 0.into(),
            uuid: [0; 16],
            volume_name: self.origin.label(),
            feature_incompat: (INCOMPAT_CHUNKED_FILE | INCOMPAT_DEVICE_TABLE).into(),
            compression: 0.into(),
            device_count: (self.blobs.len() as u16).into(),
            device_slot: DEVICE_SLOT.into(),
            rest: [0; 38],
        })
    }

    fn extended_superblock(&self, out: &Output) -> ExtendedSuperBlock {
        let mut bits = flags::EXPLICIT_UID_GID | flags::ENCRYPTION_NONE;
        let has_digests = |BlobRecord { tail, .. }: &BlobRecord| {
            tail.features & features::INLINED_CHUNK_DIGEST != 0
        };
        if self.blobs.iter().all(has_digests) {
            bits |= flags::INLINED_CHUNK_DIGEST;
        }
        bits |= match self.codec {
            Codec::None => flags::COMPRESSOR_NONE,
            Codec::Lz4 => flags::COMPRESSOR_LZ4,
            Codec::Gzip => flags::COMPRESSOR_GZIP,
            Codec::Zstd | Codec::ZstdLayer => flags::COMPRESSOR_ZSTD,
        };
        bits |= match self.options.digest {
            Algorithm::Blake3 => flags::DIGEST_BLAKE3,
            Algorithm::Sha256 => flags::DIGEST_SHA256,
        };
        if self.plan.inodes.iter().any(|inode| !inode.xattrs.is_empty()) {
            bits |= flags::HAS_XATTR;
        }
        ExtendedSuperBlock {
            flags: bits.into(),
            blob_table_offset: out.place(Mark::BlobTable).into(),
            blob_table_size: ((self.blobs.len() * size_of::<BlobEntry>()) as u32).into(),
            chunk_size: self.options.chunk_size.into(),
            chunk_table_offset: out.place(Mark::ChunkTable).into(),
            chunk_table_size: (size_of_val(self.chunk_table.as_slice()) as u64).into(),
            prefetch_table_offset: match self.prefetch[..] {
                [] => 0,
                _ => out.place(Mark::PrefetchTable),
            }
            .into(),
            prefetch_table_size: ((self.prefetch.len() * 4) as u32).into(),
            reserved: [0; 204],
        }
    }

    fn device_slots(&self, out: &Output) -> Result<Vec<DeviceSlot>, FormatError> {
        // Where each blob would start if bootstrap and blobs were one device.
        let mut position = out.place(Mark::End);
        let mut slots = Vec::with_capacity(self.blobs.len());
        for BlobRecord { blob, .. } in self.blobs {
            let mapped = position.next_multiple_of(MAPPED_ALIGN);
            position = mapped + blob.decoded_size;
            let blocks = |bytes: u64| {
                u32::try_from(bytes / BLOCK_SIZE).map_err(|_| {
                    let problem = format!("{bytes} bytes are beyond 2^32 - 1 blocks");
                    FormatError::new(("device slot", blob.id), 0, problem)
                })
            };
            slots.push(DeviceSlot {
                tag: hex(blob),
                blocks: blocks(blob.decoded_size)?.into(),
                mapped_block: blocks(mapped)?.into(),
                reserved: [0; 56],
            });
        }
        Ok(slots)
    }

    fn blob_entry(&self, index: usize, BlobRecord { blob, tail }: &BlobRecord) -> BlobEntry {
        BlobEntry {
            id: hex(blob),
            index: (index as u32).into(),
            chunk_size: self.options.chunk_size.into(),
            chunk_count: tail.chunk_count.into(),
            compressor: (blob.codec as u32).into(),
            digester: digester(
                blob.chunks.first().map_or(self.options.digest, |chunk| chunk.digest.algorithm),
            )
            .into(),
            features: tail.features.into(),
            stored_size: blob.stored_size.into(),
            decoded_size: blob.decoded_size.into(),
            toc_size: tail.toc_size.into(),
            ci_compressor: (tail.ci_codec as u32).into(),
            ci_offset: tail.ci_offset.into(),
            ci_stored_size: tail.ci_stored_size.into(),
            ci_size: tail.ci_size.into(),
            toc_digest: tail.toc_digest.map_or([0; 32], |digest| digest.hash),
            meta_digest: tail.index.map_or([0; 32], |index| index.digest.hash),
            meta_size: tail.index.map_or(0, |index| index.size).into(),
            cipher_iv: 0.into(),
            cipher: 0.into(),
            reserved: [0; 36],
        }
    }
}

fn hex(blob: &Blob) -> [u8; 64] {
    blob.id.hex().as_bytes().try_into().expect("32 bytes are 64 hex digits")
}

/// Checks options and blobs. Returns the codec of the image, which all blobs share; only an image
/// of gzip or seekable layers may also have blobs with another codec.
fn validate(
    blobs: &[BlobRecord],
    options: &BootstrapOptions,
    origin: Origin,
) -> Result<Codec, FormatError> {
    let fail = |problem: Problem| Err(FormatError::new("blobs of a new bootstrap", 0, problem));
    let chunk_size = options.chunk_size;
    if !chunk_size.is_power_of_two() || !CHUNK_SIZES.contains(&chunk_size) {
        return fail(format!("chunk size {chunk_size}").into());
    }
    if blobs.len() > MAX_DEVICES {
        let (found, limit) = (blobs.len() as u64, MAX_DEVICES as u64);
        return fail(Problem::TooMany { what: "blobs", found, limit });
    }
    let chunks: u64 = blobs.iter().map(|record| record.blob.chunks.len() as u64).sum();
    if chunks > MAX_ROWS {
        return fail(Problem::TooMany { what: "chunks", found: chunks, limit: MAX_ROWS });
    }
    let gzip = blobs.iter().find(|record| record.blob.codec == Codec::Gzip);
    let codec = gzip.or(blobs.first()).map_or(Codec::Zstd, |record| record.blob.codec);
    let largest = largest_chunk(origin, chunk_size);
    for (index, BlobRecord { blob, tail }) in blobs.iter().enumerate() {
        if blob.codec != codec && codec != Codec::Gzip && origin != Origin::Seekable {
            return fail(
                format!("blob {index} is compressed with {}, not {codec}", blob.codec).into(),
            );
        }
        if tail.features & features::ALIGNED == 0 {
            return fail(format!("blob {index} has chunks that are not aligned to blocks").into());
        }
        if blob.id.algorithm != Algorithm::Sha256
            || blobs[..index].iter().any(|other| other.blob.id == blob.id)
        {
            return fail(
                format!("blob {index}: {} is not SHA-256, or not the first", blob.id).into(),
            );
        }
        // Foreign blobs may list only the chunks in use.
        if blob.chunks.is_empty() {
            return fail(format!("blob {index} has no chunks").into());
        }
        validate_order(blob, &blob.chunks)
            .map_err(|problem| FormatError::new(("blob", index), 0, problem))?;
        for chunk in &blob.chunks {
            validate_chunk(chunk, blob, tail, largest)
                .map_err(|problem| FormatError::new(("blob", index), 0, problem))?;
            let expected = match origin {
                Origin::V5 | Origin::V6 => options.digest,
                Origin::Seekable => blob.chunks[0].digest.algorithm,
            };
            if chunk.digest.algorithm != expected {
                return fail(format!("blob {index}: chunk digest {}", chunk.digest).into());
            }
        }
    }
    Ok(codec)
}

/// Rows sorted as upstream sorts them: by digest, then by blob.
fn chunk_table(
    blobs: &[BlobRecord],
    plan: &Plan<'_>,
    options: &BootstrapOptions,
) -> Vec<ChunkEntry> {
    // Where the first file that uses a chunk has it; 0 for chunks that no file uses any more.
    let mut offsets: Vec<Vec<Option<u64>>> =
        blobs.iter().map(|record| vec![None; record.blob.chunks.len()]).collect();
    let row = |blob: &Blob, number: u32| {
        // Mostly no number is missing.
        let at = number as usize;
        match blob.chunks.get(at) {
            Some(chunk) if chunk.number == number => Some(at),
            _ => blob.chunks.binary_search_by_key(&number, |chunk| chunk.number).ok(),
        }
    };
    for inode in &plan.inodes {
        let Content::Chunks(_, indexes) = &inode.content else { continue };
        for (at, index) in indexes.iter().enumerate() {
            let number = u32::from(index.number_high) << 16 | u32::from(index.number_low.get());
            let blob = usize::from(index.device - 1);
            if let Some(row) = blobs.get(blob).and_then(|record| row(&record.blob, number)) {
                offsets[blob][row].get_or_insert(at as u64 * u64::from(options.chunk_size));
            }
        }
    }
    let in_context = |blob: usize| blobs[blob].tail.has_contexts();
    let entry = |blob: usize, row: usize, chunk: &Chunk| ChunkEntry {
        digest: chunk.digest.hash,
        blob: (blob as u32).into(),
        flags: match chunk.part {
            Some(_) => chunk_flags::COMPRESSED | chunk_flags::BATCH,
            None if chunk.is_compressed() || in_context(blob) => chunk_flags::COMPRESSED,
            None => 0,
        }
        .into(),
        stored_size: chunk.stored_size.into(),
        decoded_size: chunk.decoded_size.into(),
        stored: chunk.stored.0.into(),
        decoded: chunk.decoded.0.into(),
        file_offset: match chunk.part {
            Some(part) => layout::in_unit(part),
            None => offsets[blob][row].unwrap_or(0),
        }
        .into(),
        number: chunk.number.into(),
        crc32c: 0.into(),
    };
    let mut table: Vec<ChunkEntry> = blobs
        .iter()
        .enumerate()
        .flat_map(|(index, record)| {
            let rows = record.blob.chunks.iter().enumerate();
            rows.map(move |(row, chunk)| (index, row, chunk))
        })
        .map(|(index, row, chunk)| entry(index, row, chunk))
        .collect();
    table.sort_by_key(|entry| (entry.digest, entry.blob.get(), entry.number.get()));
    table
}
