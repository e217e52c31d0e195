use lazuli_sys::fanotify::{INFO_RANGE, PRE_ACCESS, QUEUE_OVERFLOW};
use proptest::prelude::*;

use super::abi::{AbiError, Event, parse};

/// An event as the kernel writes it, with the records given.
fn event(mask: u64, records: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend((24 + records.len() as u32).to_ne_bytes());
    bytes.extend([3, 0]);
    bytes.extend(24_u16.to_ne_bytes());
    bytes.extend(mask.to_ne_bytes());
    bytes.extend(9_i32.to_ne_bytes());
    bytes.extend(4711_i32.to_ne_bytes());
    bytes.extend(records);
    bytes
}

fn record(kind: u8, len: u16, offset: u64, count: u64) -> Vec<u8> {
    let mut bytes = vec![kind, 0];
    bytes.extend(len.to_ne_bytes());
    bytes.extend([0; 4]);
    bytes.extend(offset.to_ne_bytes());
    bytes.extend(count.to_ne_bytes());
    bytes
}

fn range(offset: u64, count: u64) -> Vec<u8> {
    record(INFO_RANGE, 24, offset, count)
}

#[test]
fn reads_what_the_kernel_writes() {
    let expected = Event::PreAccess { offset: 4096, count: 131_072, thread: 4711 };
    assert_eq!(parse(&event(PRE_ACCESS, &range(4096, 131_072))), Ok(expected));
    let unknown_first = [&[200, 0, 8, 0, 1, 2, 3, 4][..], &range(4096, 131_072)].concat();
    assert_eq!(parse(&event(PRE_ACCESS, &unknown_first)), Ok(expected));
    assert_eq!(parse(&event(QUEUE_OVERFLOW, &[])), Ok(Event::Overflow));
}

#[test]
fn requests_without_an_answer_are_refused() {
    let good = event(PRE_ACCESS, &range(0, 1));
    for len in 0..good.len() {
        assert!(parse(&good[..len]).is_err(), "first {len} bytes");
    }
    let with = |at: usize, value: &[u8]| {
        let mut bytes = good.clone();
        bytes[at..at + value.len()].copy_from_slice(value);
        bytes
    };
    for (what, bytes, expected) in [
        ("version", with(4, &[4]), AbiError::Version(4)),
        ("event length", with(0, &1000_u32.to_ne_bytes()), AbiError::Short(48)),
        ("metadata length", with(6, &1000_u16.to_ne_bytes()), AbiError::Length(1000)),
        ("small metadata", with(6, &8_u16.to_ne_bytes()), AbiError::Length(8)),
        ("mask", event(1, &[]), AbiError::Mask(1)),
        ("no range", event(PRE_ACCESS, &[]), AbiError::Range),
        ("empty record", event(PRE_ACCESS, &record(200, 0, 0, 0)), AbiError::Length(0)),
        ("long record", event(PRE_ACCESS, &record(200, 25, 0, 0)), AbiError::Length(25)),
        ("overflow", event(PRE_ACCESS, &range(u64::MAX, 1)), AbiError::Range),
    ] {
        assert_eq!(parse(&bytes), Err(expected), "{what}");
    }
}

proptest! {
    #[test]
    fn any_bytes_are_an_event_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = parse(&bytes);
    }

    #[test]
    fn any_range_comes_back(offset in 0..u64::MAX / 2, count in 0..u64::MAX / 2) {
        let expected = Event::PreAccess { offset, count, thread: 4711 };
        prop_assert_eq!(parse(&event(PRE_ACCESS, &range(offset, count))), Ok(expected));
    }
}
