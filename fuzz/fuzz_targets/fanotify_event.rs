//! Errors are fine; panics are bugs, and so is a range that overflows.
#![no_main]

use lazuli_runtime::kernel::fanotify::abi::{Event, parse};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    if let Ok(Event::PreAccess { offset, count, .. }) = parse(data) {
        assert!(offset.checked_add(count).is_some());
    }
});
