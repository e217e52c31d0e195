//! The decoder that finds points gives what another one gives, however its input is cut.
//!
//! The input is the sizes of pieces, stored and decoded, and a deflate stream.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some(([taken, given], stored)) = data.split_first_chunk() else { return };
    let cubed = |size: &u8| usize::from(*size).pow(3);
    lazuli_builder::fuzz::inflate(stored, cubed(taken), cubed(given));
});
