//! Errors are fine; panics, hangs and memory out of proportion are bugs, and so is an image of an
//! index that no reader accepts.
//!
//! The input is the index of a layer, with its skeleton.
#![no_main]

use lazuli_builder::index::{KnownLayer, assemble, diff_id};
use lazuli_image::{
    Algorithm, Chunk,
    rafs::{Bootstrap, ReadIndex},
};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let digest = Algorithm::Sha256.digest(b"layer");
    let Ok(read) = ReadIndex::parse(data, digest, 1 << 20) else { return };
    // A chunk of 16 MiB takes a few bytes.
    if read.starts.last().is_none_or(|start| *start < 64 << 20) {
        let _ = diff_id(&read, |_: &Chunk, _: &mut [u8]| Ok(()));
        for file in [None, Some("file".to_owned())] {
            let (stored_size, diff_id, index) = (1 << 20, digest, data.to_vec());
            let layer = KnownLayer { digest, stored_size, diff_id, file, index };
            if let Ok(made) = assemble(vec![layer]) {
                Bootstrap::open(made.bootstrap).unwrap();
            }
        }
    }
});
