//! Errors are fine; panics, hangs and memory out of proportion are bugs, and so is a thin window
//! with which something else is decoded.
//!
//! The input is a table of points; or bits, the byte before and the size of a window in 4 bytes,
//! the window, and what is to be decoded from there.
#![no_main]

use std::sync::Arc;

use lazuli_image::{
    Blob, Chunk, Codec, Decoded, Digest, Points, Stored, chunk::Part, codec::Decoder, gzip,
    points::NewPoint,
};
use libfuzzer_sys::fuzz_target;

/// Decoded bytes that are asked for.
const SIZE: u32 = 64 << 10;

fuzz_target!(|data: &[u8]| {
    let _ = gzip::header(data);
    if let Ok(points) = Points::parse(Arc::new(data.to_vec())) {
        let _ = (0..u64::from(u16::MAX))
            .filter_map(|stored| points.at(Stored(stored)))
            .map(|point| point.window())
            .count();
    }
    let Some(([bits, before, low, high], rest)) = data.split_first_chunk() else { return };
    let size = usize::from(u16::from_le_bytes([*low, *high])) % 0x8001;
    let Some((window, stored)) = rest.split_at_checked(size) else { return };
    let point =
        NewPoint { stored: Stored(0), bits: bits % 8, before: *before, window: window.to_vec() };
    let thin = lazuli_builder::fuzz::thin_window(&point, stored, SIZE as usize);
    let whole = decode(point.clone(), stored);
    if let (Some(whole), Some(window)) = (whole, thin) {
        assert!(decode(NewPoint { window, ..point }, stored) == Some(whole));
    }
});

fn decode(point: NewPoint, stored: &[u8]) -> Option<Vec<u8>> {
    let blob = Blob {
        id: Digest::sha256([0; 32]),
        codec: Codec::Gzip,
        points: [point].into_iter().collect(),
        stored_size: stored.len() as u64,
        decoded_size: SIZE.into(),
        chunks: Default::default(),
    };
    let chunk = Chunk {
        number: 0,
        digest: blob.id,
        stored: Stored(0),
        stored_size: stored.len() as u32,
        decoded: Decoded(0),
        decoded_size: SIZE,
        part: Some(Part { offset: 0, size: SIZE }),
    };
    let mut buffer = Vec::new();
    Decoder::new().unit(&blob.unit(&chunk), stored, &mut buffer).ok().map(<[u8]>::to_vec)
}
