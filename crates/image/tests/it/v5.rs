//! RAFS v5: translation of sound and of damaged images.

use std::collections::BTreeMap;

use lazuli_image::{
    Algorithm, Chunk, Codec, Digest, Kind, Problem, Tree,
    rafs::{Bootstrap, BootstrapOptions, check, v5},
};
use lazuli_testkit::v5::write;

use crate::support::{
    BlobBuilder, Sample, add, flatten, link, metadata, sample, small_chunks, small_sample,
};

fn translated(sample: &Sample) -> Vec<u8> {
    let blobs: Vec<_> = sample.blobs.iter().map(|blob| blob.record.blob.clone()).collect();
    write(&sample.tree, &blobs, &small_chunks())
}

/// Every path with its content; files as the digests and stored places of their chunks.
type Listing = BTreeMap<Vec<u8>, (String, Vec<u8>, Vec<(Digest, Digest, u64, u32, u32)>)>;

fn listing<B: AsRef<[u8]>>(bootstrap: &Bootstrap<B>) -> Listing {
    let describe = |(path, (inode, first)): (_, (lazuli_image::Inode, Vec<u8>))| {
        let Kind::Regular { size, chunks } = &inode.kind else {
            return (path, (format!("{inode:?}"), first, Vec::new()));
        };
        let chunks = chunks.iter().map(|chunk| {
            let blob = &bootstrap.blobs()[usize::from(chunk.blob.0)];
            let Chunk { digest, stored, stored_size, decoded_size, .. } =
                *blob.chunk(chunk.number).unwrap();
            (blob.id, digest, stored.0, stored_size, decoded_size)
        });
        (path, (format!("{:?} {size}", inode.metadata), first, chunks.collect()))
    };
    flatten(&bootstrap.tree().unwrap()).into_iter().map(describe).collect()
}

#[test]
fn shows_the_same_tree_of_the_same_chunks() {
    for sample in [sample(), small_sample()] {
        let expected = Bootstrap::open(&sample.bootstrap[..]).unwrap();
        let image = translated(&sample);
        assert!(v5::is_v5(&image) && !v5::is_v5(&sample.bootstrap));
        let bootstrap = Bootstrap::open(v5::translate(&image).unwrap()).unwrap();
        assert_eq!(check(&bootstrap).unwrap().names, check(&expected).unwrap().names);
        assert_eq!(listing(&bootstrap), listing(&expected));
        assert_eq!((bootstrap.version(), expected.version()), (5, 6));
        for (blob, before) in bootstrap.blobs().iter().zip(expected.blobs()) {
            assert_eq!((blob.codec, blob.stored_size), (before.codec, before.stored_size));
        }
        assert!(bootstrap.tails().iter().all(|tail| tail.ci_size == 0));
    }
}

#[test]
fn blobs_and_chunks_that_no_file_uses_are_left_out() {
    let options = BootstrapOptions { digest: Algorithm::Sha256, ..small_chunks() };
    let mut blobs = [BlobBuilder::new(Codec::Lz4, options), BlobBuilder::new(Codec::Lz4, options)];
    let unused = blobs[0].file(0, b"unused");
    drop(unused);
    blobs[1].file(1, b"deleted");
    let file = blobs[1].file(1, b"kept");
    let mut tree = Tree::new(metadata(0o755));
    let file = add(&mut tree, Tree::ROOT, b"file", file);
    link(&mut tree, Tree::ROOT, b"link", file);
    let blobs = blobs.map(|blob| blob.finish().record.blob);
    let image = write(&tree, &blobs, &options);
    let bootstrap = Bootstrap::open(v5::translate(&image).unwrap()).unwrap();
    check(&bootstrap).unwrap();
    let [blob] = bootstrap.blobs() else { panic!("{:?}", bootstrap.blobs()) };
    assert_eq!((blob.id, blob.chunks.len()), (blobs[1].id, 1));
    assert_eq!(blob.chunks[0].stored, blobs[1].chunks[1].stored);
    assert_eq!(blob.chunks[0].digest, Algorithm::Sha256.digest(b"kept"));
}

/// Returns whether an image is translated, and asserts that the result is sound.
fn sound(bytes: &[u8]) -> bool {
    let Ok(bootstrap) = v5::translate(bytes) else { return false };
    check(&Bootstrap::open(bootstrap).unwrap()).unwrap();
    true
}

#[test]
fn no_changed_byte_makes_a_reader_panic() {
    let mut image = translated(&small_sample());
    assert!(sound(&image));
    for at in (0..80).chain(8192..image.len()) {
        let old = image[at];
        for value in [0xff, 0, old ^ 1] {
            image[at] = value;
            sound(&image);
        }
        image[at] = old;
    }
}

/// The oldest images have no extended blob table, or one with nothing but numbers of chunks.
#[test]
fn blobs_of_unknown_size_end_with_their_last_chunk() {
    let mut image = translated(&small_sample());
    let extended = u64::from_le_bytes(image[72..80].try_into().unwrap()) as usize;
    for change in [extended + 16..extended + 24, 68..72] {
        image[change].fill(0);
        let bootstrap = Bootstrap::open(v5::translate(&image).unwrap()).unwrap();
        let blob = &bootstrap.blobs()[0];
        assert_eq!(blob.stored_size, blob.chunks.last().unwrap().stored_end().0);
    }
}

#[test]
fn truncated_image_is_refused_at_every_length() {
    let image = translated(&sample());
    for len in (0..image.len()).filter(|len| len % 61 == 0) {
        assert!(!sound(&image[..len]), "{len} bytes");
    }
}

#[test]
fn errors_name_the_damaged_field() {
    let image = translated(&small_sample());
    // Where the inode of a name is.
    let named = |name: &[u8]| {
        let padded = [name, &vec![0; name.len().next_multiple_of(8) - name.len()]].concat();
        let found = (8192..image.len()).step_by(8).find(|at| image[*at..].starts_with(&padded));
        found.unwrap() - 128
    };
    let (text, same, link) = (named(b"text"), named(b"same"), named(b"link"));
    let hello = named(b"hello");
    let chunk = hello + 128 + 8;
    let blob_table = u64::from_le_bytes(image[48..56].try_into().unwrap()) as usize;
    let extended = u64::from_le_bytes(image[72..80].try_into().unwrap()) as usize;
    let cases: &[(usize, &[u8], &str)] = &[
        (4, &[0, 4], "version 0x400"),
        (8, &[1], "expected 0x500 of 8192"),
        (12, &[1], "chunk size"),
        (16, &[0x55], "one compressor"),
        (16, &[0x3d], "one digest"),
        (32 + 4, &[1], "inode table"),
        (56, &[0xff, 0xff, 0xff, 0xff], "inode table"),
        (64, &[0, 0, 1], "blob table"),
        (68, &[1], "extended blob table does not have it"),
        (blob_table + 8, b"X", "hex digits"),
        (extended + 4, &[8], "zran"),
        (extended + 16, &[1, 0, 0, 0], "bad stored end"),
        (extended + 21, &[2], "stored bytes"),
        (8192, &[0, 0], "inode 1 at byte 0: none of the"),
        (8192 + 4, &image[8192..8196], "file name `/` is not allowed"),
        (text + 48, &[9], "not the same"),
        (same + 128, b"link", "the name `link` twice"),
        (link + 61, &[0xff], "mode"),
        (link + 102, &[0], "link target of 0 bytes"),
        (hello + 64, &[0xff; 8], "1 chunks for"),
        (hello + 80, &[8], "holes"),
        (hello + 96, &[0xff; 4], "bytes do not fit"),
        (hello + 100, &[0, 0], "empty file name"),
        (chunk, &[0; 32], "no digest"),
        (chunk + 32, &[9], "blob 9"),
        (chunk + 36, &[1], "do not agree"),
        (chunk + 36, &[2], "a hole in place of a chunk"),
        (chunk + 44, &[7], "expected 6 at 0"),
        (chunk + 48, &[0; 8], "another file has another chunk"),
        (chunk + 64, &[1], "at 1, expected"),
    ];
    for (at, bytes, expected) in cases {
        let mut damaged = image.clone();
        damaged[*at..at + bytes.len()].copy_from_slice(bytes);
        let Err(error) = v5::translate(&damaged) else { panic!("byte {at}: not `{expected}`") };
        let error = error.to_string();
        assert!(error.contains(expected), "byte {at}: `{error}` does not say `{expected}`");
    }
}

/// A directory that is its own child would go on for ever.
#[test]
fn a_tree_without_end_is_refused() {
    let mut tree = Tree::new(metadata(0o755));
    let directory = add(&mut tree, Tree::ROOT, b"d", Kind::Directory(BTreeMap::new()));
    let options = small_chunks();
    let mut blob = BlobBuilder::new(Codec::None, options);
    let file = blob.file(0, b"x");
    add(&mut tree, directory, b"f", file);
    let mut image = write(&tree, &[blob.finish().record.blob], &options);
    assert!(sound(&image));
    let at = image.windows(8).rposition(|window| window == b"d\0\0\0\0\0\0\0").unwrap() - 128;
    assert_eq!(image[at + 92], 3);
    image[at + 92] = 2;
    let Err(error) = v5::translate(&image) else { panic!("an endless tree") };
    assert!(matches!(error.problem, Problem::Overlap(_)), "{error}");
}
