//! Images with batches of small files, as made here and by upstream.

use std::{fs, path::PathBuf};

use lazuli_image::rafs::Bootstrap;
use lazuli_testkit::{
    kernel::{Feature, require},
    listing, odd,
    registry::{FakeRegistry, Fault},
};
use serde_json::Value;

use crate::{
    lazuli::Lazuli,
    reliability::forge::{Forge, Tables},
};

/// Converts a tree with many small files to `oci:alone:latest`, and with batches to
/// `oci:batched:latest`.
fn images(lazuli: &Lazuli) {
    let source = lazuli.directory("source");
    for number in 0..300_usize {
        let directory = source.join(format!("d{}", number / 50));
        fs::create_dir_all(&directory).unwrap();
        let text = format!("file number {number} of a program that comes in small pieces\n");
        fs::write(directory.join(format!("f{number}")), text.repeat(1 + number % 40)).unwrap();
    }
    fs::write(source.join("d0/big"), odd::random(1, 1_500_000)).unwrap();
    fs::write(source.join("d1/f60"), fs::read(source.join("d0/f10")).unwrap()).unwrap();
    lazuli.ok(["convert", "dir:source", "oci:alone:latest"]);
    lazuli.ok(["convert", "dir:source", "oci:batched:latest", "--batch", "64"]);
}

/// Makes the bootstrap one as upstream writes it: without the places of chunks in batches.
fn forget_places(lazuli: &Lazuli, layout: &str) {
    Forge::new(lazuli.path(layout)).change_bootstrap(|bootstrap| {
        let (start, rows) = Tables::of(bootstrap).chunks;
        let batched =
            bootstrap[start..][..rows * 80].chunks_exact_mut(80).filter(|row| row[36] & 8 != 0);
        let forgotten = batched.map(|row| {
            row[36] = 0;
            row[40..44].fill(0);
            row[48..56].fill(0);
            row[64..72].fill(0);
        });
        assert!(forgotten.count() > 200);
    });
}

fn copy(lazuli: &Lazuli, to: &str) {
    lazuli.ok(["copy", "oci:batched:latest", &format!("oci:{to}:latest")]);
}

/// Without `--batch` the image has no batches, even if it reuses a version with batches: its
/// readers may not support them.
#[test]
fn the_next_version_has_none_unless_it_is_asked_for() {
    let lazuli = Lazuli::new();
    images(&lazuli);
    let blobs = |image: &str| -> Value {
        let said = lazuli.ok(["inspect", image, "--json"]);
        serde_json::from_str::<Value>(&said).unwrap()["blobs"].take()
    };
    assert_ne!(blobs("oci:batched:latest"), blobs("oci:alone:latest"));
    lazuli.ok(["convert", "dir:source", "oci:batched:next"]);
    assert_eq!(blobs("oci:batched:next"), blobs("oci:alone:latest"));
}

/// One node for each row, so that each fetches by itself.
#[test]
fn both_drivers_show_the_same_tree_with_batches_of_every_converter() {
    if !require(Feature::Root) || !require(Feature::Fanotify) || !require(Feature::Fuse) {
        return;
    }
    let lazuli = Lazuli::new();
    images(&lazuli);
    copy(&lazuli, "theirs");
    forget_places(&lazuli, "theirs");
    copy(&lazuli, "bare");
    forget_places(&lazuli, "bare");
    Forge::new(lazuli.path("bare"))
        .change_members(|members| members.retain(|(name, _)| name == "image/image.boot"));
    for (layout, driver) in
        [("batched", "fanotify"), ("batched", "fuse"), ("theirs", "fanotify"), ("bare", "fuse")]
    {
        let node = Lazuli::new();
        let mountpoint = node.directory("mnt");
        let image = format!("oci:{}:latest", lazuli.path(layout).display());
        node.ok(["mount", &image, mountpoint.to_str().unwrap(), "--driver", driver]);
        listing::assert_equal(lazuli.path("source"), mountpoint.clone());
        let status = node.mount_status(&mountpoint);
        assert_eq!(status["driver"], driver, "{status:#}");
        // Each batch was fetched once, not for each of its chunks: that would be several times the
        // image.
        let (fetched, all) = (&status["bytes_fetched"], &status["bytes_total"]);
        assert!(fetched.as_u64().unwrap() <= all.as_u64().unwrap(), "{status:#}");
    }
}

/// The only data blob of an image.
fn blob(lazuli: &Lazuli, layout: &str) -> PathBuf {
    let inspected = lazuli.ok(["inspect", &format!("oci:{layout}:latest"), "--json"]);
    let inspected: Value = serde_json::from_str(&inspected).unwrap();
    let id = inspected["blobs"][0]["id"].as_str().unwrap().to_owned();
    Forge::new(lazuli.path(layout)).blob_path(&id)
}

#[test]
fn every_verb_reads_batches() {
    let lazuli = Lazuli::new();
    images(&lazuli);
    let size = |layout: &str| fs::metadata(blob(&lazuli, layout)).unwrap().len();
    assert!(size("batched") + 10_000 < size("alone"), "{} {}", size("batched"), size("alone"));
    copy(&lazuli, "theirs");
    forget_places(&lazuli, "theirs");
    for layout in ["batched", "theirs"] {
        let image = format!("oci:{layout}:latest");
        lazuli.ok(["check", &image, "--against", "dir:source"]);
        lazuli.ok(["unpack", &image, &format!("unpacked-{layout}")]);
        listing::assert_equal(lazuli.path("source"), lazuli.path(&format!("unpacked-{layout}")));
        let diff = lazuli.ok(["diff", "oci:alone:latest", &image]);
        assert!(diff.contains("0 added, 0 removed, 0 changed"), "{diff}");
    }
    // The same bytes, and the next version reuses what it can of this one.
    lazuli.ok(["convert", "dir:source", "oci:again:latest", "--batch", "64"]);
    assert_eq!(
        Forge::new(lazuli.path("again")).manifest(),
        Forge::new(lazuli.path("batched")).manifest()
    );
    fs::write(lazuli.path("source/new"), odd::random(2, 9000)).unwrap();
    let dict = ["--dict", "oci:batched:latest", "--batch", "64"];
    lazuli.ok([&["convert", "dir:source", "oci:batched:next"], &dict[..]].concat());
    lazuli.ok(["check", "oci:batched:next", "--against", "dir:source"]);
}

#[test]
fn a_damaged_batch_is_noticed() {
    let lazuli = Lazuli::new();
    images(&lazuli);
    let path = blob(&lazuli, "batched");
    let good = fs::read(&path).unwrap();
    let mut bad = good.clone();
    bad[100] ^= 1;
    fs::write(&path, bad).unwrap();
    let error = lazuli.fails(["check", "oci:batched:latest"]);
    assert!(error.contains("chunk 0"), "{error}");
    // Without its tables the places of chunks are unknown.
    fs::write(&path, good).unwrap();
    forget_places(&lazuli, "batched");
    Forge::new(lazuli.path("batched")).change_members(|members| {
        let meta = members.iter_mut().find(|(name, _)| name.ends_with(".blob.meta"));
        // A flag of the first entry, which has its flags in byte 7: encrypted.
        meta.unwrap().1[7] |= 8;
    });
    let error = lazuli.fails(["check", "oci:batched:latest"]);
    assert!(error.contains("encryption is not supported"), "{error}");
}

/// The only request for the tables of the blob in the layout `bare`, and an answer of the same size
/// in which the last batch is some bytes further on.
fn wrong_tables(lazuli: &Lazuli) -> (String, Vec<u8>) {
    let forge = Forge::new(lazuli.path("bare"));
    let record = Bootstrap::open(forge.bootstrap()).unwrap().blob_records().remove(0);
    let (blob, tail) =
        (fs::read(forge.blob_path(&record.blob.id.to_string())).unwrap(), record.tail);
    let (start, size) = (tail.ci_offset as usize, tail.ci_stored_size as usize);
    let right = zstd::bulk::decompress(&blob[start..start + size], tail.ci_size as usize).unwrap();
    let entries = 24 * tail.chunk_count as usize;
    let stored = |entry: &[u8]| u64::from_le_bytes(entry[8..16].try_into().unwrap());
    let last =
        right[..entries].chunks_exact(24).filter(|entry| entry[7] & 4 != 0).map(stored).max();
    let wrong = (1..1000_u64).find_map(|shift| {
        let mut table = right.clone();
        let moved =
            table[..entries].chunks_exact_mut(24).filter(|entry| Some(stored(entry)) == last);
        moved.for_each(|entry| {
            let at = stored(entry) + shift;
            entry[8..16].copy_from_slice(&at.to_le_bytes());
        });
        (1..20).find_map(|level| {
            let stored = zstd::bulk::compress(&table, level).unwrap();
            (stored.len() == size).then_some(stored)
        })
    });
    let wrong = [
        wrong.expect("one of the same size"),
        blob[start + size..tail.meta_end() as usize].to_vec(),
    ];
    (format!("/blobs/{}", record.blob.id), wrong.concat())
}

#[test]
fn unusable_chunk_tables_are_fetched_elsewhere_and_never_kept() {
    if !require(Feature::Root) || !require(Feature::Fuse) {
        return;
    }
    let lazuli = Lazuli::new();
    images(&lazuli);
    copy(&lazuli, "bare");
    forget_places(&lazuli, "bare");
    Forge::new(lazuli.path("bare"))
        .change_members(|members| members.retain(|(name, _)| name == "image/image.boot"));
    let [registry, mirror] = [(); 2].map(|()| FakeRegistry::start().unwrap());
    for server in [&registry, &mirror] {
        lazuli.ok(["copy", "oci:bare:latest", &format!("{}/image:1", server.host())]);
    }
    let (path, wrong) = wrong_tables(&lazuli);
    let image = format!("{}/image:1", registry.host());

    let node = Lazuli::new();
    node.configure(&format!(
        "[[registry]]\nhost = \"{}\"\nmirrors = [\"http://{}\"]\n",
        registry.host(),
        mirror.host()
    ));
    mirror.fault("GET", &path, 1, Fault::Instead(wrong.clone()));
    let mountpoint = node.directory("mnt");
    node.ok(["mount", &image, mountpoint.to_str().unwrap(), "--driver", "fuse"]);
    assert!(node.log().contains("do not match its chunks"), "the mirror was not asked");
    listing::assert_equal(lazuli.path("source"), mountpoint.clone());

    let node = Lazuli::new();
    registry.fault("GET", &path, 1, Fault::Instead(wrong));
    let mountpoint = node.directory("mnt");
    let mount = ["mount", &image, mountpoint.to_str().unwrap(), "--driver", "fuse"];
    let error = node.fails(mount);
    assert!(error.contains("do not match its chunks"), "{error}");
    assert_eq!(fs::read_dir(node.root().join("images")).unwrap().count(), 0);
    node.ok(mount);
    listing::assert_equal(lazuli.path("source"), mountpoint.clone());
}
