//! policy.toml. Errors are fine; panics are bugs.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| lazuli_policy::fuzz::policy(data));
