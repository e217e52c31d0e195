//! Errors are fine; panics are bugs, and so is a read that overflows.
#![no_main]

use lazuli_runtime::kernel::loop_devices::abi::{MOST, Request, numbers, parse};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let _ = numbers(data);
    if let Ok(Request::Read { offset, size }) = parse(data) {
        assert!(size <= MOST && offset.checked_add(size.into()).is_some());
    }
});
