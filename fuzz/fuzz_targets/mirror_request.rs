//! What a client of the mirror sends. Errors are fine; panics are bugs.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| lazuli_mirror::fuzz::request(text));
