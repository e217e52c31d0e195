//! The bytes of a pre-content event, as `include/uapi/linux/fanotify.h` lays them out.
//!
//! ```text
//! struct fanotify_event_metadata          struct fanotify_event_info_range (type 6)
//!   0  u32 event_len  of everything         0  u8  info_type
//!   4  u8  vers       3                     1  u8  pad
//!   6  u16 metadata_len                     2  u16 len     of the record
//!   8  u64 mask                             4  u32 pad
//!  16  s32 fd         taken by `sys`        8  u64 offset
//!  20  s32 pid        its thread           16  u64 count
//! ```
//!
//! Pure: no descriptor, no allocation, no panic on any input.

use lazuli_sys::fanotify::{
    INFO_RANGE, INFO_RANGE_SIZE, METADATA_SIZE, METADATA_VERSION, PRE_ACCESS, QUEUE_OVERFLOW,
};

/// Smallest info record: its header.
const INFO_HEADER: usize = 4;

/// A parsed event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A reader waits for bytes of a file.
    PreAccess {
        /// First byte in the file.
        offset: u64,
        /// Number of bytes. `offset + count` does not overflow.
        count: u64,
        /// The reader's thread
        /// ([`Group::reports_threads`](lazuli_sys::fanotify::Group::reports_threads)), 0 when it is
        /// in a pid namespace that is not below ours.
        thread: i32,
    },
    /// Events were lost.
    Overflow,
}

/// Bytes that are not an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AbiError {
    /// Shorter than a length field in it.
    #[error("event of {0} bytes is cut short")]
    Short(usize),
    /// Another version of the interface than this program supports.
    #[error("event version {0}, expected 3")]
    Version(u8),
    /// A length that cannot be.
    #[error("event with an impossible length {0}")]
    Length(usize),
    /// Neither a read nor an overflow.
    #[error("event with unexpected mask {0:#x}")]
    Mask(u64),
    /// A read without a range, or with one that ends behind the largest offset.
    #[error("pre-access event without a usable range")]
    Range,
}

/// Reads one event.
pub fn parse(bytes: &[u8]) -> Result<Event, AbiError> {
    let short = AbiError::Short(bytes.len());
    let version = *bytes.get(4).ok_or(short)?;
    if version != METADATA_VERSION {
        return Err(AbiError::Version(version));
    }
    let event_len = u32::from_ne_bytes(field(bytes, 0).ok_or(short)?) as usize;
    let metadata_len = usize::from(u16::from_ne_bytes(field(bytes, 6).ok_or(short)?));
    let mask = u64::from_ne_bytes(field(bytes, 8).ok_or(short)?);
    let thread = i32::from_ne_bytes(field(bytes, 20).ok_or(short)?);
    let event = bytes.get(..event_len).ok_or(short)?;
    let mut records = event.get(metadata_len..).ok_or(AbiError::Length(metadata_len))?;
    if metadata_len < METADATA_SIZE {
        return Err(AbiError::Length(metadata_len));
    }
    if mask & QUEUE_OVERFLOW != 0 {
        return Ok(Event::Overflow);
    }
    if mask & PRE_ACCESS == 0 {
        return Err(AbiError::Mask(mask));
    }
    while !records.is_empty() {
        let len = u16::from_ne_bytes(field(records, 2).ok_or(AbiError::Length(records.len()))?);
        let len = usize::from(len);
        let record = records.get(..len).filter(|record| record.len() >= INFO_HEADER);
        let record = record.ok_or(AbiError::Length(len))?;
        if record[0] == INFO_RANGE && len >= INFO_RANGE_SIZE {
            let offset = u64::from_ne_bytes(field(record, 8).ok_or(AbiError::Range)?);
            let count = u64::from_ne_bytes(field(record, 16).ok_or(AbiError::Range)?);
            offset.checked_add(count).ok_or(AbiError::Range)?;
            return Ok(Event::PreAccess { offset, count, thread });
        }
        records = &records[len..];
    }
    Err(AbiError::Range)
}

fn field<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at.checked_add(N)?)?.try_into().ok()
}
