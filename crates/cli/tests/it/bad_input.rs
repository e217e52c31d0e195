//! Bad input: a clear error that names the object, and nothing left behind.

use std::{fs, io::Write, path::Path};

use lazuli_testkit::{
    kernel::{Feature, require},
    oci::{Compression, Image, Layer},
    odd,
    registry::FakeRegistry,
};
use serde_json::{Value, json};

use crate::{drivers, lazuli::Lazuli, mount::tar_of};

/// A conversion that must fail: the words its error must have, and no trace at the target.
#[track_caller]
fn refused(lazuli: &Lazuli, source: &str, words: &[&str]) {
    let error = lazuli.fails(["convert", source, "oci:target:x"]);
    for word in words {
        assert!(error.contains(word), "`{word}` is not in: {error}");
    }
    let index = std::fs::read_to_string(lazuli.path("target/index.json")).unwrap_or_default();
    assert!(!index.contains("\"x\""), "{index}");
    let blobs = lazuli.path("target/blobs/sha256");
    let left = std::fs::read_dir(blobs).map_or(0, |entries| entries.count());
    assert_eq!(left, 0, "{left} blobs left at the target");
}

fn write_tar(lazuli: &Lazuli, bytes: &[u8]) {
    std::fs::write(lazuli.path("bad.tar"), bytes).unwrap();
}

#[test]
fn damaged_tars_are_refused_with_the_place() {
    let lazuli = Lazuli::new();
    let good = tar_of("dir/file", &odd::random(1, 10_000));

    write_tar(&lazuli, &good[..5000]);
    refused(&lazuli, "tar:bad.tar", &["bad.tar", "dir/file"]);

    let mut damaged = good.clone();
    damaged[100] ^= 0x55;
    write_tar(&lazuli, &damaged);
    refused(&lazuli, "tar:bad.tar", &["bad.tar", "checksum"]);

    let mut outside = tar::Header::new_ustar();
    outside.set_size(0);
    outside.as_mut_bytes()[..9].copy_from_slice(b"../../etc");
    outside.set_cksum();
    let mut tar = outside.as_bytes().to_vec();
    tar.extend([0; 1024]);
    write_tar(&lazuli, &tar);
    refused(&lazuli, "tar:bad.tar", &["../../etc"]);

    let mut link = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_ustar();
    header.set_entry_type(tar::EntryType::Link);
    header.set_size(0);
    link.append_link(&mut header, "a-link", "no-such-file").unwrap();
    write_tar(&lazuli, &link.into_inner().unwrap());
    refused(&lazuli, "tar:bad.tar", &["a-link", "no-such-file"]);
}

#[test]
fn a_decompression_bomb_is_refused() {
    let lazuli = Lazuli::new();
    // 2 GiB of zeros in some 100 KiB of zstd.
    let mut encoder = zstd::Encoder::new(Vec::new(), 1).unwrap();
    let mut header = tar::Header::new_gnu();
    header.set_path("zeros").unwrap();
    header.set_size(2 << 30);
    header.set_cksum();
    encoder.write_all(header.as_bytes()).unwrap();
    let zeros = vec![0; 16 << 20];
    for _ in 0..128 {
        encoder.write_all(&zeros).unwrap();
    }
    write_tar(&lazuli, &encoder.finish().unwrap());
    refused(&lazuli, "tar:bad.tar", &["bad.tar", "/zeros", "bomb"]);
}

#[test]
fn damaged_layouts_and_wrong_names_are_refused() {
    let lazuli = Lazuli::new();
    let layer = Layer::new(tar_of("file", &odd::random(1, 10_000)), Compression::Gzip);
    let digest = lazuli_image::Algorithm::Sha256.digest(&layer.stored().unwrap());
    Image::new([layer]).write_layout(&lazuli.path("source"), "x").unwrap();

    let blob = lazuli.path("source/blobs/sha256").join(digest.hex());
    let good = std::fs::read(&blob).unwrap();
    let mut bad = good.clone();
    *bad.last_mut().unwrap() ^= 1;
    std::fs::write(&blob, bad).unwrap();
    refused(&lazuli, "oci:source:x", &[&digest.hex()]);
    std::fs::remove_file(&blob).unwrap();
    refused(&lazuli, "oci:source:x", &[&digest.hex()]);
    std::fs::write(&blob, good).unwrap();

    refused(&lazuli, "oci:source:y", &["source", "y"]);
    refused(&lazuli, "oci:nowhere:x", &["nowhere"]);
    replace_platform(&lazuli.path("source"), "s390x");
    refused(&lazuli, "oci:source:x", &["linux/s390x"]);
    refused(&lazuli, "127.0.0.1:1/some/image:x", &["127.0.0.1:1"]);
    refused(&lazuli, "not a name", &["not a name"]);
}

/// Puts an index with one manifest for `architecture` in front of the layout's only manifest.
fn replace_platform(layout: &Path, architecture: &str) {
    let path = layout.join("index.json");
    let index: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let mut manifest = index["manifests"][0].clone();
    manifest["annotations"] = json!({});
    manifest["platform"] = json!({ "os": "linux", "architecture": architecture });
    let media_type = "application/vnd.oci.image.index.v1+json";
    let inner = json!({ "schemaVersion": 2, "mediaType": media_type, "manifests": [manifest] });
    let inner = inner.to_string();
    let digest = lazuli_image::Algorithm::Sha256.digest(inner.as_bytes());
    std::fs::write(layout.join("blobs/sha256").join(digest.hex()), &inner).unwrap();
    let descriptor = json!({
        "mediaType": media_type, "digest": digest.to_string(), "size": inner.len(),
        "annotations": { "org.opencontainers.image.ref.name": "x" },
    });
    let outer = json!({ "schemaVersion": 2, "manifests": [descriptor] });
    std::fs::write(path, outer.to_string()).unwrap();
}

#[test]
fn an_image_that_is_not_lazy_is_not_mounted_where_no_index_counts() {
    if !require(Feature::Root) {
        return;
    }
    let lazuli = Lazuli::new();
    lazuli.configure("[index]\ntrust = \"nothing\"\n");
    let layer = Layer::new(tar_of("file", b"content"), Compression::Gzip);
    Image::new([layer]).write_layout(&lazuli.path("source"), "x").unwrap();
    let mountpoint = lazuli.directory("mnt");
    let error = lazuli.fails(["mount", "oci:source:x", mountpoint.to_str().unwrap()]);
    assert!(error.contains("lazuli convert"), "{error}");
    assert_eq!(lazuli.status()["mounts"].as_array().unwrap().len(), 0);
    assert_eq!(std::fs::read_dir(lazuli.root().join("images")).unwrap().count(), 0);
}

/// Registries control the text that errors quote, and terminals obey control characters.
#[test]
fn errors_have_no_control_characters() {
    let (lazuli, registry) = (Lazuli::new(), FakeRegistry::start().unwrap());
    let kind = "x/\u{1b}]0;owned\u{7}\u{9b}31m";
    let raw = json!({ "schemaVersion": 2, "mediaType": kind });
    registry.put_manifest("app", "1", "application/json", raw.to_string().as_bytes());
    let error = lazuli.fails(["inspect", &format!("{}/app:1", registry.host())]);
    assert!(error.contains(r"\u001b]0;owned\u0007"), "{error:?}");
    assert!(error.chars().all(|c| c == '\n' || !c.is_control()), "{error:?}");
}

/// As a pager does that ends after the first line.
#[test]
fn a_closed_pipe_ends_the_command_silently() {
    let lazuli = Lazuli::new();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let output = lazuli.command(["convert", "--help"]).stdout(writer).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    fs::create_dir(lazuli.path("empty")).unwrap();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let convert = ["convert", "dir:empty", "oci:layout:1"];
    let output = lazuli.command(convert).stdout(writer).output().unwrap();
    assert_eq!(output.status.code(), Some(141), "{output:?}");
    assert!(!String::from_utf8_lossy(&output.stderr).contains("panicked"), "{output:?}");
}

#[test]
fn wrong_bytes_are_an_error_for_their_reader_only() {
    if !require(Feature::Root) || !require(Feature::Fuse) {
        return;
    }
    let lazuli = Lazuli::new();
    let source = lazuli.directory("source");
    std::fs::write(source.join("bad"), odd::random(1, 1 << 20)).unwrap();
    std::fs::write(source.join("good"), odd::random(2, 1 << 20)).unwrap();
    lazuli.ok(["convert", "dir:source", "oci:lazy:x"]);
    // The data blob is the largest; `bad` is its first file.
    let blobs = std::fs::read_dir(lazuli.path("lazy/blobs/sha256")).unwrap();
    let blob =
        blobs.map(|e| e.unwrap().path()).max_by_key(|p| p.metadata().unwrap().len()).unwrap();
    let mut bytes = std::fs::read(&blob).unwrap();
    bytes[1000] ^= 1;
    std::fs::write(&blob, bytes).unwrap();
    lazuli.configure("[fetch]\ndeadline_seconds = 2\n");
    for driver in drivers::here() {
        let mountpoint = lazuli.directory("mnt");
        lazuli.ok(["mount", "oci:lazy:x", mountpoint.to_str().unwrap(), "--driver", driver]);
        let error = std::fs::read(mountpoint.join("bad")).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(5), "{driver}: {error}");
        assert!(std::fs::read(mountpoint.join("good")).unwrap() == odd::random(2, 1 << 20));
        assert!(lazuli.log().contains("chunk"), "{}", lazuli.log());
        lazuli.ok(["umount", mountpoint.to_str().unwrap()]);
    }
}

/// A file system of its own, full soon; unmounted with the value.
struct SmallDisk(std::path::PathBuf);

impl SmallDisk {
    /// A tmpfs, or with `ext4` a file system that has pre-content events.
    fn new(lazuli: &Lazuli, name: &str, mebibytes: u64, ext4: bool) -> Self {
        let path = lazuli.directory(name);
        let (kind, source, options) = if ext4 {
            let file = lazuli.path(&format!("{name}.img"));
            std::fs::File::create(&file).unwrap().set_len(mebibytes << 20).unwrap();
            let mut mkfs = std::process::Command::new("mkfs.ext4");
            let made = mkfs.args(["-q", "-m", "0"]).arg(&file).status();
            assert!(made.expect("mkfs.ext4, part of every Debian").success());
            ("ext4", file, "loop".to_owned())
        } else {
            ("tmpfs", "tmpfs".into(), format!("size={mebibytes}m"))
        };
        let mut mount = std::process::Command::new("mount");
        mount.args(["-t", kind, "-o", &options]).arg(source).arg(&path);
        assert!(mount.status().unwrap().success());
        SmallDisk(path)
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[test]
fn a_full_disk_while_converting_leaves_nothing() {
    if !require(Feature::Root) {
        return;
    }
    let lazuli = Lazuli::new();
    let source = lazuli.directory("source");
    std::fs::write(source.join("file"), odd::random(1, 6 << 20)).unwrap();

    let scratch = SmallDisk::new(&lazuli, "scratch", 4, false);
    let mut convert = lazuli.command(["convert", "dir:source", "oci:target:x"]);
    let output = convert.env("TMPDIR", &scratch.0).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && error.contains("scratch"), "{error}");
    assert!(error.contains("No space left"), "{error}");
    assert_eq!(std::fs::read_dir(&scratch.0).unwrap().count(), 0);
    drop(scratch);

    // Two blobs: the first fits, the second does not.
    let layers = [1_u64, 2].map(|seed| {
        let tar = tar_of(&format!("file-{seed}"), &odd::random(seed, (seed as usize) * (2 << 20)));
        Layer::new(tar, Compression::None)
    });
    Image::new(layers).write_layout(&lazuli.path("two"), "x").unwrap();
    let target = SmallDisk::new(&lazuli, "target", 4, false);
    refused(&lazuli, "oci:two:x", &["target", "No space left"]);
    drop(target);
}

#[test]
fn a_full_cache_is_an_error_until_there_is_room() {
    if !require(Feature::Root) || !require(Feature::Fanotify) || !require(Feature::ErofsFileBacked)
    {
        return;
    }
    let lazuli = Lazuli::new();
    let source = lazuli.directory("source");
    std::fs::write(source.join("file"), odd::random(1, 12 << 20)).unwrap();
    lazuli.ok(["convert", "dir:source", "oci:lazy:x"]);
    // Readers wait that long for room.
    lazuli.configure("[fetch]\ndeadline_seconds = 2\n");
    let disk = SmallDisk::new(&lazuli, "root", 24, true);
    let ballast = disk.0.join("ballast");
    std::fs::write(&ballast, vec![1; 15 << 20]).unwrap();
    let mountpoint = lazuli.directory("mnt");
    lazuli.ok(["mount", "oci:lazy:x", mountpoint.to_str().unwrap(), "--driver", "fanotify"]);
    let error = std::fs::read(mountpoint.join("file")).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(5), "{error}");
    // Reported once; the log is on the same disk.
    assert!(lazuli.log().contains("is full"), "{}", lazuli.log());
    std::fs::remove_file(ballast).unwrap();
    assert!(std::fs::read(mountpoint.join("file")).unwrap() == odd::random(1, 12 << 20));
    lazuli.ok(["umount", mountpoint.to_str().unwrap()]);
    lazuli.ok(["stop"]);
    drop(disk);
}
