//! Errors are fine; panics, hangs and memory out of proportion are bugs.
//!
//! The input is the end of an eStargz layer, a member or a frame with a table of contents, or the
//! frames of a chunk.
#![no_main]

use lazuli_image::{
    Algorithm, Blob, Chunk, Codec, Decoded, Points, Stored,
    chunk::Part,
    codec::Decoder,
    seekable::{FrameDigest, footer, toc_of_frame, toc_of_member},
};
use libfuzzer_sys::fuzz_target;

/// Decoded bytes that are asked for.
const SIZE: u32 = 64 << 10;

fuzz_target!(|data: &[u8]| {
    let digest = Algorithm::Sha256.digest(data);
    let _ = footer(data, digest);
    let _ = toc_of_member(data, digest, digest);
    let _ = toc_of_frame(data, SIZE.into(), FrameDigest::Stored(digest), digest);
    let blob = Blob {
        id: digest,
        codec: Codec::ZstdLayer,
        points: Points::default(),
        stored_size: data.len() as u64,
        decoded_size: SIZE.into(),
        chunks: Default::default(),
    };
    let chunk = Chunk {
        number: 0,
        digest,
        stored: Stored(0),
        stored_size: data.len() as u32,
        decoded: Decoded(0),
        decoded_size: SIZE,
        part: Some(Part { offset: 0, size: SIZE }),
    };
    let _ = Decoder::new().unit(&blob.unit(&chunk), data, &mut Vec::new());
});
