//! Invariant: no text panics the parser of containerd's filters, and an error names the filter.
#![no_main]

use lazuli_snapshotter::Filter;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    if let Err(error) = Filter::parse(text) {
        let shown: String = text.chars().take(200).collect();
        assert!(error.to_string().contains(&shown), "{error}");
    }
});
