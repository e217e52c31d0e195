//! Errors are fine; panics, hangs and memory out of proportion are bugs. What is translated is
//! sound.
#![no_main]

use lazuli_image::rafs::{Bootstrap, check, v5};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Ok(translated) = v5::translate(data) else { return };
    let bootstrap = Bootstrap::open(translated).expect("what is translated can be opened");
    check(&bootstrap).expect("what is translated is sound");
});
