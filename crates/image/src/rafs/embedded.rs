//! Bootstraps inside the blob that they describe, as upstream's converter makes them of single
//! layers.
//!
//! Such a bootstrap cannot have the id of its blob, which is a digest of the bootstrap, too: a
//! placeholder has its place, in the device slot and in the blob table, until a tool that knows
//! the id takes the bootstrap out.

use zerocopy::FromBytes;

use super::{
    layout::{
        BlobEntry, DEVICE_TABLE_OFFSET, EMBEDDED_ID, EXTENDED_OFFSET, ExtendedSuperBlock, features,
    },
    tables::superblock,
};
use crate::{
    Digest, FormatError, Problem, Structure,
    erofs::{
        layout::{DEVICE_SLOT_SIZE, DeviceSlot},
        reader::structure,
    },
};

/// Puts the placeholder in place of the id of a blob.
pub(super) fn forget_id(bootstrap: &mut [u8], id: &Digest) -> Result<(), FormatError> {
    rename(bootstrap, id.hex().as_bytes(), &EMBEDDED_ID, |_| {})
}

/// Gives the blob that `bootstrap` was embedded in its id. Other bootstraps stay unchanged.
///
/// # Errors
/// The superblocks are not those of a RAFS v6 bootstrap, or the tables are not inside of it.
pub fn set_id(bootstrap: &mut [u8], id: &Digest) -> Result<(), FormatError> {
    rename(bootstrap, &EMBEDDED_ID, id.hex().as_bytes(), |entry| {
        entry.features = (entry.features.get() & !features::INLINED_FS_META).into();
    })
}

/// Changes the id of a blob wherever it stands.
fn rename(
    bootstrap: &mut [u8],
    from: &[u8],
    to: &[u8],
    change: impl Fn(&mut BlobEntry),
) -> Result<(), FormatError> {
    let count = superblock(bootstrap)?.device_count.get();
    let object = || Structure::Only("extended superblock");
    let ext: ExtendedSuperBlock = structure(bootstrap, EXTENDED_OFFSET, object)?;
    let table = ext.blob_table_offset.get();
    for index in 0..u64::from(count) {
        let at = table.saturating_add(index * size_of::<BlobEntry>() as u64);
        let entry: &mut BlobEntry = place(bootstrap, at, "blob table entry", index)?;
        if entry.id != from {
            continue;
        }
        entry.id.copy_from_slice(to);
        change(entry);
        let at = DEVICE_TABLE_OFFSET + index * DEVICE_SLOT_SIZE;
        let slot: &mut DeviceSlot = place(bootstrap, at, "device slot", index)?;
        slot.tag.copy_from_slice(to);
    }
    Ok(())
}

/// A structure, to change it.
fn place<'a, T: FromBytes + zerocopy::IntoBytes + zerocopy::KnownLayout + zerocopy::Unaligned>(
    bytes: &'a mut [u8],
    at: u64,
    object: &'static str,
    index: u64,
) -> Result<&'a mut T, FormatError> {
    let available = bytes.len() as u64;
    let found =
        usize::try_from(at).ok().and_then(|at| bytes.get_mut(at..)?.get_mut(..size_of::<T>()));
    found.and_then(|found| T::mut_from_bytes(found).ok()).ok_or_else(|| {
        let problem = Problem::OutOfBounds { len: size_of::<T>() as u64, available };
        FormatError::new((object, index), at, problem)
    })
}
