//! Errors are fine; panics are bugs, and so is a trace that does not survive being written and read
//! again.
#![no_main]

use lazuli_image::Trace;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    if let Ok(trace) = Trace::decode(data) {
        assert_eq!(Trace::decode(&trace.encode()).as_ref(), Ok(&trace));
    }
});
