//! What a client of the metrics sends. Errors are fine; panics are bugs.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| lazuli_metrics::fuzz::request(bytes));
