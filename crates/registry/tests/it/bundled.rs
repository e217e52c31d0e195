//! Repositories of which some images are in a bundle.

use std::{
    fs,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use lazuli_image::{Digest, oci::media_type};
use lazuli_registry::{Bundle, Copy, ImageName, Layout, Options, Repository, Selector};
use lazuli_testkit::registry::{FakeRegistry, Fault};
use serde_json::json;

use crate::support::{manifest, noise, options, read, sha256};

/// A registry, and a bundle with one of its images.
struct Scene {
    registry: FakeRegistry,
    directory: tempfile::TempDir,
    layer: Vec<u8>,
    raw: Vec<u8>,
}

impl Scene {
    async fn new() -> Self {
        let (registry, layer) = (FakeRegistry::start().unwrap(), noise(100_000, 3));
        let raw = manifest(b"{}", &[&layer]);
        put(&registry, "app", "1", &layer);
        let directory = tempfile::tempdir().unwrap();
        let scene = Scene { registry, directory, layer, raw };
        scene.bundle("app:1").await;
        scene.registry.reset_stats();
        scene
    }

    fn name(&self, image: &str) -> ImageName {
        format!("{}/{image}", self.registry.host()).parse().unwrap()
    }

    async fn bundle(&self, image: &str) {
        let name = self.name(image);
        let from = lazuli_registry::open(&name, &options()).unwrap();
        let ImageName::Registry(reference) = name else { panic!() };
        let to = Layout::open(Bundle::at(self.directory.path()).entry(&reference));
        Copy::plan(from, None).await.unwrap().run(&to, None, &|_| {}).await.unwrap();
    }

    fn open(&self, image: &str) -> Arc<dyn Repository> {
        let bundle = Some(Bundle::at(self.directory.path()));
        lazuli_registry::open(&self.name(image), &Options { bundle, ..options() }).unwrap()
    }

    fn blob(&self, content: &[u8]) -> std::path::PathBuf {
        self.directory.path().join("blobs/sha256").join(sha256(content).hex())
    }
}

fn put(registry: &FakeRegistry, repository: &str, tag: &str, layer: &[u8]) -> Digest {
    registry.put_blob(repository, layer);
    registry.put_blob(repository, b"{}");
    let raw = manifest(b"{}", &[layer]);
    registry.put_manifest(repository, tag, media_type::MANIFEST, &raw)
}

#[tokio::test]
async fn an_image_needs_no_registry() {
    let scene = Scene::new().await;
    scene.registry.go_away();
    let image = scene.open("app:1");
    assert_eq!(image.manifest(None).await.unwrap().raw, scene.raw);
    assert!(image.has_blob(&sha256(&scene.layer)).await.unwrap());
    assert_eq!(image.blob_size(&sha256(&scene.layer)).await.unwrap(), 100_000);
    assert!(read(&*image, &scene.layer, 5..9000).await.unwrap() == scene.layer[5..9000]);
    assert_eq!(image.referrers(&sha256(&scene.raw), None).await.unwrap(), []);
    let pinned = scene.open(&format!("app@{}", sha256(&scene.raw)));
    assert_eq!(pinned.document(None).await.unwrap().raw, scene.raw);
    // What it lacks stays the registry's to deliver.
    let lost = image.has_blob(&sha256(b"other")).await.unwrap_err();
    assert!(lost.is_transient(), "{lost}");
    assert!(scene.open("app:2").manifest(None).await.unwrap_err().is_transient());
}

#[tokio::test]
async fn the_registry_decides_while_it_answers() {
    let scene = Scene::new().await;
    let image = scene.open("app:1");
    let other = noise(50_000, 4);
    let moved = put(&scene.registry, "app", "1", &other);
    assert_eq!(image.manifest(None).await.unwrap().digest, moved);
    assert!(image.has_blob(&sha256(&other)).await.unwrap());
    assert!(read(&*image, &other, 0..9).await.unwrap() == other[..9]);
    // A client that may not see a blob does not get it from the bundle either.
    let layer = sha256(&scene.layer);
    scene.registry.fault("", &layer.to_string(), 2, Fault::Status(404));
    assert!(!image.has_blob(&layer).await.unwrap());
    scene.registry.fault("", "manifests/1", 1, Fault::Status(404));
    assert!(image.manifest(None).await.unwrap_err().is_missing());
    // Content needs no decision.
    scene.registry.reset_stats();
    read(&*image, &scene.layer, 0..9).await.unwrap();
    scene.open(&format!("app@{}", sha256(&scene.raw))).manifest(None).await.unwrap();
    assert_eq!(scene.registry.stats().requests, 0);
}

#[tokio::test]
async fn a_registry_that_hangs_costs_seconds_once() {
    let scene = Scene::new().await;
    let hang = Duration::from_secs(60);
    scene.registry.fault("", "", 100, Fault::Hang(hang));
    let image = scene.open("app:1");
    let started = Instant::now();
    for _ in 0..20 {
        assert_eq!(image.manifest(None).await.unwrap().raw, scene.raw);
    }
    assert!(started.elapsed() < hang / 2, "{:?}", started.elapsed());
    assert!(scene.registry.stats().requests < 10);
}

#[tokio::test]
async fn other_repositories_get_nothing_from_the_bundle() {
    let scene = Scene::new().await;
    put(&scene.registry, "app2", "1", b"other");
    scene.registry.go_away();
    let pinned = scene.open(&format!("app2@{}", sha256(&scene.raw)));
    assert!(pinned.document(None).await.is_err());
    assert!(pinned.has_blob(&sha256(&scene.layer)).await.is_err());
    assert!(read(&*scene.open("app2:1"), &scene.layer, 0..9).await.is_err());
}

#[tokio::test]
async fn damaged_content_comes_from_the_registry() {
    let scene = Scene::new().await;
    fs::write(scene.blob(&scene.raw), "{}").unwrap();
    fs::remove_file(scene.blob(&scene.layer)).unwrap();
    let pinned = scene.open(&format!("app@{}", sha256(&scene.raw)));
    assert_eq!(pinned.document(None).await.unwrap().raw, scene.raw);
    assert!(read(&*pinned, &scene.layer, 0..9).await.unwrap() == scene.layer[..9]);
    for index in ["", "{}", "[[", r#"{"schemaVersion":2,"manifests":[1]}"#] {
        fs::write(scene.directory.path().join("index.json"), index).unwrap();
        assert_eq!(scene.open("app:1").manifest(None).await.unwrap().raw, scene.raw, "{index}");
    }
}

#[tokio::test]
async fn one_platform_is_copied() {
    let scene = Scene::new().await;
    let registry = &scene.registry;
    let entry = |architecture: &str| {
        let layer = noise(1000, architecture.len() as u32);
        let digest = put(registry, "many", architecture, &layer);
        let size = manifest(b"{}", &[&layer]).len();
        json!({"mediaType": media_type::MANIFEST, "digest": digest, "size": size,
            "platform": {"os": "linux", "architecture": architecture}})
    };
    let raw = json!({"schemaVersion": 2, "mediaType": media_type::INDEX,
        "manifests": [entry("amd64"), entry("riscv64")]});
    let raw = raw.to_string().into_bytes();
    registry.put_manifest("many", "1", media_type::INDEX, &raw);
    let from = lazuli_registry::open(&scene.name("many:1"), &options()).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let name = |image| lazuli_registry::LayoutName {
        directory: Path::new(directory.path()).to_owned(),
        image: Some(image),
    };
    let to = Layout::open(name(Selector::Tag("many".to_owned())));
    let wanted = "linux/riscv64".parse().unwrap();
    Copy::plan(from, Some(wanted)).await.unwrap().run(&to, None, &|_| {}).await.unwrap();
    let blobs = fs::read_dir(directory.path().join("blobs/sha256")).unwrap().count();
    // The index, a manifest, its configuration and its layer.
    assert_eq!(blobs, 4);
}
