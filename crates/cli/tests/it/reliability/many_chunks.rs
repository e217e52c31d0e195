//! Images with so many chunks that their tables fill a node's memory.

use std::{
    fs,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use lazuli_image::{
    Algorithm, BlobIndex, Chunk, ChunkRef, Codec, Decoded, Digest, Inode, Kind, Metadata, Name,
    Stored, Tree,
    rafs::{
        Bootstrap, BootstrapOptions, TailInfo,
        layout::{MAX_ROWS, features},
        write_bootstrap,
    },
};
use lazuli_testkit::odd;

use super::{
    forge::Forge,
    processes::{kill, pids},
    report,
    scale::usage,
};
use crate::{drivers::able, lazuli::Lazuli};

const BLOCK: u64 = 4096;

/// An image of one file, in a layout of its own.
fn image(lazuli: &Lazuli, layout: &str) -> Forge {
    fs::write(lazuli.directory("source").join("file"), odd::random(1, 100_000)).unwrap();
    lazuli.ok(["convert", "dir:source", &format!("oci:{layout}:x")]);
    Forge::new(lazuli.path(layout))
}

/// Makes an image list this many chunks of its blob, of which its only file uses the first.
fn list_chunks(forge: &Forge, count: u64) {
    let mut record = Bootstrap::open(forge.bootstrap()).unwrap().blob_records().remove(0);
    let chunk = |number: u64| Chunk {
        number: number as u32,
        digest: Digest::blake3([7; 32]),
        stored: Stored(2 * number),
        stored_size: 2,
        decoded: Decoded(number * BLOCK),
        decoded_size: BLOCK as u32,
        part: None,
    };
    record.blob.codec = Codec::Zstd;
    record.blob.chunks = (0..count).map(chunk).collect();
    (record.blob.stored_size, record.blob.decoded_size) = (16 << 30, count * BLOCK);
    record.tail = TailInfo {
        features: features::ALIGNED,
        chunk_count: count as u32,
        ci_offset: 8 << 30,
        ci_stored_size: 100,
        ci_size: 16 * count,
        ci_codec: Codec::Zstd,
        toc_size: 0,
        toc_digest: None,
        index: None,
    };
    let mut tree = Tree::new(Metadata { permissions: 0o755, ..Metadata::default() });
    let chunks = vec![ChunkRef { blob: BlobIndex(0), number: 0 }];
    let file = tree
        .add(Inode { metadata: Metadata::default(), kind: Kind::Regular { size: BLOCK, chunks } });
    tree.children_mut(Tree::ROOT).unwrap().insert(Name::new(b"file").unwrap(), file);
    let options = BootstrapOptions { chunk_size: 1 << 20, digest: Algorithm::Blake3 };
    let bootstrap = write_bootstrap(&tree, &[record], &options).unwrap();
    forge.change_members(|members| *members = vec![("image/image.boot".to_owned(), bootstrap)]);
}

/// Makes the superblock claim this many chunks.
fn claim_chunks(forge: &Forge, count: u64) {
    forge.change_bootstrap(|bootstrap| {
        bootstrap[1184..1192].copy_from_slice(&(80 * count).to_le_bytes());
    });
}

fn mount<'a>(image: &'a str, at: &'a Path) -> [&'a str; 5] {
    ["mount", image, at.to_str().unwrap(), "--driver", "fanotify"]
}

#[test]
fn the_largest_table_of_chunks_is_held_once_and_by_the_next_worker_too() {
    if !able("fanotify") {
        return;
    }
    let lazuli = Lazuli::new();
    let forge = image(&lazuli, "large");
    image(&lazuli, "small");
    let mountpoints =
        ["small", "first", "second"].map(|name| lazuli.directory(&format!("at-{name}")));
    lazuli.ok(mount("oci:small:x", &mountpoints[0]));
    let worker = pids(&lazuli.status()).worker;
    let before = usage(worker);
    lazuli.ok(["umount", mountpoints[0].to_str().unwrap()]);
    list_chunks(&forge, MAX_ROWS);
    let began = Instant::now();
    // The small image, which may be closed a moment later, has room that this one needs.
    while !lazuli.output(mount("oci:large:x", &mountpoints[1])).status.success() {
        assert!(began.elapsed() < Duration::from_secs(60), "{}", lazuli.log());
        thread::sleep(Duration::from_millis(50));
    }
    let once = usage(worker);
    lazuli.ok(mount("oci:large:x", &mountpoints[2]));
    let twice = usage(worker);
    let bytes = |usage: &serde_json::Value, key: &str| usage[key].as_u64().unwrap() << 10;
    let held = bytes(&once, "anonymous_kib").saturating_sub(bytes(&before, "anonymous_kib"));
    let again = bytes(&twice, "anonymous_kib").saturating_sub(bytes(&once, "anonymous_kib"));
    kill(worker);
    // Where the table is read slowly, `status` gives up before the next worker answers.
    while !lazuli.output(["status", "--json"]).status.success() {
        assert!(began.elapsed() < Duration::from_secs(120), "{}", lazuli.log());
    }
    let next = pids(&lazuli.status()).worker;
    assert_ne!(next, worker);
    for mountpoint in &mountpoints[1..] {
        fs::metadata(mountpoint.join("file")).unwrap();
    }
    let restarted = usage(next);
    let held_again =
        bytes(&restarted, "anonymous_kib").saturating_sub(bytes(&before, "anonymous_kib"));
    report(
        "many-chunks",
        &serde_json::json!({
            "before": before, "once": once, "twice": twice, "restarted": restarted,
        }),
    );
    // 80 bytes of a chunk, 4 for when it was asked for, and some bits.
    assert!(held < MAX_ROWS * 120, "{} bytes for each chunk", held / MAX_ROWS);
    assert!(again < MAX_ROWS * 20, "{} bytes for each chunk of the second mount", again / MAX_ROWS);
    assert!(held_again < MAX_ROWS * 120, "{} bytes after a restart", held_again / MAX_ROWS);
}

#[test]
fn more_chunks_than_there_is_room_for_are_refused_before_they_are_read() {
    if !able("fanotify") {
        return;
    }
    let lazuli = Lazuli::new();
    image(&lazuli, "small");
    let [small, large] = ["at-small", "at-large"].map(|name| lazuli.directory(name));
    let forge = image(&lazuli, "large");
    claim_chunks(&forge, MAX_ROWS + 1);
    let error = lazuli.fails(mount("oci:large:x", &large));
    assert!(error.contains("4194305 chunks, at most 4194304 are possible"), "{error}");
    // Alone it may have this many; it is refused because the table is shorter.
    claim_chunks(&forge, 3_000_000);
    let error = lazuli.fails(mount("oci:large:x", &large));
    assert!(error.contains("invalid bootstrap"), "{error}");
    lazuli.ok(mount("oci:small:x", &small));
    let error = lazuli.fails(mount("oci:large:x", &large));
    assert!(error.contains("3000000 chunks, and the node's open images"), "{error}");
    lazuli.ok(["umount", small.to_str().unwrap()]);
    let began = Instant::now();
    // The small one may be closed a moment later.
    while !lazuli.fails(mount("oci:large:x", &large)).contains("invalid bootstrap") {
        assert!(began.elapsed() < Duration::from_secs(30), "{}", lazuli.log());
        thread::sleep(Duration::from_millis(50));
    }
}
