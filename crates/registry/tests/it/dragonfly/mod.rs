//! Blobs through the Dragonfly daemon of this node.

mod socket;

use std::{
    collections::BTreeMap,
    fs,
    sync::Arc,
    time::{Duration, Instant},
};

use lazuli_image::oci::{Descriptor, media_type};
use lazuli_registry::{Dragonfly, ImageName, Options, PeerCredentials, Repository};
use lazuli_testkit::{
    dragonfly::{Daemon, Fault, Swarm},
    registry::{self, FakeRegistry, Login},
};
use tokio::io::AsyncReadExt as _;

use crate::support::{manifest, noise, options, push, read, sha256};

/// The minimum size of a blob to ask the daemon for, and one byte less.
const WORTH: usize = 128 << 10;
const NOT_WORTH: usize = WORTH - 1;

/// Time limit on a busy machine for operations that should cost nothing.
const NOTHING: Duration = Duration::from_millis(300);

/// A registry with an image, and a daemon.
struct Scene {
    registry: FakeRegistry,
    swarm: Swarm,
    daemon: Daemon,
    blob: Vec<u8>,
    small: Vec<u8>,
    files: tempfile::TempDir,
}

impl Scene {
    fn start() -> Self {
        let registry = FakeRegistry::start().unwrap();
        let (blob, small) = (noise(WORTH, 1), noise(NOT_WORTH, 2));
        for content in [&blob[..], &small, b"{}"] {
            registry.put_blob("app", content);
        }
        let raw = manifest(b"{}", &[&blob, &small]);
        registry.put_manifest("app", "1", media_type::MANIFEST, &raw);
        let swarm = Swarm::with_pieces_of(10_000);
        let daemon = swarm.daemon().unwrap();
        let files = tempfile::tempdir().unwrap();
        let login = r#"{"username": "joe", "password": "secret"}"#;
        let text = format!(r#"{{"auths": {{"{}": {login}}}}}"#, registry.host());
        fs::write(files.path().join("config.json"), text).unwrap();
        Scene { registry, swarm, daemon, blob, small, files }
    }

    /// The image, by way of the daemon.
    fn open(&self, credentials: PeerCredentials) -> Arc<dyn Repository> {
        self.open_through(found(&self.daemon, credentials))
    }

    fn open_through(&self, daemon: Dragonfly) -> Arc<dyn Repository> {
        let name: ImageName = format!("{}/app:1", self.registry.host()).parse().unwrap();
        let options = Options {
            dragonfly: Some(daemon),
            credential_files: vec![self.files.path().join("config.json")],
            ..options()
        };
        lazuli_registry::open(&name, &options).unwrap()
    }

    /// Reads much of the big blob. Returns the duration, and how much came through the daemon.
    async fn read(&self, image: &Arc<dyn Repository>) -> (Duration, u64) {
        let (before, begun) = (self.daemon.stats().served, Instant::now());
        assert!(read(&**image, &self.blob, 5..40_000).await.unwrap() == self.blob[5..40_000]);
        (begun.elapsed(), self.daemon.stats().served - before)
    }

    /// Number of requests for blobs that bypassed the daemon.
    fn asked_directly(&self) -> u64 {
        let blobs = |logged: &&_| is_blob(logged);
        let log = self.registry.log();
        log.iter().filter(blobs).count() as u64 - self.daemon.stats().asked_origin
    }
}

fn found(daemon: &Daemon, credentials: PeerCredentials) -> Dragonfly {
    Dragonfly::new(&daemon.proxy(), Some(&daemon.health()), credentials).unwrap()
}

fn is_blob(logged: &lazuli_testkit::registry::Logged) -> bool {
    logged.method == "GET" && logged.target.contains("/blobs/")
}

fn descriptor(content: &[u8]) -> Descriptor {
    Descriptor {
        media_type: media_type::LAYER_GZIP.to_owned(),
        digest: sha256(content),
        size: content.len() as u64,
        annotations: BTreeMap::new(),
        platform: None,
        artifact_type: None,
    }
}

async fn whole(image: &Arc<dyn Repository>, content: &[u8]) -> bool {
    let mut bytes = Vec::new();
    let blob = image.blob(&sha256(content), content.len() as u64).await;
    blob.unwrap().read_to_end(&mut bytes).await.unwrap();
    bytes == content
}

#[tokio::test]
async fn the_daemon_is_asked_for_large_blobs_only() {
    let scene = Scene::start();
    let image = scene.open(PeerCredentials::Withheld);
    image.request_policy().preconnect();
    image.manifest(None).await.unwrap();
    image.document(None).await.unwrap();
    assert!(image.has_blob(&sha256(&scene.blob)).await.unwrap());
    assert!(image.referrers(&sha256(b"{}"), None).await.unwrap().is_empty());
    image.tags(1).await.unwrap();
    push(&*image, b"new").await.unwrap();
    assert!(whole(&image, &scene.small).await);
    let small = image.small_blob(&descriptor(&scene.small)).await.unwrap();
    assert!(small.content == scene.small);
    assert_eq!(scene.daemon.log(), []);
    assert_eq!(scene.registry.violations(), [""; 0]);

    let before = scene.asked_directly();
    assert!(whole(&image, &scene.blob).await);
    let big = image.small_blob(&descriptor(&scene.blob)).await.unwrap();
    assert!(big.content == scene.blob);
    assert_eq!(scene.read(&image).await.1, 39_995);
    assert_eq!(scene.asked_directly(), before);
    // Little of a blob, of which it would fetch a whole piece.
    let requests = scene.daemon.stats().requests;
    assert!(read(&*image, &scene.blob, 5..9_000).await.unwrap() == scene.blob[5..9_000]);
    assert_eq!((scene.asked_directly(), scene.daemon.stats().requests), (before + 1, requests));
}

#[tokio::test]
async fn each_request_carries_dragonflys_headers() {
    let scene = Scene::start();
    let image = scene.open(PeerCredentials::Withheld);
    scene.read(&image).await;
    let places = image.clone().places();
    assert_eq!(places.len(), 2);
    assert!(places[0].describe().contains(&scene.daemon.proxy()), "{}", places[0].describe());
    places.iter().for_each(|place| place.request_policy().expect_whole(&sha256(&scene.blob)));
    let whole = WORTH as u64 + 1;
    within(10, async || scene.daemon.stats().from_origin == whole).await;
    let log = scene.daemon.log();
    assert_eq!(log.len(), 2, "{log:#?}");
    let registry = format!("http://{}", scene.registry.host());
    for (logged, range, prefetch) in
        [(&log[0], "bytes=5-39999", None), (&log[1], "bytes=0-0", Some("true"))]
    {
        let header = |name: &str| logged.headers.get(name).map(String::as_str);
        assert_eq!((logged.method.as_str(), header("range")), ("GET", Some(range)));
        assert_eq!(logged.target, format!("/v2/app/blobs/{}", sha256(&scene.blob)));
        assert_eq!(header("x-dragonfly-registry"), Some(registry.as_str()));
        assert_eq!(header("x-dragonfly-use-p2p"), Some("true"));
        assert_eq!(header("x-dragonfly-scheduling-policy"), Some("always"));
        assert_eq!(header("x-dragonfly-enable-task-id-based-blob-digest"), Some("true"));
        assert_eq!(header("x-dragonfly-prefetch"), prefetch);
        assert_eq!(header("authorization"), None);
    }
}

#[tokio::test]
async fn the_daemon_sees_logins_only_where_the_operator_allows_it() {
    let joe = || ("joe".to_owned(), "secret".to_owned());
    let basic = Login::Basic(joe().0, joe().1);
    let bearer = Login::Bearer(joe().0, joe().1);
    let without_user = Login::Bearer(String::new(), String::new());
    let [shown, withheld] = [PeerCredentials::Shown, PeerCredentials::Withheld];
    // The registry's requirement, the operator's, and whether the daemon delivers.
    for (login, credentials, delivers) in [
        (basic.clone(), withheld, false),
        (bearer.clone(), withheld, false),
        (basic, shown, true),
        (bearer, shown, true),
        (without_user.clone(), withheld, true),
        (without_user, shown, true),
    ] {
        // Before and after the registry's challenge is known.
        for is_known in [true, false] {
            let scene = Scene::start();
            scene.registry.require(login.clone());
            if login == Login::Bearer(String::new(), String::new()) {
                fs::remove_file(scene.files.path().join("config.json")).unwrap();
            }
            let image = scene.open(credentials);
            let case = format!("{login:?}, {credentials:?}, known: {is_known}");
            if is_known {
                image.manifest(None).await.unwrap();
            } else {
                // The daemon cannot deliver, but stays healthy.
                assert_eq!(scene.read(&image).await.1, 0, "{case}");
                assert!(scene.daemon.log().iter().all(|logged| !logged.is_authorized()), "{case}");
                assert!(scene.asked_directly() > 0, "{case}");
            }
            let (requests, directly) = (scene.daemon.stats().requests, scene.asked_directly());
            let came = scene.read(&image).await.1;
            assert_eq!(came, if delivers { 39_995 } else { 0 }, "{case}");
            assert_eq!(scene.daemon.stats().requests - requests, u64::from(delivers), "{case}");
            assert_eq!(scene.asked_directly() - directly, u64::from(!delivers), "{case}");
            let seen = scene.daemon.log().iter().any(|logged| logged.is_authorized());
            assert_eq!(seen, delivers, "{case}");
            assert_eq!(scene.registry.violations(), [""; 0]);
        }
    }
}

/// Waits until `condition` holds.
async fn within(seconds: u64, condition: impl AsyncFn() -> bool) {
    let begun = Instant::now();
    while !condition().await {
        assert!(begun.elapsed() < Duration::from_secs(seconds), "not within {seconds} s");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Reads while the daemon has `fault`, and checks that it costs time once only.
async fn costs(fault: Fault, at_least: Duration, below: Duration) {
    let scene = Scene::start();
    let image = scene.open(PeerCredentials::Withheld);
    assert_eq!(scene.read(&image).await.1, 39_995);
    scene.daemon.set(fault);
    let (took, came) = scene.read(&image).await;
    assert!((at_least..below).contains(&took), "{fault:?}: {took:?}");
    assert_eq!((came, scene.asked_directly()), (0, 1), "{fault:?}");
    // It rests: for half a second at least.
    let before = scene.daemon.stats().requests;
    let (took, came) = scene.read(&image).await;
    assert!(took < NOTHING, "{fault:?}, the second time: {took:?}");
    assert_eq!((came, scene.daemon.stats().requests), (0, before), "{fault:?}");
    scene.daemon.heal();
    let healed = Instant::now();
    within(10, async || scene.read(&image).await.1 > 0).await;
    assert!(healed.elapsed() < Duration::from_secs(4), "{fault:?}: {:?}", healed.elapsed());
    let directly = scene.asked_directly();
    assert_eq!(scene.read(&image).await.1, 39_995);
    assert_eq!(scene.asked_directly(), directly);
}

#[tokio::test]
async fn a_dead_daemon_costs_no_time() {
    costs(Fault::Gone, Duration::ZERO, NOTHING).await;
}

#[tokio::test]
async fn a_daemon_with_a_full_disk_costs_no_time() {
    let scene = Scene::start();
    let image = scene.open(PeerCredentials::Withheld);
    scene.daemon.set(Fault::DiskFull);
    let (took, came) = scene.read(&image).await;
    assert!(took < NOTHING && came == 0, "{took:?}");
    scene.daemon.heal();
    within(4, async || scene.read(&image).await.1 > 0).await;
}

/// Without the question whether it lives it would cost three seconds.
#[tokio::test]
async fn a_hanging_daemon_costs_less_than_a_second() {
    costs(Fault::Hung, Duration::from_millis(500), Duration::from_millis(1500)).await;
}

#[tokio::test]
async fn a_healthy_daemon_that_waits_for_a_peer_is_awaited() {
    costs(Fault::Stuck, Duration::from_secs(3), Duration::from_millis(4500)).await;
}

#[tokio::test]
async fn an_error_of_the_registry_is_not_the_daemons_failure() {
    let scene = Scene::start();
    let image = scene.open(PeerCredentials::Withheld);
    scene.registry.fault("GET", "/blobs/", 1, registry::Fault::Status(503));
    let (took, came) = scene.read(&image).await;
    assert!(took < NOTHING && came == 0, "{took:?}");
    assert_eq!((scene.daemon.stats().requests, scene.asked_directly()), (1, 1));
    assert_eq!(scene.read(&image).await.1, 39_995);
    let error = {
        scene.registry.fault("GET", "/blobs/", 1, registry::Fault::Busy(503, 9));
        let place = image.places().remove(0);
        read(&*place, &scene.small, 5..9_000).await.unwrap_err()
    };
    assert!(!error.is_transient() && error.to_string().contains("503"), "{error}");
}

#[tokio::test]
async fn a_wrong_whole_blob_is_refused() {
    let scene = Scene::start();
    let image = scene.open(PeerCredentials::Withheld);
    scene.daemon.set(Fault::WrongBytes);
    let small = image.small_blob(&descriptor(&scene.blob)).await.unwrap();
    assert!(small.content == scene.blob);
    assert!(scene.daemon.stats().served > 0 && scene.asked_directly() > 0);
}
