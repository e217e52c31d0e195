//! Hot chunks: where they are afterwards, and that nothing else changes.

use std::{collections::HashSet, fs, path::Path};

use lazuli_builder::{
    BuildError, Built,
    bake::{Hot, HotBlob, Optimized, hot_first, optimize},
    build, merge,
};
use lazuli_image::{
    Algorithm, Blob, BlobIndex, ChunkRef, Codec, Digest, Kind, Trace,
    compare::{Content, compare},
    rafs::{Bootstrap, check},
};

use crate::images::{CHUNK_SIZE, Image, layers, open, options};

fn plain(scratch: &Path) -> Built {
    build(layers(), &options(scratch, Codec::Zstd, 2), &()).unwrap()
}

fn blobs(built: &Built) -> Vec<Blob> {
    built.blobs.iter().map(|blob| blob.record.blob.clone()).collect()
}

/// A trace of some chunks of every blob, from the back to the front, one of them twice; with a
/// chunk that no blob has, and a chunk of a foreign blob.
fn trace(blobs: &[Blob]) -> Trace {
    let mut ids: Vec<Digest> = blobs.iter().map(|blob| blob.id).collect();
    let mut touched = Vec::new();
    for (blob, index) in blobs.iter().zip(0..) {
        let count = blob.chunks.len() as u32;
        let some = (0..count).rev().step_by(2).take(5);
        touched.extend(some.map(|number| (index, number, 0)));
    }
    touched.push(touched[0]);
    touched.push((0, 1 << 20, 7));
    ids.push(Digest::sha256([1; 32]));
    touched.push((blobs.len() as u8, 0, 8));
    Trace::of_start(ids, touched)
}

fn digests(blobs: &[Blob], chunks: &[ChunkRef]) -> Vec<Digest> {
    let digest =
        |chunk: &ChunkRef| blobs[usize::from(chunk.blob.0)].chunk(chunk.number).unwrap().digest;
    chunks.iter().map(digest).collect()
}

fn shows_its_source(image: &Image) {
    let source = merge(layers(), CHUNK_SIZE, Algorithm::Blake3, 2, &()).unwrap();
    assert_eq!(compare(image, &source, 10), []);
}

/// The content of the files in the prefetch table.
fn prefetched(bootstrap: &Bootstrap<&[u8]>) -> HashSet<Digest> {
    let chunks = bootstrap.prefetch().iter().flat_map(|file| bootstrap.chunks(*file).unwrap());
    let chunks: Vec<_> = chunks.map(|chunk| chunk.unwrap().0).collect();
    digests(bootstrap.blobs(), &chunks).into_iter().collect()
}

#[test]
fn hot_chunks_come_first_in_each_blob() {
    let scratch = tempfile::tempdir().unwrap();
    let bake = || {
        let built = plain(scratch.path());
        let before = blobs(&built);
        let hot = Hot::of(&trace(&before), &before);
        assert_eq!(hot.unknown, 2);
        let content = digests(&before, &hot.chunks);
        (hot_first(built, &hot).unwrap(), before, hot, content)
    };
    let (built, before, hot, content) = bake();
    let image = open(&built);
    shows_its_source(&image);
    let mut expected = content.iter();
    for (position, blob) in built.blobs.iter().enumerate() {
        let mine =
            hot.chunks.iter().filter(|chunk| chunk.blob == BlobIndex(position as u8)).count();
        assert!(mine > 0);
        let chunks = &blob.record.blob.chunks;
        assert_eq!(blob.hot_bytes, Some(chunks[mine - 1].stored_end().0));
        assert!(
            chunks[..mine]
                .iter()
                .map(|chunk| chunk.digest)
                .eq(expected.by_ref().take(mine).copied())
        );
        assert_eq!(chunks.len(), before[position].chunks.len());
        assert_eq!(before[position].stored_size > 0, blob.record.blob.stored_size > 0);
    }
    let bootstrap = Bootstrap::open(&built.bootstrap[..]).unwrap();
    let used = |digest: &&Digest| !unused(&image).contains(digest);
    assert!(content.iter().filter(used).all(|hot| prefetched(&bootstrap).contains(hot)));
    // The same once more.
    let (again, ..) = bake();
    assert!(again.bootstrap == built.bootstrap);
    for (one, other) in again.blobs.iter().zip(&built.blobs) {
        assert!(
            fs::read(one.file.as_ref().unwrap()).unwrap()
                == fs::read(other.file.as_ref().unwrap()).unwrap()
        );
    }
    drop((built, again));
    assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 0);
}

/// Chunks that no file uses any more.
fn unused(image: &Image) -> HashSet<Digest> {
    let mut all: HashSet<Digest> =
        image.blobs.iter().flat_map(|blob| &blob.chunks).map(|chunk| chunk.digest).collect();
    for id in 0..image.tree.len() as u32 {
        if let Kind::Regular { chunks, .. } = &image.tree[lazuli_image::InodeId(id)].kind {
            for chunk in chunks {
                all.remove(&image.chunk(*chunk).unwrap().0);
            }
        }
    }
    all
}

#[test]
fn without_hot_chunks_nothing_changes() {
    let scratch = tempfile::tempdir().unwrap();
    let built = plain(scratch.path());
    let (bootstrap, before) = (built.bootstrap.clone(), blobs(&built));
    let baked = hot_first(built, &Hot { chunks: Vec::new(), unknown: 0 }).unwrap();
    assert!(baked.bootstrap == bootstrap && blobs(&baked) == before);
}

/// The image with another blob, read from these files.
fn with_hot_blob(
    scratch: &Path,
    bootstrap: &[u8],
    stored: &[Vec<u8>],
    trace: &Trace,
) -> (Optimized, Blob, Vec<u8>) {
    let bootstrap = Bootstrap::open(bootstrap).unwrap();
    let hot = Hot::of(trace, bootstrap.blobs());
    let mut writer = HotBlob::create(scratch, Codec::Zstd).unwrap();
    for chunk in &hot.chunks {
        let position = usize::from(chunk.blob.0);
        let blob = &bootstrap.blobs()[position];
        let chunk = blob.chunk(chunk.number).unwrap();
        let bytes = &stored[position][chunk.stored.0 as usize..chunk.stored_end().0 as usize];
        writer.add(blob, chunk, bytes).unwrap();
    }
    let blob = writer.finish().unwrap();
    let optimized = optimize(&bootstrap, &hot, &blob).unwrap();
    let record = blob.record.blob.clone();
    assert_eq!(blob.hot_bytes, record.chunks.last().map(|last| last.stored_end().0));
    (optimized, record, fs::read(blob.file.as_ref().unwrap()).unwrap())
}

#[test]
fn a_hot_blob_leaves_the_others_alone() {
    let scratch = tempfile::tempdir().unwrap();
    let built = plain(scratch.path());
    let stored: Vec<_> =
        built.blobs.iter().map(|blob| fs::read(blob.file.as_ref().unwrap()).unwrap()).collect();
    let before = blobs(&built);
    let all = trace(&before);
    let (optimized, hot, content) = with_hot_blob(scratch.path(), &built.bootstrap, &stored, &all);
    let expected = digests(&before, &Hot::of(&all, &before).chunks);
    assert!(hot.chunks.iter().map(|chunk| chunk.digest).eq(expected.iter().copied()));
    assert!(hot.id.matches(&content));
    let bootstrap = Bootstrap::open(&optimized.bootstrap[..]).unwrap();
    check(&bootstrap).unwrap();
    let image = Image { tree: bootstrap.tree().unwrap(), blobs: bootstrap.blobs().to_vec() };
    shows_its_source(&image);
    assert_eq!(image.blobs[..before.len()], before, "old blobs are reused");
    assert_eq!(image.blobs[before.len()..], [hot]);
    let expected: HashSet<_> = expected.into_iter().collect();
    for id in 0..image.tree.len() as u32 {
        let Kind::Regular { chunks, .. } = &image.tree[lazuli_image::InodeId(id)].kind else {
            continue;
        };
        for chunk in chunks {
            let is_hot = expected.contains(&image.chunk(*chunk).unwrap().0);
            assert_eq!(is_hot, usize::from(chunk.blob.0) == before.len());
        }
    }
    let used = |digest: &&Digest| !unused(&image).contains(digest);
    assert!(expected.iter().filter(used).all(|hot| prefetched(&bootstrap).contains(hot)));

    // Another start reads less: the new hot blob takes the rest from its old places, so the old hot
    // blob is dropped.
    let stored = [&stored[..], &[content]].concat();
    let ids = bootstrap.blobs().iter().map(|blob| blob.id).collect();
    let less = Trace::of_start(ids, [(before.len() as u8, 1, 0)]);
    let (again, hot, _) = with_hot_blob(scratch.path(), &optimized.bootstrap, &stored, &less);
    let bootstrap = Bootstrap::open(&again.bootstrap[..]).unwrap();
    check(&bootstrap).unwrap();
    let image = Image { tree: bootstrap.tree().unwrap(), blobs: bootstrap.blobs().to_vec() };
    shows_its_source(&image);
    assert_eq!(image.blobs, [&before[..], &[hot]].concat());
    assert_eq!(again.kept.len(), before.len());
}

#[test]
fn wrong_bytes_do_not_get_into_a_hot_blob() {
    let scratch = tempfile::tempdir().unwrap();
    let built = plain(scratch.path());
    let blob = &built.blobs[0].record.blob;
    let stored = fs::read(built.blobs[0].file.as_ref().unwrap()).unwrap();
    for chunk in &blob.chunks[..5] {
        let good = &stored[chunk.stored.0 as usize..chunk.stored_end().0 as usize];
        let mut bad = good.to_vec();
        *bad.last_mut().unwrap() ^= 1;
        for bad in [&bad[..], &good[1..], &[]] {
            let mut writer = HotBlob::create(scratch.path(), Codec::Zstd).unwrap();
            let error = writer.add(blob, chunk, bad).unwrap_err();
            assert!(matches!(error, BuildError::Content { .. }), "{error}");
        }
        let mut writer = HotBlob::create(scratch.path(), Codec::Lz4).unwrap();
        let error = writer.add(blob, chunk, good).unwrap_err().to_string();
        assert!(error.contains("expected LZ4") || error.contains("expected lz4"), "{error}");
    }
    let empty = HotBlob::create(scratch.path(), Codec::Zstd).unwrap();
    assert!(matches!(empty.finish(), Err(BuildError::Format(_))));
}
