//! Programs and settings as the guess reads them. Errors are fine; panics are bugs, and so is a
//! part of the file that is none.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    lazuli_runtime::fuzz::elf(data);
    lazuli_runtime::fuzz::constants(data);
    lazuli_runtime::fuzz::settings(data);
});
