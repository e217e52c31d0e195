//! Repositories of which some images are in a bundle.

use std::{
    collections::BTreeMap,
    fs,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use lazuli_image::{
    Digest,
    oci::{Descriptor, media_type},
};
use lazuli_registry::{Bundle, Copy, ImageName, Layout, Options, Pull as _, Repository, Selector};
use lazuli_testkit::registry::{FakeRegistry, Fault};
use serde_json::json;
use tokio::io::AsyncReadExt as _;

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

/// Asks until the registry has decided: on a busy machine it may count as silent.
async fn until(mut has_decided: impl AsyncFnMut() -> bool) {
    let asked = Instant::now();
    while !has_decided().await {
        assert!(asked.elapsed() < Duration::from_secs(60));
        tokio::time::sleep(Duration::from_millis(50)).await;
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
    until(async || image.manifest(None).await.unwrap().digest == moved).await;
    until(async || image.has_blob(&sha256(&other)).await.is_ok_and(|has| has)).await;
    assert!(read(&*image, &other, 0..9).await.unwrap() == other[..9]);
    // A client that may not see a blob does not get it from the bundle either.
    let layer = sha256(&scene.layer);
    scene.registry.fault("", &layer.to_string(), 1000, Fault::Status(404));
    until(async || !image.has_blob(&layer).await.unwrap()).await;
    scene.registry.fault("", "manifests/1", 1000, Fault::Status(404));
    until(async || image.manifest(None).await.is_err_and(|error| error.is_missing())).await;
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
async fn content_belongs_to_the_repositories_whose_images_name_it() {
    let scene = Scene::new().await;
    put(&scene.registry, "evil", "1", b"own layer");
    scene.bundle("evil:1").await;
    scene.registry.go_away();
    let (stolen, layer) = (sha256(&scene.raw), sha256(&scene.layer));
    let pinned = scene.open(&format!("evil@{stolen}"));
    assert!(pinned.manifest(None).await.is_err());
    assert!(pinned.document(None).await.is_err());
    for image in [pinned, scene.open("evil:1")] {
        assert!(image.document(Some(&stolen)).await.is_err());
        assert!(image.referrers(&stolen, None).await.is_err());
        assert!(image.has_blob(&layer).await.is_err());
        assert!(image.blob_size(&layer).await.is_err());
        assert!(image.blob(&layer, 100_000).await.is_err());
        assert!(read(&*image, &scene.layer, 0..9).await.is_err());
        assert!(read(&*image, b"own layer", 0..9).await.unwrap() == b"own layer"[..]);
    }
}

#[tokio::test]
async fn referrers_are_known_of_images_in_the_bundle_only() {
    let scene = Scene::new().await;
    let (layer, subject) = (noise(70_000, 6), manifest(b"{}", &[&noise(70_000, 6)]));
    put(&scene.registry, "app", "signed", &layer);
    let subject = Descriptor::plain(media_type::MANIFEST, sha256(&subject), subject.len() as u64);
    let from = lazuli_registry::open(&scene.name("app:signed"), &options()).unwrap();
    let referrer = from.push_referrer(&subject, "a/type", &BTreeMap::new(), None).await.unwrap();
    scene.bundle("app:signed").await;
    let other = put(&scene.registry, "app", "2", b"other");
    scene.registry.go_away();
    let image = scene.open("app:signed");
    let listed = image.referrers(&subject.digest, None).await.unwrap();
    assert_eq!(listed.iter().map(|it| it.digest).collect::<Vec<_>>(), [referrer]);
    assert_eq!(image.document(Some(&referrer)).await.unwrap().digest, referrer);
    assert_eq!(image.referrers(&sha256(&scene.raw), None).await.unwrap(), []);
    let unknown = scene.open("app:2").referrers(&other, None).await.unwrap_err();
    assert!(unknown.is_transient(), "{unknown}");
}

#[tokio::test]
async fn a_bundle_is_read_again_when_it_changes() {
    let scene = Scene::new().await;
    let bundle = Bundle::at(scene.directory.path());
    let open = |image: &str| {
        let ImageName::Registry(reference) = scene.name(image) else { panic!() };
        Layout::in_bundle(&bundle, &reference)
    };
    assert!(open("app:1").is_some() && open("late:1").is_none());
    // What was read is not read again.
    fs::remove_file(scene.blob(&scene.raw)).unwrap();
    assert!(open("app:1").unwrap().has_blob(&sha256(&scene.layer)).await.unwrap());
    put(&scene.registry, "late", "1", b"late");
    scene.bundle("late:1").await;
    assert!(open("late:1").unwrap().has_blob(&sha256(b"late")).await.unwrap());
    assert!(!open("app:1").unwrap().has_blob(&sha256(&scene.layer)).await.unwrap());
    fs::remove_file(scene.directory.path().join("index.json")).unwrap();
    assert!(open("late:1").is_none());
}

#[tokio::test]
async fn a_registry_that_answers_again_is_well() {
    let scene = Scene::new().await;
    let image = scene.open("app:1");
    let policy = image.request_policy();
    let health = policy.health().unwrap();
    (0..9).for_each(|_| health.failed(tokio::time::Instant::now(), None));
    // The bundle answers what it can.
    assert!(image.has_blob(&sha256(&scene.layer)).await.unwrap());
    assert!(!health.is_well() && scene.registry.stats().requests == 0);
    assert!(!image.has_blob(&sha256(b"of neither")).await.unwrap());
    assert!(health.is_well());
}

#[tokio::test]
async fn damaged_content_comes_from_the_registry() {
    let scene = Scene::new().await;
    fs::write(scene.blob(&scene.raw), "{}").unwrap();
    fs::remove_file(scene.blob(&scene.layer)).unwrap();
    let pinned = scene.open(&format!("app@{}", sha256(&scene.raw)));
    assert_eq!(pinned.document(None).await.unwrap().raw, scene.raw);
    assert!(read(&*pinned, &scene.layer, 0..9).await.unwrap() == scene.layer[..9]);
    fs::write(scene.blob(&scene.raw), &scene.raw).unwrap();
    fs::write(scene.blob(&scene.layer), &scene.layer[..50_000]).unwrap();
    let image = scene.open("app:1");
    assert_eq!(image.blob_size(&sha256(&scene.layer)).await.unwrap(), 100_000);
    assert!(read(&*image, &scene.layer, 0..9).await.unwrap() == scene.layer[..9]);
    let mut whole = image.blob(&sha256(&scene.layer), 100_000).await.unwrap();
    let mut content = Vec::new();
    whole.read_to_end(&mut content).await.unwrap();
    assert!(content == scene.layer);
    assert!(scene.registry.stats().requests > 3);
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
