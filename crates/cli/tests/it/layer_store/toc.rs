//! Layers that clients name by the digests of their tables of contents.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use lazuli_image::{Algorithm, Digest};
use lazuli_testkit::{
    listing,
    oci::{Compression, Image, Layer},
    seekable::{self, Format, Options, storable},
    tarball,
};
use rustix::mount::{UnmountFlags, unmount};
use serde_json::json;

use super::{Scene, acquire, assert_missing, digest_of, entries, info, overlay, release};
use crate::{drivers::here, mount::unpack, numbered};

const FORMATS: [Format; 3] = [Format::Estargz, Format::StargzChunked, Format::ContainersChunked];

/// The layers of [`entries`] in a format.
fn seekable(format: Format) -> [Layer; 2] {
    let options = Options { chunk_size: 128 << 10, ..Options::new(format) };
    entries().map(|entries| {
        let entries: Vec<_> = entries.into_iter().filter_map(storable).collect();
        seekable::write(&entries, &options)
    })
}

/// The digest by which clients look up a layer: containers/storage's `toc.GetTOCDigest`.
fn toc_of(layer: &Layer) -> Digest {
    let names = [
        "containerd.io/snapshot/stargz/toc.digest",
        "io.github.containers.zstd-chunked.manifest-checksum",
    ];
    let mut notes = layer.annotations().iter();
    notes.find(|(name, _)| names.contains(name)).unwrap().1.parse().unwrap()
}

impl Scene {
    fn by_toc(&self, layer: &Layer) -> PathBuf {
        self.named(&self.name, &toc_of(layer))
    }
}

/// A layer whose name exists, but that cannot be used.
fn assert_unusable(layer: &Path) {
    for name in ["diff", "info", "blob"] {
        let error = fs::metadata(layer.join(name)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound, "{name} of {}", layer.display());
    }
}

#[test]
fn layers_are_those_that_their_tables_describe() {
    for (driver, format) in here().flat_map(|driver| FORMATS.map(|it| (driver, it))) {
        let own = seekable(format);
        let Some(scene) = Scene::of(driver, Image::new(own.clone())) else { return };
        let [lower, upper] = own.each_ref().map(|layer| scene.by_toc(layer));
        for (directory, layer) in [(&lower, &own[0]), (&upper, &own[1])] {
            let stored = layer.stored().unwrap();
            let expected = json!({
                "toc-digest": toc_of(layer).to_string(),
                "compressed-size": stored.len(),
                "diff-size": -1,
                "compression": if format == Format::Estargz { 2 } else { 4 },
                "flags": { "expected-layer-diffid": layer.diff_id().to_string() },
            });
            assert_eq!(info(directory), expected);
            assert!(fs::read(directory.join("blob")).unwrap() == stored);
        }
        let plain = entries().map(|entries| {
            let entries: Vec<_> = entries.into_iter().filter_map(storable).collect();
            Layer::new(tarball::write(&entries), Compression::Gzip)
        });
        let layout = scene.lazuli.path("plain");
        Image::new(plain).write_layout(&layout, "x").unwrap();
        let shown = overlay(&scene.lazuli, &[&lower, &upper]);
        listing::assert_equal(unpack(&layout, "x", &scene.lazuli), shown.clone());
        let status = scene.lazuli.status();
        assert_eq!(status["mounts"][0]["driver"], driver, "{status:#}");
        unmount(&shown, UnmountFlags::empty()).unwrap();
        assert_eq!(scene.registry.violations(), Vec::<String>::new());
    }
}

#[test]
fn each_table_names_its_own_layer() {
    for format in FORMATS {
        let own = seekable(format);
        let Some(scene) = Scene::of("auto", Image::new(own.clone())) else { return };
        let [lower, upper] = own.each_ref().map(|layer| scene.by_toc(layer));
        for (directory, own, other) in [(&lower, "b/x", "d"), (&upper, "d", "b/x")] {
            fs::symlink_metadata(directory.join("diff").join(own)).unwrap();
            assert!(fs::symlink_metadata(directory.join("diff").join(other)).is_err());
        }
        assert_missing(&scene.named(&scene.name, &Algorithm::Sha256.digest(b"another table")));
        assert_missing(&scene.named(&scene.name.replace("app", "other"), &toc_of(&own[0])));
        // No statement has the layers as stored.
        assert_missing(&scene.layer(&scene.name, &own[0]));
    }
}

#[test]
fn a_layer_with_another_table_than_its_image_says_is_not_shown() {
    for format in FORMATS {
        let [lower, upper] = seekable(format);
        let posing = Layer::stored_as(
            lower.tar.clone(),
            lower.stored().unwrap(),
            lower.media_type(),
            upper.annotations().to_vec(),
        );
        let Some(scene) = Scene::of("auto", Image::new([posing])) else { return };
        let upper = scene.by_toc(&upper);
        assert_unusable(&upper);
        // Counting it shows nothing.
        acquire(&upper);
        assert_unusable(&upper);
        release(&upper);
        assert_eq!(scene.mounted(), Vec::<PathBuf>::new());
        assert_missing(&scene.by_toc(&lower));
    }
}

#[test]
fn only_tables_that_the_node_believes_name_layers() {
    let own = seekable(Format::ContainersChunked);
    let Some(scene) = Scene::of("auto", Image::new(own.clone())) else { return };
    let [lower, upper] = own.each_ref().map(|layer| scene.by_toc(layer));
    for trust in ["nothing", "proven"] {
        scene.lazuli.ok(["stop"]);
        scene.configure("auto", trust);
        scene.start();
        assert_missing(&lower);
    }
    scene.lazuli.ok(["stop"]);
    scene.configure("auto", "repository");
    scene.start();
    fs::metadata(lower.join("diff")).unwrap();
    acquire(&lower);
    // It is not mounted again once the operator has changed his mind.
    let [mounted] = &scene.mounted()[..] else { panic!("one layer is mounted") };
    scene.lazuli.ok(["umount", mounted.to_str().unwrap()]);
    scene.lazuli.ok(["stop"]);
    scene.configure("auto", "proven");
    scene.start();
    assert_unusable(&lower);
    scene.lazuli.ok(["stop"]);
    scene.configure("auto", "signed");
    scene.start();
    fs::metadata(lower.join("diff")).unwrap();
    fs::write(scene.lazuli.path("policy.toml"), "default = 'reject'\n").unwrap();
    assert_unusable(&lower);
    assert_missing(&upper);
    release(&lower);
    assert_eq!(scene.mounted(), Vec::<PathBuf>::new());
}

/// By its digest as stored, a layer is what its tar says, and by that of its table what the table
/// says. The two differ.
#[test]
fn two_names_of_one_layer_are_counted_apart() {
    let own = seekable(Format::Estargz);
    let Some(scene) = Scene::of("auto", Image::new(own.clone())) else { return };
    scene.index();
    let (stored, toc) = (scene.layer(&scene.name, &own[0]), scene.by_toc(&own[0]));
    for (layer, has_table) in [(&stored, true), (&toc, false)] {
        numbered::read(&layer.join("diff"), 3).unwrap();
        assert_eq!(layer.join("diff/stargz.index.json").exists(), has_table);
        acquire(layer);
    }
    let [by_tar, by_table] = [&stored, &toc].map(|layer| info(layer));
    assert_eq!(by_tar["diff-digest"], own[0].diff_id().to_string());
    assert_eq!(by_tar["compressed-diff-digest"], digest_of(&own[0]).to_string());
    assert!(by_tar.get("toc-digest").is_none(), "{by_tar}");
    assert!(by_table.get("diff-digest").is_none(), "{by_table}");
    assert_eq!(scene.mounted().len(), 2);
    acquire(&toc);
    release(&stored);
    assert_eq!(scene.mounted().len(), 1);
    numbered::read(&toc.join("diff"), 4).unwrap();
    release(&toc);
    assert_eq!(scene.mounted().len(), 1);
    release(&toc);
    assert_eq!(scene.mounted(), Vec::<PathBuf>::new());
}

#[test]
fn a_layer_in_use_survives_workers_tags_and_registries() {
    let own = seekable(Format::ContainersChunked);
    let Some(scene) = Scene::of("auto", Image::new(own.clone())) else { return };
    let [lower, upper] = own.each_ref().map(|layer| scene.by_toc(layer));
    for layer in [&lower, &upper] {
        fs::metadata(layer.join("diff")).unwrap();
        acquire(layer);
    }
    let shown = overlay(&scene.lazuli, &[&lower, &upper]);
    numbered::read(&shown, 1).unwrap();
    assert_eq!(fs::read_to_string(shown.join("d")).unwrap(), "new");
    scene.lazuli.kill(scene.lazuli.worker());
    numbered::read(&shown, 2).unwrap();
    scene.lazuli.ok(["daemon", "--takeover"]);
    numbered::read(&shown, 3).unwrap();
    unmount(&shown, UnmountFlags::empty()).unwrap();
    // As after a reboot, without the registry, and with another image under the tag.
    for mountpoint in scene.mounted() {
        scene.lazuli.ok(["umount", mountpoint.to_str().unwrap()]);
    }
    scene.lazuli.ok(["stop"]);
    scene.lazuli.ok(["copy", "oci:nothing:1", &scene.name]);
    scene.start();
    scene.registry.go_away();
    let shown = overlay(&scene.lazuli, &[&lower, &upper]);
    numbered::read(&shown, 1).unwrap();
    assert_eq!(fs::read_to_string(shown.join("d")).unwrap(), "new");
    scene.registry.come_back();
    unmount(&shown, UnmountFlags::empty()).unwrap();
    release(&upper);
    release(&lower);
    assert_eq!(scene.mounted(), Vec::<PathBuf>::new());
    // The tag means something else by now.
    assert_missing(&lower);
    scene.lazuli.ok(["stop"]);
}
