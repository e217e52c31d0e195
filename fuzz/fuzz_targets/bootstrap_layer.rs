//! A layer with a bootstrap, compressed. Errors are fine; panics, hangs and memory out of
//! proportion are bugs.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| lazuli_runtime::fuzz::bootstrap_layer(data));
