//! Messages between keeper and worker. Errors are fine; panics and hangs are bugs.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| lazuli_runtime::fuzz::message(data));
