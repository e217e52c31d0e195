//! Errors are fine; panics are bugs, and so is a read that overflows.
#![no_main]

use lazuli_runtime::kernel::loop_devices::abi::{BlobRequest, MOST, numbers, parse};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let _ = numbers(data);
    if let Ok(BlobRequest::Read { offset, size }) = parse(data) {
        assert!(size <= MOST && offset.checked_add(size.into()).is_some());
    }
});
