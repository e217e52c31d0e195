//! The control groups of a reader. Not finding a container is fine; panics are bugs.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|groups: &str| lazuli_runtime::fuzz::container_groups(groups));
