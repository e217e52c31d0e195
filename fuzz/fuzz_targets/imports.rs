//! Scripts, modules, boot files and archives as the guess reads them. Whatever they say, panics are
//! bugs.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| lazuli_runtime::fuzz::imports(data));
