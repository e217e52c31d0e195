//! Headers of registries: challenges and links. Errors are fine; panics are bugs.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &str| lazuli_registry::fuzz::headers(data));
