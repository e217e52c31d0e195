//! The EROFS superblock, and the flags of the RAFS superblock.

use super::super::{layout::flags, v5::layout::is_v5};
use crate::{
    Algorithm, BLOCK_SIZE, FormatError, Problem, Structure,
    erofs::{
        layout::{
            BLOCK_BITS, COMPAT_RAFS_V6, DEVICE_SLOT, INCOMPAT_CHUNKED_FILE, INCOMPAT_DEVICE_TABLE,
            MAX_DEVICES, SUPERBLOCK_MAGIC, SUPERBLOCK_OFFSET, SuperBlock,
        },
        reader::structure,
    },
};

/// Parses and validates the superblock of EROFS.
pub(in crate::rafs) fn superblock(bytes: &[u8]) -> Result<SuperBlock, FormatError> {
    let object = || Structure::Only("superblock");
    let fail = |problem: Problem| Err(FormatError::new(object(), SUPERBLOCK_OFFSET, problem));
    if is_v5(bytes) {
        return Err(FormatError::new(object(), 0, "RAFS v5, expected v6"));
    }
    let sb: SuperBlock = structure(bytes, SUPERBLOCK_OFFSET, object)?;
    if sb.magic.get() != SUPERBLOCK_MAGIC {
        return fail(format!("magic {:#x}: not an EROFS image", sb.magic).into());
    }
    if sb.feature_compat.get() & COMPAT_RAFS_V6 == 0 {
        return fail("an EROFS image, but not a RAFS v6 bootstrap".into());
    }
    if sb.block_bits == 9 {
        let problem = "tarfs (blocks of 512 bytes, chunks without digests)";
        return fail(Problem::Unsupported(problem.into()));
    }
    let expected = INCOMPAT_CHUNKED_FILE | INCOMPAT_DEVICE_TABLE;
    if sb.feature_incompat.get() != expected {
        let found = sb.feature_incompat;
        return fail(format!("features {found:#x}, expected {expected:#x}").into());
    }
    let fixed = [
        ("block bits", u64::from(sb.block_bits), u64::from(BLOCK_BITS)),
        ("checksum", sb.checksum.get().into(), 0),
        ("extension slots", sb.extension_slots.into(), 0),
        ("shared xattr block", sb.xattr_block.get().into(), 0),
        ("compression algorithms", sb.compression.get().into(), 0),
        ("device slot", sb.device_slot.get().into(), DEVICE_SLOT.into()),
    ];
    for (field, found, expected) in fixed {
        if found != expected {
            return fail(format!("{field} {found}, expected {expected}").into());
        }
    }
    if usize::from(sb.device_count.get()) > MAX_DEVICES {
        let (found, limit) = (sb.device_count.get().into(), MAX_DEVICES as u64);
        return fail(Problem::TooMany { what: "blobs", found, limit });
    }
    if sb.root_nid.get() == 0 || sb.inode_count.get() == 0 {
        return fail("no root directory".into());
    }
    if !(bytes.len() as u64).is_multiple_of(BLOCK_SIZE) {
        let problem = format!("{} bytes are not a whole number of blocks", bytes.len());
        return Err(FormatError::new("bootstrap", 0, problem));
    }
    Ok(sb)
}

/// The chunk digest algorithm, if `bits` have nothing that is unsupported or contradictory.
pub(in crate::rafs) fn flags_digest(bits: u64) -> Result<Algorithm, Problem> {
    for (bit, what) in [
        (flags::TARFS, "tarfs, which has no digests of chunks,"),
        (flags::ENCRYPTION_AES, "encryption"),
        (!flags::KNOWN, "an unknown feature"),
    ] {
        if bits & bit != 0 {
            return Err(Problem::unsupported("flags", bits, what));
        }
    }
    let compressors = flags::COMPRESSOR_NONE
        | flags::COMPRESSOR_LZ4
        | flags::COMPRESSOR_GZIP
        | flags::COMPRESSOR_ZSTD;
    if (bits & compressors).count_ones() != 1 {
        return Err(format!("flags {bits:#x} do not name one compressor").into());
    }
    match bits & (flags::DIGEST_BLAKE3 | flags::DIGEST_SHA256) {
        flags::DIGEST_BLAKE3 => Ok(Algorithm::Blake3),
        flags::DIGEST_SHA256 => Ok(Algorithm::Sha256),
        _ => Err(format!("flags {bits:#x} do not name one digest").into()),
    }
}
