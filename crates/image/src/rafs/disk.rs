//! Images as one disk: the bootstrap, and each decoded blob at the address in the device table.
//!
//! EROFS reads such a disk without being told of other devices (Linux 6.4 and later).

use super::{Bootstrap, layout::DEVICE_TABLE_OFFSET};
use crate::{
    BLOCK_SIZE, FormatError,
    erofs::{
        layout::{DEVICE_SLOT_SIZE, DeviceSlot},
        reader::structure,
    },
};

impl<B: AsRef<[u8]>> Bootstrap<B> {
    /// The address of each blob on one disk that begins with the bootstrap, in bytes. Checked: they
    /// ascend, and nothing overlaps.
    ///
    /// # Errors
    /// The device table lacks addresses, as some writers leave them out.
    pub fn disk_addresses(&self) -> Result<Vec<u64>, FormatError> {
        let (mut addresses, mut end) = (Vec::new(), self.bytes().len() as u64);
        for (index, blob) in self.blobs().iter().enumerate() {
            let at = DEVICE_TABLE_OFFSET + index as u64 * DEVICE_SLOT_SIZE;
            let slot: DeviceSlot = structure(self.bytes(), at, || ("device slot", index).into())?;
            let address = u64::from(slot.mapped_block.get()) * BLOCK_SIZE;
            if address < end {
                let problem = format!("address {address:#x} on a disk, expected {end:#x} or more");
                return Err(FormatError::new(("device slot", index), at, problem));
            }
            addresses.push(address);
            end = address + blob.decoded_size.next_multiple_of(BLOCK_SIZE);
        }
        Ok(addresses)
    }
}
