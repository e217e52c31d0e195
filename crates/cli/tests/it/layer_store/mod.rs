//! The layer store that podman finds layers in, by the names that it looks up.

mod toc;

use std::{
    fs::{self, DirBuilder, File},
    io,
    os::{
        fd::AsRawFd as _,
        unix::fs::{DirBuilderExt as _, MetadataExt as _},
    },
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use lazuli_image::{Algorithm, Digest};
use lazuli_testkit::{
    kernel::{Feature, require},
    listing,
    oci::{Compression, Image, Layer},
    registry::{FakeRegistry, Fault},
    tarball::{self, Entry},
};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use serde_json::{Value, json};

use crate::{drivers::here, lazuli::Lazuli, mount::unpack, numbered, policy::signer::Signer};

/// A node whose layer store may show the layers of an indexed image in a registry.
struct Scene {
    lazuli: Lazuli,
    registry: FakeRegistry,
    name: String,
    key: Signer,
}

/// The entries of two layers that list their directories; the upper one hides files of the lower
/// one.
fn entries() -> [Vec<Entry>; 2] {
    let dir = |path: &str, mode| Entry::directory(path).mode(mode);
    let mut lower = vec![dir(".", 0o755), dir("a", 0o750), dir("b", 0o700), dir("c", 0o711)];
    lower.extend(["a/x", "a/y", "b/x", "c/x"].map(|path| Entry::file(path, path)));
    lower.extend(numbered::files());
    lower.push(Entry::hard_link("a/link", "file0"));
    let upper = vec![
        dir(".", 0o755),
        dir("a", 0o751),
        Entry::file("a/.wh.x", ""),
        Entry::file("a/z", "new"),
        dir("b", 0o701),
        Entry::file("b/.wh..wh..opq", ""),
        Entry::file("b/z", "new"),
        Entry::file(".wh.c", ""),
        Entry::symlink("d", "a/z"),
    ];
    [lower, upper]
}

/// The layers of these entries.
fn layers() -> [Layer; 2] {
    let [lower, upper] = entries().map(|entries| tarball::write(&entries));
    [Layer::new(lower, Compression::Gzip), Layer::new(upper, Compression::None)]
}

impl Scene {
    fn new(driver: &str) -> Option<Self> {
        Self::of(driver, Image::new(layers()))
    }

    /// The same with another image.
    fn of(driver: &str, image: Image) -> Option<Self> {
        if !require(Feature::Root) || !require(Feature::Fuse) {
            return None;
        }
        if !require(Feature::Program("openssl")) || !require(Feature::Program("umoci")) {
            return None;
        }
        let (lazuli, registry) = (Lazuli::new(), FakeRegistry::start().unwrap());
        image.write_layout(&lazuli.path("source"), "x").unwrap();
        let name = format!("{}/app:1", registry.host());
        lazuli.ok(["copy", "oci:source:x", &name]);
        let key = Signer::new(&lazuli.directory(""), "key");
        let policy = lazuli.path("policy.toml");
        let rule = format!("default = {{ accept = true, statements = [{:?}] }}", key.public());
        fs::write(&policy, rule).unwrap();
        let scene = Scene { lazuli, registry, name, key };
        scene.configure(driver, "signed");
        scene.start();
        Some(scene)
    }

    /// Writes the node's configuration.
    fn configure(&self, driver: &str, trust: &str) {
        let [policy, directory] = ["policy.toml", "layers"].map(|name| self.lazuli.path(name));
        self.lazuli.configure_all(&format!(
            "policy = {policy:?}\n[layers]\ndirectory = {directory:?}\ndriver = '{driver}'\n\
             [prefetch]\nahead = 'nothing'\nrest_bytes_per_second = 0\n\
             [index]\ntrust = '{trust}'\n"
        ));
    }

    /// Starts the daemon, by a command that needs it.
    fn start(&self) {
        let empty = self.lazuli.directory("empty");
        self.lazuli.ok(["convert", "dir:empty", "oci:nothing:1"]);
        self.lazuli.ok(["mount", "oci:nothing:1", empty.to_str().unwrap()]);
        self.lazuli.ok(["umount", empty.to_str().unwrap()]);
    }

    fn index(&self) {
        self.lazuli.ok(["index", &self.name, "--sign", self.key.private().to_str().unwrap()]);
    }

    /// An image in the same repository that has another DiffID for a layer in its configuration.
    fn claiming(&self, layer: &Layer) -> String {
        let repository = "app";
        let mut config = Image::new([]).config;
        let other = Algorithm::Sha256.digest(b"another tar").to_string();
        config["rootfs"] = json!({ "type": "layers", "diff_ids": [other] });
        let config = config.to_string();
        let kinds = ["config.v1+json", "manifest.v1+json"];
        let [kind, media_type] = kinds.map(|kind| format!("application/vnd.oci.image.{kind}"));
        let size = layer.stored().unwrap().len();
        let digest = self.registry.put_blob(repository, config.as_bytes()).to_string();
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": media_type,
            "config": { "mediaType": kind, "digest": digest, "size": config.len() },
            "layers": [{
                "mediaType": layer.media_type(), "digest": digest_of(layer).to_string(), "size": size,
            }],
        });
        self.registry.put_manifest(repository, "2", &media_type, manifest.to_string().as_bytes());
        self.name.replace("app:1", "app:2")
    }

    /// The directory of a layer of an image.
    fn layer(&self, image: &str, layer: &Layer) -> PathBuf {
        self.named(image, &digest_of(layer))
    }

    fn named(&self, image: &str, layer: &Digest) -> PathBuf {
        self.lazuli.path("layers").join(BASE64_STANDARD.encode(image)).join(layer.to_string())
    }

    /// Where layers are mounted.
    fn mounted(&self) -> Vec<PathBuf> {
        let status = self.lazuli.status();
        let mounts = status["mounts"].as_array().unwrap();
        mounts.iter().map(|mount| mount["mountpoint"].as_str().unwrap().into()).collect()
    }
}

/// The digest of a layer as stored.
fn digest_of(layer: &Layer) -> Digest {
    Algorithm::Sha256.digest(&layer.stored().unwrap())
}

/// Names a layer that is in use, as containers/storage does.
fn acquire(layer: &Path) {
    let error = File::create(layer.join("use")).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::NotFound);
}

fn release(layer: &Path) {
    assert_eq!(fs::remove_dir(layer).unwrap_err().kind(), io::ErrorKind::NotFound);
}

/// A name that stands for no layer.
fn assert_missing(layer: &Path) {
    for name in ["", "diff", "info", "blob"] {
        let error = fs::metadata(layer.join(name)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound, "{}", layer.display());
    }
    release(layer);
}

fn info(layer: &Path) -> Value {
    serde_json::from_slice(&fs::read(layer.join("info")).unwrap()).unwrap()
}

/// An overlay of layers, lowest first.
fn overlay(lazuli: &Lazuli, layers: &[&Path]) -> PathBuf {
    let target = lazuli.directory("overlay");
    // Names of layers have colons, which separate directories here: by links, as podman does.
    let link = |(number, layer): (usize, &&Path)| {
        let link = lazuli.path(&format!("l{number}"));
        let _ = fs::remove_file(&link);
        std::os::unix::fs::symlink(layer.join("diff"), &link).unwrap();
        link.display().to_string()
    };
    let lower: Vec<_> = layers.iter().enumerate().map(link).rev().collect();
    let options = std::ffi::CString::new(format!("lowerdir={}", lower.join(":"))).unwrap();
    mount("overlay", &target, "overlay", MountFlags::RDONLY, Some(options.as_c_str())).unwrap();
    target
}

#[test]
fn layers_are_those_that_a_client_would_unpack() {
    for driver in here() {
        let Some(scene) = Scene::new(driver) else { return };
        scene.index();
        let [lower, upper] = layers().map(|layer| scene.layer(&scene.name, &layer));
        for (directory, layer, compression) in
            [(&lower, &layers()[0], Value::from(2)), (&upper, &layers()[1], Value::Null)]
        {
            let stored = layer.stored().unwrap();
            let found = info(directory);
            let digest = Algorithm::Sha256.digest(&stored).to_string();
            assert_eq!(found["compressed-diff-digest"], digest, "{found}");
            assert_eq!(found["compressed-size"], stored.len(), "{found}");
            assert_eq!(found["diff-digest"], layer.diff_id().to_string(), "{found}");
            assert_eq!(found["diff-size"], layer.tar.len(), "{found}");
            assert_eq!(found["compression"], compression, "{found}");
            assert_eq!(fs::metadata(directory.join("blob")).unwrap().size(), stored.len() as u64);
            assert!(fs::read(directory.join("blob")).unwrap() == stored);
        }
        let whiteout = fs::symlink_metadata(upper.join("diff/c")).unwrap();
        assert_eq!((whiteout.mode() & 0o170_000, whiteout.rdev()), (0o020_000, 0), "{driver}");
        let shown = overlay(&scene.lazuli, &[&lower, &upper]);
        let expected = unpack(&scene.lazuli.path("source"), "x", &scene.lazuli);
        listing::assert_equal(expected, shown.clone());
        let status = scene.lazuli.status();
        assert_eq!(status["mounts"][0]["driver"], driver, "{status:#}");
        unmount(&shown, UnmountFlags::empty()).unwrap();
        assert_eq!(scene.registry.violations(), Vec::<String>::new());
    }
}

#[test]
fn only_stated_layers_exist() {
    let Some(scene) = Scene::new("auto") else { return };
    let [layer, _] = layers();
    let own = scene.layer(&scene.name, &layer);
    assert_missing(&own);
    // An index without a statement, and one by another key.
    scene.lazuli.ok(["index", &scene.name]);
    assert_missing(&own);
    let evil = Signer::new(&scene.lazuli.directory(""), "evil");
    scene.lazuli.ok(["index", &scene.name, "--sign", evil.private().to_str().unwrap()]);
    // What was not found is looked for again, by a worker that does not remember.
    scene.lazuli.kill(scene.lazuli.worker());
    assert_missing(&own);
    scene.index();
    scene.lazuli.kill(scene.lazuli.worker());
    assert_eq!(info(&own)["diff-digest"], layer.diff_id().to_string());
    for (image, layer) in [
        (scene.name.as_str(), Algorithm::Sha256.digest(b"another layer")),
        (&scene.name.replace("app", "other"), Algorithm::Sha256.digest(&layer.stored().unwrap())),
        ("oci:source:x", Algorithm::Sha256.digest(&layer.stored().unwrap())),
        ("no name", Algorithm::Sha256.digest(b"")),
    ] {
        assert_missing(&scene.named(image, &layer));
    }
    assert_missing(&scene.named(&scene.claiming(&layer), &digest_of(&layer)));
    let store = scene.lazuli.path("layers");
    assert_eq!(fs::read_dir(&store).unwrap().count(), 0);
    assert_eq!(fs::metadata(&store).unwrap().mode() & 0o7777, 0o700);
    assert!(fs::metadata(store.join("not base64")).is_err());
    assert!(DirBuilder::new().mode(0o700).create(store.join("x")).is_err());
    assert!(File::create(own.join("other")).is_err());
}

#[test]
fn a_layer_in_use_survives_workers_tags_and_registries() {
    let Some(scene) = Scene::new("auto") else { return };
    scene.index();
    let [lower, upper] = layers().map(|layer| scene.layer(&scene.name, &layer));
    for layer in [&lower, &upper] {
        fs::metadata(layer.join("diff")).unwrap();
        // The pull, and the layer in the storage; the pull ends.
        acquire(layer);
        acquire(layer);
        release(layer);
    }
    let shown = overlay(&scene.lazuli, &[&lower, &upper]);
    numbered::read(&shown, 1).unwrap();
    assert_eq!(fs::read_to_string(shown.join("d")).unwrap(), "new");
    let open = File::open(lower.join("info")).unwrap();
    scene.lazuli.kill(scene.lazuli.worker());
    numbered::read(&shown, 2).unwrap();
    assert_eq!(io::read_to_string(open).unwrap(), fs::read_to_string(lower.join("info")).unwrap());
    assert_eq!(scene.mounted().len(), 2);
    scene.lazuli.ok(["daemon", "--takeover"]);
    fs::metadata(lower.join("diff")).unwrap();
    unmount(&shown, UnmountFlags::empty()).unwrap();
    // As after a reboot, without the registry, and with another image under the tag.
    for mountpoint in scene.mounted() {
        scene.lazuli.ok(["umount", mountpoint.to_str().unwrap()]);
    }
    scene.lazuli.ok(["stop"]);
    assert!(fs::metadata(&lower).is_err());
    scene.lazuli.ok(["copy", "oci:nothing:1", &scene.name]);
    scene.start();
    scene.registry.go_away();
    let shown = overlay(&scene.lazuli, &[&lower, &upper]);
    numbered::read(&shown, 1).unwrap();
    assert_eq!(fs::read_to_string(shown.join("d")).unwrap(), "new");
    scene.registry.come_back();
    // The last user goes while the overlay is still mounted.
    release(&upper);
    release(&lower);
    assert_eq!(scene.mounted(), Vec::<PathBuf>::new());
    numbered::read(&shown, 3).unwrap();
    unmount(&shown, UnmountFlags::empty()).unwrap();
    // The tag means something else by now.
    assert!(fs::metadata(&lower).is_err());
    scene.lazuli.ok(["stop"]);
}

#[test]
fn a_changed_policy_shows_no_layer_any_more() {
    let Some(scene) = Scene::new("auto") else { return };
    scene.index();
    let [layer, _] = layers().map(|layer| scene.layer(&scene.name, &layer));
    fs::metadata(layer.join("diff")).unwrap();
    acquire(&layer);
    fs::write(scene.lazuli.path("policy.toml"), "default = 'reject'\n").unwrap();
    for name in ["diff", "info", "blob"] {
        assert!(fs::metadata(layer.join(name)).is_err(), "{name}");
    }
    release(&layer);
    assert_eq!(scene.mounted(), Vec::<PathBuf>::new());
}

/// Layers of a registry that does not answer do not exist, soon enough for a pull by podman.
fn is_given_up(scene: &Scene) {
    let [lower, upper] = layers().map(|layer| scene.layer(&scene.name, &layer));
    let began = Instant::now();
    assert!(fs::metadata(lower.join("diff")).is_err());
    assert!(began.elapsed() < Duration::from_secs(25));
    // It is not asked again for the next layer.
    let began = Instant::now();
    assert!(fs::metadata(upper.join("diff")).is_err());
    assert!(began.elapsed() < Duration::from_secs(1));
}

#[test]
fn a_registry_that_is_away_is_given_up() {
    let Some(scene) = Scene::new("auto") else { return };
    scene.index();
    scene.registry.go_away();
    is_given_up(&scene);
    scene.registry.come_back();
}

#[test]
fn a_registry_that_hangs_is_given_up() {
    let Some(scene) = Scene::new("auto") else { return };
    scene.index();
    scene.registry.fault("", "", 1000, Fault::Hang(Duration::from_secs(30)));
    is_given_up(&scene);
    scene.registry.clear_faults();
}

#[test]
fn a_layer_whose_index_is_wrong_is_not_shown_any_more() {
    let Some(scene) = Scene::new("auto") else { return };
    scene.index();
    let [layer, _] = layers().map(|layer| scene.layer(&scene.name, &layer));
    fs::metadata(layer.join("diff")).unwrap();
    acquire(&layer);
    // As the worker notes it that has checked the whole layer.
    let indexes = scene.lazuli.root().join("indexes");
    for index in fs::read_dir(indexes.join("blobs")).unwrap() {
        fs::write(indexes.join("wrong").join(index.unwrap().file_name()), "").unwrap();
    }
    for name in ["diff", "info", "blob"] {
        assert!(fs::metadata(layer.join(name)).is_err(), "{name}");
    }
    release(&layer);
    assert_eq!(scene.mounted(), Vec::<PathBuf>::new());
    assert!(fs::metadata(&layer).is_err());
}

#[test]
fn a_layer_that_was_removed_is_found_again_by_its_user() {
    let Some(scene) = Scene::new("auto") else { return };
    scene.index();
    let [layer, _] = layers().map(|layer| scene.layer(&scene.name, &layer));
    fs::metadata(layer.join("diff")).unwrap();
    let directory = File::open(&layer).unwrap();
    acquire(&layer);
    release(&layer);
    assert_eq!(scene.mounted(), Vec::<PathBuf>::new());
    let path = format!("/proc/self/fd/{}", directory.as_raw_fd());
    for _ in 0..2 {
        acquire(Path::new(&path));
    }
    release(&layer);
    fs::metadata(layer.join("diff")).unwrap();
    assert_eq!(scene.mounted().len(), 1);
    release(&layer);
    assert_eq!(scene.mounted(), Vec::<PathBuf>::new());
}
