//! Unpacking: directories, tars and ordinary images made from lazy ones.

use std::{
    fs::{self, File},
    os::unix::{ffi::OsStrExt as _, fs::symlink, net::UnixListener},
    path::Path,
    process::Command,
};

use lazuli_image::Algorithm;
use lazuli_testkit::{
    kernel::{Feature, require},
    listing, odd,
    registry::{FakeRegistry, Fault},
};
use serde_json::{Value, json};

use crate::lazuli::Lazuli;

fn run(command: &mut Command) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// The document of a layout that `descriptor` names.
fn document(layout: &Path, descriptor: &Value) -> Value {
    let digest = descriptor["digest"].as_str().unwrap().strip_prefix("sha256:").unwrap();
    serde_json::from_slice(&fs::read(layout.join("blobs/sha256").join(digest)).unwrap()).unwrap()
}

/// The only manifest of a layout, and its config.
fn documents(layout: &Path) -> [Value; 2] {
    let index: Value =
        serde_json::from_slice(&fs::read(layout.join("index.json")).unwrap()).unwrap();
    let manifest = document(layout, &index["manifests"][0]);
    let config = document(layout, &manifest["config"]);
    [manifest, config]
}

#[test]
fn every_odd_entry_comes_back() {
    if !require(Feature::Root) || !require(Feature::Program("umoci")) {
        return;
    }
    let lazuli = Lazuli::new();
    let (directory, extracted) = (lazuli.path("directory"), lazuli.directory("extracted"));
    odd::image().write_layout(&lazuli.path("source"), "odd").unwrap();
    lazuli.ok(["convert", "oci:source:odd", "oci:lazy:x"]);
    for target in ["directory", "tar:x.tar", "tar:again.tar", "oci:flat:x"] {
        lazuli.ok(["unpack", "oci:lazy:x", target]);
    }
    for plain in ["dir:directory", "tar:x.tar", "oci:flat:x"] {
        lazuli.ok(["check", "oci:lazy:x", "--against", plain]);
    }
    let tar = fs::read(lazuli.path("x.tar")).unwrap();
    assert!(tar == fs::read(lazuli.path("again.tar")).unwrap(), "not the same bytes");
    assert!(tar == lazuli.output(["unpack", "oci:lazy:x", "tar:-"]).stdout, "not the same bytes");

    // Other tools read the output.
    let file = lazuli.path("x.tar");
    let mut gnu = Command::new("tar");
    run(gnu.args(["--xattrs", "--xattrs-include=*", "-xpf"]).arg(file).arg("-C").arg(&extracted));
    listing::assert_equal(&directory, extracted);
    let mut umoci = Command::new("umoci");
    let layout = format!("{}:x", lazuli.path("flat").display());
    run(umoci.args(["unpack", "--image", &layout]).arg(lazuli.path("bundle")));
    listing::assert_equal(&directory, lazuli.path("bundle/rootfs"));
}

#[test]
fn disputed_entries_come_back() {
    if !require(Feature::Root) {
        return;
    }
    let lazuli = Lazuli::new();
    let (image, expected) = odd::extra();
    image.write_layout(&lazuli.path("source"), "x").unwrap();
    lazuli.ok(["convert", "oci:source:x", "oci:lazy:x"]);
    lazuli.ok(["unpack", "oci:lazy:x", "new/directory"]);
    let found = listing::list(&lazuli.path("new/directory")).unwrap();
    assert_eq!(found.to_string(), expected);
}

#[test]
fn an_ordinary_image_keeps_its_config() {
    let lazuli = Lazuli::new();
    let mut image = odd::extra().0;
    image.config["history"] = json!([{ "created_by": "RUN one" }, { "created_by": "RUN two" }]);
    image.config["architecture"] = json!("arm64");
    image.write_layout(&lazuli.path("source"), "x").unwrap();
    lazuli.ok(["convert", "oci:source:x", "oci:lazy:x"]);
    lazuli.ok(["unpack", "oci:lazy:x", "oci:flat:app-1"]);
    let [manifest, config] = documents(&lazuli.path("flat"));
    let [_, before] = documents(&lazuli.path("source"));
    assert_eq!(config["config"], before["config"]);
    assert_eq!(config["architecture"], "arm64");
    let history = config["history"].as_array().unwrap();
    let layers = history.iter().filter(|step| step["empty_layer"] != true).count();
    assert_eq!((history.len(), layers), (3, 1), "{history:#?}");
    assert_eq!(manifest["layers"].as_array().unwrap().len(), 1);
    assert!(manifest["annotations"].is_null(), "{manifest:#}");
    // Its tar equals the output of `tar:`.
    lazuli.ok(["unpack", "oci:lazy:x", "tar:x.tar"]);
    let tar = fs::read(lazuli.path("x.tar")).unwrap();
    assert_eq!(config["rootfs"]["diff_ids"], json!([Algorithm::Sha256.digest(&tar)]));
}

#[test]
fn sockets_and_whiteout_names_are_unpacked_where_the_target_has_them() {
    if !require(Feature::Root) {
        return;
    }
    let lazuli = Lazuli::new();
    let source = lazuli.directory("source");
    drop(UnixListener::bind(source.join("a socket")).unwrap());
    fs::hard_link(source.join("a socket"), source.join("again")).unwrap();
    fs::write(source.join("file"), "x").unwrap();
    lazuli.ok(["convert", "dir:source", "oci:lazy:x"]);
    lazuli.ok(["unpack", "oci:lazy:x", "directory"]);
    listing::assert_equal(&source, lazuli.path("directory"));
    let said = lazuli.ok(["unpack", "oci:lazy:x", "tar:x.tar"]);
    assert!(said.contains("sockets") && said.contains("/a socket /again"), "{said}");
    let error = lazuli.fails(["check", "oci:lazy:x", "--against", "tar:x.tar"]);
    assert_eq!(error.lines().filter(|line| line.contains("only in the first")).count(), 2);

    fs::write(source.join(".wh.file"), "a name like others").unwrap();
    lazuli.ok(["convert", "dir:source", "oci:lazy:x"]);
    lazuli.ok(["unpack", "oci:lazy:x", "other"]);
    listing::assert_equal(&source, lazuli.path("other"));
    let error = lazuli.fails(["unpack", "oci:lazy:x", "oci:flat:x"]);
    assert!(error.contains("/.wh.file"), "{error}");
    assert!(!lazuli.path("flat").exists());
}

#[test]
fn an_unusable_target_is_refused_by_name() {
    let lazuli = Lazuli::new();
    fs::write(lazuli.directory("source").join("file"), "x").unwrap();
    lazuli.ok(["convert", "dir:source", "oci:lazy:x"]);
    fs::write(lazuli.directory("full").join("there"), "x").unwrap();
    for (target, word) in [
        ("full", "not empty"),
        ("full/there", "full/there"),
        ("tar:", "tar:rootfs.tar"),
        ("tar:no/such/x.tar", "no/such"),
        ("tar:full", "full"),
        ("oci:flat:", "`:`"),
        ("", "path"),
    ] {
        let error = lazuli.fails(["unpack", "oci:lazy:x", target]);
        assert!(error.contains(word), "{target}: {error}");
    }
    let layer = lazuli_testkit::oci::Layer::new(
        crate::mount::tar_of("file", b"x"),
        lazuli_testkit::oci::Compression::Gzip,
    );
    lazuli_testkit::oci::Image::new([layer]).write_layout(&lazuli.path("plain"), "x").unwrap();
    let error = lazuli.fails(["unpack", "oci:plain:x", "tar:x.tar"]);
    assert!(error.contains("lazuli convert") && !lazuli.path("x.tar").exists(), "{error}");
    // A file is replaced, even behind a symbolic link; a device or pipe is written to.
    fs::write(lazuli.path("old.tar"), "old").unwrap();
    symlink("old.tar", lazuli.path("link.tar")).unwrap();
    lazuli.ok(["unpack", "oci:lazy:x", "tar:link.tar"]);
    lazuli.ok(["unpack", "oci:lazy:x", "tar:/dev/null"]);
    assert!(lazuli.path("link.tar").is_symlink());
    lazuli.ok(["check", "oci:lazy:x", "--against", "tar:old.tar"]);
}

/// The content of a directory, without the tests' own files.
fn left(lazuli: &Lazuli) -> Vec<String> {
    let known = ["config.toml", "source", "root"];
    let names = fs::read_dir(lazuli.path("")).unwrap();
    let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| !known.contains(&name.as_str())).collect()
}

#[test]
fn wrong_bytes_leave_nothing() {
    let lazuli = Lazuli::new();
    let source = lazuli.directory("source");
    for number in 0..30 {
        fs::write(source.join(format!("file-{number:02}")), odd::random(number, 1 << 20)).unwrap();
    }
    let registry = FakeRegistry::start().unwrap();
    let image = format!("{}/app:1", registry.host());
    lazuli.ok(["convert", "dir:source", &image]);
    let manifest: Value = serde_json::from_slice(&registry.manifest("app", "1").unwrap()).unwrap();
    let blob = manifest["layers"][0]["digest"].as_str().unwrap();
    for target in ["tar:x.tar", "oci:flat:x"] {
        registry.fault("GET", blob, 1000, Fault::WrongBytes);
        let mut unpack = lazuli.command(["unpack", &image, target]);
        let output = unpack.env("TMPDIR", lazuli.path("")).output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{error}");
        assert!(error.contains(blob) && error.contains("chunk "), "{error}");
        assert_eq!(left(&lazuli), [""; 0], "{target}");
        registry.clear_faults();
    }
    // Transient faults are waited out.
    registry.fault("GET", blob, 3, Fault::Status(503));
    registry.fault("GET", blob, 1, Fault::TruncateAfter(1000));
    registry.reset_stats();
    lazuli.ok(["unpack", &image, "tar:x.tar"]);
    lazuli.ok(["check", &image, "--against", "tar:x.tar"]);
    assert_eq!(registry.violations(), [""; 0]);
    // Large ranges: 30 MiB in windows of 8, and the four that failed.
    let asked = registry
        .log()
        .iter()
        .filter(|it| it.bytes().is_some_and(|it| it.end - it.start >= 7 << 20))
        .count();
    assert!((4..=8).contains(&asked), "{asked}");
}

#[test]
fn a_path_that_leaves_the_directory_is_refused() {
    let lazuli = Lazuli::new();
    fs::write(lazuli.directory("source").join("victim"), "x").unwrap();
    lazuli.ok(["convert", "dir:source", "oci:lazy:x"]);
    let layout = lazuli.path("lazy");
    let blobs = layout.join("blobs/sha256");
    let index = fs::read_to_string(layout.join("index.json")).unwrap();
    let mut index: Value = serde_json::from_str(&index).unwrap();
    let mut manifest = document(&layout, &index["manifests"][0]);
    let bootstrap = manifest["layers"].as_array_mut().unwrap().last_mut().unwrap();
    let file = bootstrap["digest"].as_str().unwrap().strip_prefix("sha256:").unwrap();
    let mut tar = zstd::decode_all(File::open(blobs.join(file)).unwrap()).unwrap();
    let at = tar.windows(6).position(|bytes| bytes == b"victim").unwrap();
    tar[at..at + 6].copy_from_slice(b"../../");
    let put = |content: &[u8]| {
        let digest = Algorithm::Sha256.digest(content);
        fs::write(blobs.join(digest.hex()), content).unwrap();
        (json!(digest), json!(content.len()))
    };
    (bootstrap["digest"], bootstrap["size"]) = put(&zstd::bulk::compress(&tar, 1).unwrap());
    let entry = &mut index["manifests"][0];
    (entry["digest"], entry["size"]) = put(manifest.to_string().as_bytes());
    fs::write(layout.join("index.json"), index.to_string()).unwrap();
    for target in ["directory", "tar:x.tar", "oci:flat:x"] {
        let error = lazuli.fails(["unpack", "oci:lazy:x", target]);
        assert!(error.contains("no valid name"), "{error}");
        assert_eq!(left(&lazuli), ["lazy"]);
    }
}

#[test]
fn paths_that_are_not_utf_8_come_back() {
    let lazuli = Lazuli::new();
    let source = lazuli.directory("source");
    let mut deep = source.clone();
    for part in 0..6 {
        deep.push(std::ffi::OsStr::from_bytes(&[&[0xff; 200][..], &[b'0' + part]].concat()));
        fs::create_dir(&deep).unwrap();
    }
    fs::write(deep.join("bottom"), "x").unwrap();
    lazuli.ok(["convert", "dir:source", "oci:lazy:x"]);
    lazuli.ok(["unpack", "oci:lazy:x", "tar:x.tar"]);
    lazuli.ok(["check", "oci:lazy:x", "--against", "tar:x.tar"]);
}
