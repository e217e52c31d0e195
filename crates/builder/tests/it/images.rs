//! Whole images: round trips, and equal output for equal input.

use std::{
    collections::HashSet,
    fs,
    io::{Read as _, Write as _},
    path::Path,
    process::Command,
    sync::{
        atomic::{AtomicUsize, Ordering},
        mpsc::{Receiver, Sender, channel},
    },
    time::Duration,
};

use flate2::{Compression, write::GzEncoder};
use lazuli_builder::{
    BuildError, Built, Layer, LayerSource, Options, Progress, bootstrap_layer, build, merge,
};
use lazuli_image::{
    Algorithm, ChunkRef, Codec, Digest, Tree,
    codec::Decoder,
    compare::{Content, compare},
    rafs::{Bootstrap, check},
};

use lazuli_testkit::kernel::{Feature, require};

use crate::tarball::{Tar, layer};

pub(crate) const CHUNK_SIZE: u32 = 4096;

/// Bytes that do not compress and differ by `seed`.
pub(crate) fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    };
    (0..length).map(|_| next()).collect()
}

fn text(seed: usize, length: usize) -> Vec<u8> {
    format!("line {seed}\n").into_bytes().into_iter().cycle().take(length).collect()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// Three layers with shared and hidden content, stored in three ways.
pub(crate) fn layers() -> Vec<Layer> {
    let shared = noise(1, 10_000);
    let mut low =
        Tar::default().dir("bin/").file("bin/a", &shared).file("bin/gone", &noise(2, 5000));
    let mut middle = Tar::default().file("lib/copy", &shared).file("bin/.wh.gone", b"");
    for number in 0..300 {
        low = low.file(&format!("share/{number}"), &text(number, number * 7));
        middle = middle.file(&format!("lib/{number}"), &text(number % 150, number % 150 * 7 + 1));
    }
    let high = Tar::default()
        .file("only/old", &shared)
        .link(b'1', "link", "bin/a")
        .file("zeros", &[0; 50_000]);
    vec![
        layer("low", gzip(&low.end())),
        layer("middle", zstd::bulk::compress(&middle.end(), 3).unwrap()),
        layer("high", high.end()),
    ]
}

pub(crate) fn options(scratch: &Path, codec: Codec, threads: usize) -> Options {
    let chunk_size = CHUNK_SIZE;
    Options { chunk_size, codec, level: 3, batch_size: 0, scratch: scratch.into(), threads }
}

/// An image that was built, for comparison.
pub(crate) struct Image {
    pub(crate) tree: Tree,
    pub(crate) blobs: Vec<lazuli_image::Blob>,
}

impl Content for Image {
    fn tree(&self) -> &Tree {
        &self.tree
    }

    fn chunk(&self, chunk: ChunkRef) -> Option<(Digest, u32)> {
        let blob = self.blobs.get(usize::from(chunk.blob.0))?;
        blob.chunk(chunk.number).map(|chunk| (chunk.digest, chunk.decoded_size))
    }
}

/// Checks every byte of an image against the tables, and returns it.
pub(crate) fn open(built: &Built) -> Image {
    let bootstrap = Bootstrap::open(&built.bootstrap[..]).unwrap();
    check(&bootstrap).unwrap();
    let blobs = bootstrap.blobs().to_vec();
    assert_eq!(blobs.len(), built.blobs.len());
    let (mut decoder, mut buffer) = (Decoder::new(), Vec::new());
    for (blob, made) in blobs.iter().zip(&built.blobs) {
        assert_eq!(*blob, made.record.blob);
        let stored = fs::read(made.file.as_ref().unwrap()).unwrap();
        assert_eq!(stored.len() as u64, blob.stored_size);
        assert!(blob.id.matches(&stored));
        for chunk in &blob.chunks {
            let bytes = &stored[chunk.stored.0 as usize..chunk.stored_end().0 as usize];
            let unit = decoder.unit(&blob.unit(chunk), bytes, &mut buffer).unwrap();
            assert!(chunk.digest.matches(chunk.part_of(unit).unwrap()));
        }
    }
    Image { tree: bootstrap.tree().unwrap(), blobs }
}

#[test]
fn images_have_the_content_of_their_layers() {
    let scratch = tempfile::tempdir().unwrap();
    for codec in [Codec::Zstd, Codec::Lz4, Codec::None] {
        let built = build(layers(), &options(scratch.path(), codec, 2), &()).unwrap();
        let image = open(&built);
        let source = merge(layers(), CHUNK_SIZE, Algorithm::Blake3, 2, &()).unwrap();
        assert_eq!(compare(&image, &source, 10), []);
        let report = &built.report;
        assert_eq!((report.layers, report.blobs, built.blobs.len()), (3, 3, 3), "{codec}");
        assert!(report.distinct_chunks < report.chunks);
        let digests: Vec<Digest> =
            image.blobs.iter().flat_map(|blob| &blob.chunks).map(|chunk| chunk.digest).collect();
        let distinct: HashSet<_> = digests.iter().collect();
        assert_eq!(distinct.len(), digests.len(), "a chunk is stored once per image");
        assert_eq!(digests.len() as u64, report.distinct_chunks);
    }
    assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 0);
}

#[test]
fn the_same_input_gives_the_same_bytes() {
    let scratch = tempfile::tempdir().unwrap();
    let make = |threads| {
        let built = build(layers(), &options(scratch.path(), Codec::Zstd, threads), &()).unwrap();
        let blobs: Vec<Vec<u8>> =
            built.blobs.iter().map(|blob| fs::read(blob.file.as_ref().unwrap()).unwrap()).collect();
        let metas: Vec<Vec<u8>> = built.blobs.iter().map(|blob| blob.meta_file.clone()).collect();
        (bootstrap_layer(&built), built.bootstrap.clone(), blobs, metas)
    };
    let first = make(1);
    for threads in [1, 2, 3, 8, 16] {
        assert!(make(threads) == first, "{threads} threads");
    }
}

#[test]
fn images_on_the_same_base_share_blobs() {
    let scratch = tempfile::tempdir().unwrap();
    let options = options(scratch.path(), Codec::Zstd, 2);
    let built = build(layers(), &options, &()).unwrap();
    let mut other = layers();
    other[2] = layer("other", Tar::default().file("other", &noise(7, 9000)).end());
    let other = build(other, &options, &()).unwrap();
    let ids =
        |built: &Built| built.blobs.iter().map(|blob| blob.record.blob.id).collect::<Vec<_>>();
    assert_eq!(ids(&built)[..2], ids(&other)[..2]);
    assert_ne!(ids(&built)[2], ids(&other)[2]);
}

#[test]
fn layers_without_chunks_of_their_own_have_no_blob() {
    let scratch = tempfile::tempdir().unwrap();
    let options = options(scratch.path(), Codec::Zstd, 2);
    let shared = noise(1, 9000);
    let same = || layer("same", Tar::default().file("a", &shared).end());
    let hidden = layer("hidden", Tar::default().file("b", &noise(3, 100)).end());
    let hides = layer("hides", Tar::default().file(".wh.b", b"").dir("d").end());
    let built = build(vec![same(), same(), hidden, hides], &options, &()).unwrap();
    assert_eq!(built.blobs.len(), 1);
    let image = open(&built);
    assert!(image.tree.find([&b"a"[..]]).is_some() && image.tree.find([&b"b"[..]]).is_none());
    let built = build(vec![layer("empty", Tar::default().end())], &options, &()).unwrap();
    assert_eq!((built.blobs.len(), built.report.inodes), (0, 1));
    open(&built);
    assert_eq!(build(Vec::new(), &options, &()).unwrap().blobs.len(), 0);
}

#[test]
fn the_bootstrap_layer_is_a_tar_of_bootstrap_and_meta_files() {
    let scratch = tempfile::tempdir().unwrap();
    let built = build(layers(), &options(scratch.path(), Codec::Zstd, 2), &()).unwrap();
    let packed = bootstrap_layer(&built);
    assert!(packed.digest.matches(&packed.bytes));
    let tar = zstd::stream::decode_all(&packed.bytes[..]).unwrap();
    assert!(packed.diff_id.matches(&tar));
    let found = crate::tarball::entries(&tar).unwrap();
    let mut expected = vec![
        ("/image".to_owned(), Vec::new()),
        ("/image/image.boot".into(), built.bootstrap.clone()),
    ];
    for blob in &built.blobs {
        let name = format!("/image/{}.blob.meta", blob.record.blob.id.hex());
        expected.push((name, blob.meta_file.clone()));
    }
    let found: Vec<_> =
        found.into_iter().map(|(entry, content)| (entry.path.to_string(), content)).collect();
    assert!(found == expected);
}

/// Lets the lowest layer be read only when the upper ones are.
struct Last {
    waiting: AtomicUsize,
    released: Sender<()>,
}

impl Progress for Last {
    fn bytes_read(&self, _: usize, _: u64) {}

    fn layer_done(&self, _: usize) {
        if self.waiting.fetch_sub(1, Ordering::Relaxed) == 1 {
            // Not an error when the test is over.
            let _ = self.released.send(());
        }
    }
}

/// Waits for a signal before its first byte.
struct Held<R>(R, Option<Receiver<()>>);

impl<R: std::io::Read> std::io::Read for Held<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        if let Some(signal) = self.1.take() {
            signal.recv().unwrap();
            // The last batches of the others are on their way to the workers.
            std::thread::sleep(Duration::from_millis(100));
        }
        self.0.read(buffer)
    }
}

#[test]
fn a_lower_layer_owns_its_chunks_also_when_it_is_read_last() {
    let scratch = tempfile::tempdir().unwrap();
    let options = options(scratch.path(), Codec::Zstd, 3);
    let expected = build(layers(), &options, &()).unwrap();
    let (released, signal) = channel();
    let mut held = layers();
    let LayerSource::Tar(low) =
        std::mem::replace(&mut held[0].source, LayerSource::Directory("".into()))
    else {
        panic!()
    };
    held[0].source = LayerSource::Tar(Box::new(Held(low, Some(signal))));
    let progress = Last { waiting: AtomicUsize::new(2), released };
    let built = build(held, &options, &progress).unwrap();
    open(&built);
    assert!(built.bootstrap == expected.bootstrap);
    for (made, expected) in built.blobs.iter().zip(&expected.blobs) {
        assert!(
            fs::read(made.file.as_ref().unwrap()).unwrap()
                == fs::read(expected.file.as_ref().unwrap()).unwrap()
        );
    }
}

/// A source that fails.
struct Broken;

impl std::io::Read for Broken {
    fn read(&mut self, _: &mut [u8]) -> std::io::Result<usize> {
        Err(std::io::Error::other("the wire was cut"))
    }
}

#[test]
fn failures_leave_nothing_behind() {
    let scratch = tempfile::tempdir().unwrap();
    let options = options(scratch.path(), Codec::Zstd, 2);
    let mut broken = layers();
    let wire =
        Box::new(std::io::Cursor::new(Tar::default().file("a", &noise(1, 5000)).0).chain(Broken));
    broken.push(Layer { name: "wire".into(), stored_size: None, source: LayerSource::Tar(wire) });
    let error = build(broken, &options, &()).unwrap_err().to_string();
    assert!(error.starts_with("layer wire: ") && error.ends_with("the wire was cut"), "{error}");
    let mut cut = gzip(&Tar::default().file("a", &noise(1, 5000)).end());
    cut.truncate(3000);
    assert!(matches!(build(vec![layer("cut", cut)], &options, &()), Err(BuildError::Layer { .. })));
    assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 0);

    let nowhere = Options { scratch: scratch.path().join("nowhere"), ..options.clone() };
    let error = build(layers(), &nowhere, &()).unwrap_err().to_string();
    assert!(error.contains(&nowhere.scratch.display().to_string()), "{error}");
    for (wrong, expected) in [
        (
            Options { chunk_size: 5000, ..options.clone() },
            "chunk_size is 5000, expected a power of two",
        ),
        (Options { level: 23, ..options.clone() }, "level is 23, expected 1 to 22"),
        (Options { threads: 0, ..options.clone() }, "threads is 0, expected at least 1"),
    ] {
        assert!(build(layers(), &wrong, &()).unwrap_err().to_string().contains(expected));
    }
    let many = (0..255).map(|_| layer("l", Vec::new())).collect();
    let error = build(many, &options, &()).unwrap_err().to_string();
    assert_eq!(error, "the image has 255 layers, expected at most 254");
}

#[test]
fn a_full_disk_is_named() {
    if !require(Feature::Root) {
        return;
    }
    let scratch = tempfile::tempdir().unwrap();
    let run = |program: &str, arguments: &[&str]| {
        let status = Command::new(program).args(arguments).arg(scratch.path()).status().unwrap();
        assert!(status.success(), "{program}");
    };
    run("mount", &["-t", "tmpfs", "-o", "size=64k", "tmpfs"]);
    let big = || layer("big", Tar::default().file("a", &noise(1, 500_000)).end());
    let result = build(vec![big(), big()], &options(scratch.path(), Codec::Zstd, 2), &());
    let left = fs::read_dir(scratch.path()).unwrap().count();
    run("umount", &[]);
    let error = result.unwrap_err().to_string();
    assert!(error.contains(&format!("scratch directory {}", scratch.path().display())), "{error}");
    assert!(error.contains("No space left on device"), "{error}");
    assert_eq!(left, 0);
}
