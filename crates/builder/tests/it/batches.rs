//! Small files that are compressed together.

use std::{collections::HashSet, fs, path::Path};

use lazuli_builder::{
    Built, Layer, Options,
    bake::{Hot, HotBlob, hot_first, optimize},
    build, merge,
};
use lazuli_image::{
    Algorithm, Blob, BlobIndex, ChunkRef, Codec, Digest, Trace,
    compare::compare,
    rafs::{Bootstrap, check, check_blob},
};

use crate::{
    images::{CHUNK_SIZE, Image, noise, open, options},
    tarball::{Tar, layer},
};

const BATCH: u32 = CHUNK_SIZE;

fn text(number: usize) -> Vec<u8> {
    format!("line {number} of a small file\n").repeat(1 + number % 40).into_bytes()
}

/// Two layers with small files. The upper one repeats many files of the lower one.
fn layers() -> Vec<Layer> {
    let mut low = Tar::default().file("big", &noise(1, 30_000));
    let mut high = Tar::default().file("other", &noise(2, 30_000));
    for number in 0..400 {
        low = low.file(&format!("low/{number}"), &text(number * 3));
        high = high.file(&format!("high/{number}"), &text(number * 2));
    }
    vec![layer("low", low.end()), layer("high", high.end())]
}

fn batched(scratch: &Path, codec: Codec, threads: usize) -> Built {
    let options = Options { batch_size: BATCH, ..options(scratch, codec, threads) };
    build(layers(), &options, &()).unwrap()
}

fn shows_its_source(image: &Image) {
    let source = merge(layers(), CHUNK_SIZE, Algorithm::Blake3, 2, &()).unwrap();
    assert_eq!(compare(image, &source, 10), []);
}

#[test]
fn images_have_the_content_of_their_layers() {
    let scratch = tempfile::tempdir().unwrap();
    for codec in [Codec::Zstd, Codec::Lz4, Codec::None] {
        let built = batched(scratch.path(), codec, 2);
        shows_its_source(&open(&built));
        for blob in &built.blobs {
            let stored = fs::read(blob.file.as_ref().unwrap()).unwrap();
            let record = &blob.record;
            check_blob(&stored[record.tail.ci_offset as usize..], record).unwrap();
            let in_batches = record.blob.chunks.iter().filter(|chunk| chunk.part.is_some());
            assert!(in_batches.clone().count() > 100);
            let sizes: HashSet<_> = in_batches.map(|chunk| chunk.unit_size()).collect();
            assert!(sizes.iter().all(|size| *size <= BATCH));
        }
    }
    let alone = build(layers(), &options(scratch.path(), Codec::Zstd, 2), &()).unwrap();
    let built = batched(scratch.path(), Codec::Zstd, 2);
    assert!(built.report.stored_bytes + 5000 < alone.report.stored_bytes);
}

/// Even when an upper layer is faster than the lower one with the same files.
#[test]
fn the_same_input_gives_the_same_bytes() {
    let scratch = tempfile::tempdir().unwrap();
    let make = |threads| {
        let built = batched(scratch.path(), Codec::Zstd, threads);
        let blobs: Vec<Vec<u8>> =
            built.blobs.iter().map(|blob| fs::read(blob.file.as_ref().unwrap()).unwrap()).collect();
        (built.bootstrap.clone(), blobs)
    };
    let first = make(1);
    for threads in [1, 2, 2, 2, 3, 8] {
        assert!(make(threads) == first, "{threads} threads");
    }
}

#[test]
fn hot_chunks_leave_their_batches() {
    let scratch = tempfile::tempdir().unwrap();
    let built = batched(scratch.path(), Codec::Zstd, 2);
    let before: Vec<Blob> = built.blobs.iter().map(|blob| blob.record.blob.clone()).collect();
    let ids: Vec<Digest> = before.iter().map(|blob| blob.id).collect();
    let touched = (0..40_u32).flat_map(|at| [(0, 5 + at * 4, at), (1, 200 - at * 3, at)]);
    let hot = Hot::of(&Trace::of_start(ids, touched), &before);
    assert_eq!(hot.chunks.len(), 80);
    let content = |blobs: &[Blob], chunk: &ChunkRef| {
        blobs[usize::from(chunk.blob.0)].chunk(chunk.number).unwrap().digest
    };
    let stored: Vec<_> =
        built.blobs.iter().map(|blob| fs::read(blob.file.as_ref().unwrap()).unwrap()).collect();

    // In a blob of their own, all others as they are.
    let mut own = HotBlob::create(scratch.path(), Codec::Zstd).unwrap();
    for place in &hot.chunks {
        let blob = usize::from(place.blob.0);
        let chunk = before[blob].chunk(place.number).unwrap();
        let bytes = &stored[blob][chunk.stored.0 as usize..chunk.stored_end().0 as usize];
        own.add(&before[blob], chunk, bytes).unwrap();
    }
    let own = own.finish().unwrap();
    assert!(own.record.blob.chunks.iter().all(|chunk| chunk.part.is_none()));
    let old = Bootstrap::open(&built.bootstrap[..]).unwrap();
    let optimized = optimize(&old, &hot, &own).unwrap();
    check(&Bootstrap::open(&optimized.bootstrap[..]).unwrap()).unwrap();

    // At the beginning of their blobs, and the rest of their batches stays together.
    let wanted: Vec<_> = hot.chunks.iter().map(|chunk| content(&before, chunk)).collect();
    let first = hot_first(built, &hot).unwrap();
    let image = open(&first);
    shows_its_source(&image);
    for (at, blob) in image.blobs.iter().enumerate() {
        let mine =
            hot.chunks.iter().zip(&wanted).filter(|(chunk, _)| chunk.blob == BlobIndex(at as u8));
        let mine: Vec<_> = mine.map(|(_, digest)| *digest).collect();
        let (front, rest) = blob.chunks.split_at(mine.len());
        assert!(front.iter().all(|chunk| chunk.part.is_none()));
        assert!(front.iter().map(|chunk| chunk.digest).eq(mine));
        assert!(rest.iter().filter(|chunk| chunk.part.is_some()).count() > 100);
    }
}

/// A hole is one chunk of zeros, however large it is.
#[test]
fn holes_of_sparse_files_cost_nothing() {
    let scratch = tempfile::tempdir().unwrap();
    let size = 256 << 20_u64;
    let records: &[(&str, &[u8])] =
        &[("GNU.sparse.size", b"268435456"), ("GNU.sparse.map", b"0,4,268435452,4")];
    let sparse = || {
        let tar = Tar::default().pax(b'x', records).file("sparse", b"headtail").end();
        vec![layer("sparse", tar)]
    };
    let options = Options { chunk_size: 1 << 20, ..options(scratch.path(), Codec::Zstd, 2) };
    let built = build(sparse(), &options, &()).unwrap();
    let report = &built.report;
    assert_eq!((report.content_bytes, report.chunks, report.distinct_chunks), (size, 256, 3));
    // Three chunks, and the tail of the blob.
    assert!(report.stored_bytes < 10_000, "{report:?}");
    open(&built);
}
