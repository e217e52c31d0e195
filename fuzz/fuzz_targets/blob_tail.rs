//! Errors are fine; panics, hangs and memory out of proportion are bugs.
//!
//! The input is a record in 24 bytes (features, number of chunks, stored bytes of the CI table,
//! codecs, place of the CI table, its decoded bytes; see `seeds`), then a tail.
#![no_main]

use lazuli_image::{
    Algorithm, Blob, Codec,
    rafs::{BlobRecord, TailInfo, check_blob},
};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((head, tail)) = data.split_at_checked(24) else { return };
    let word = |at: usize| u32::from_le_bytes(head[at..at + 4].try_into().expect("4 bytes"));
    let codec = |number: u32| Codec::from_number(number & 0xff).unwrap_or(Codec::Lz4);
    // Bounded so that the fuzzer's own memory limit is not what fails.
    let chunk_count = word(4) % 0x1_0000;
    let record = BlobRecord {
        blob: Blob {
            id: Algorithm::Sha256.digest(tail),
            codec: codec(word(12)),
            points: Default::default(),
            stored_size: u64::MAX,
            decoded_size: u64::MAX,
            chunks: Default::default(),
        },
        tail: TailInfo {
            features: word(0),
            chunk_count,
            ci_offset: word(16).into(),
            ci_stored_size: word(8).into(),
            ci_size: (word(20) % 0x40_0000).into(),
            ci_codec: codec(word(12) >> 8),
            toc_size: 0,
            toc_digest: None,
            index: None,
        },
    };
    let _ = check_blob(tail, &record);
});
