//! What signatures come in: payloads, bundles with envelopes and statements, manifests under
//! cosign's tags, log entries, keys. Errors are fine; panics are bugs.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| lazuli_policy::fuzz::documents(data));
