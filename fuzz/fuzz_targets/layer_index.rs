//! Errors are fine; panics, hangs and memory out of proportion are bugs. What is indexed can be
//! read where the index says.
//!
//! The input is a layer as stored: a tar, and then a file of an artifact that its first line names.
#![no_main]

use std::io::Cursor;

use lazuli_builder::index::{IndexLayer, index};
use lazuli_image::{
    Algorithm,
    codec::Decoder,
    rafs::{Bootstrap, ci_table_of, place_chunks},
};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let name = data.split(|byte| *byte == b'\n').next().unwrap_or_default();
    index_and_read(data, None);
    index_and_read(data, Some(String::from_utf8_lossy(name).into_owned()));
});

fn index_and_read(data: &[u8], file: Option<String>) {
    let layer = IndexLayer {
        digest: Algorithm::Sha256.digest(data),
        stored_size: data.len() as u64,
        file,
        source: Box::new(Cursor::new(data.to_vec())),
    };
    let scratch = std::path::Path::new("/dev/shm");
    let Ok(index) = index(vec![layer], scratch, 1, &()) else { return };
    let Some(layer) = index.layers.first().filter(|_| index.beside.is_empty()) else { return };
    let tail = layer.record.tail;
    // A layer without content is no blob of the image.
    let unplaced = Bootstrap::open(&index.bootstrap[..]).expect("it was written so");
    let tables = unplaced.unplaced().iter().map(|blob| {
        let stored = &layer.bytes[..tail.meta_end() as usize];
        (*blob, ci_table_of(stored, &tail).expect("it was written so"))
    });
    let placed =
        place_chunks(&index.bootstrap, &tables.collect::<Vec<_>>()).expect("it was written so");
    let mut bootstrap = index.bootstrap.clone();
    bootstrap[placed.at as usize..][..placed.table.len()].copy_from_slice(&placed.table);
    let mut bootstrap = Bootstrap::open(bootstrap).expect("it was written so");
    for (blob, points) in placed.points {
        bootstrap.set_points(blob, points).expect("it was written so");
    }
    let (mut decoder, mut buffer) = (Decoder::new(), Vec::new());
    for blob in bootstrap.blobs() {
        for chunk in &blob.chunks {
            let stored = &data[chunk.stored.0 as usize..chunk.stored_end().0 as usize];
            let unit = decoder.unit(&blob.unit(chunk), stored, &mut buffer).expect("it decodes");
            assert!(chunk.part_of(unit).is_some_and(|part| chunk.digest.matches(part)));
        }
    }
}
