//! A registry and its mirrors.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use lazuli_image::{Stored, oci::media_type};
use lazuli_registry::{ImageName, Mirrors, Options, RegistryError, Repository};
use lazuli_testkit::registry::{FakeRegistry, Fault, Login};
use tokio::io::AsyncReadExt as _;

use crate::support::{manifest, noise, options, push, sha256};

/// A registry and two mirrors of it, which all have one image.
struct Three {
    registry: FakeRegistry,
    mirrors: [FakeRegistry; 2],
    blob: Vec<u8>,
    raw: Vec<u8>,
}

impl Three {
    fn start() -> Self {
        let blob = noise(100_000, 7);
        let raw = manifest(b"{}", &[&blob]);
        let start = || {
            let server = FakeRegistry::start().unwrap();
            server.put_blob("app", &blob);
            server.put_blob("app", b"{}");
            server.put_manifest("app", "1", media_type::MANIFEST, &raw);
            server
        };
        Three { registry: start(), mirrors: [start(), start()], blob, raw }
    }

    fn options(&self) -> Options {
        let mut mirrors = Mirrors::default();
        let urls = self.mirrors.iter().map(|m| format!("http://{}", m.host()).parse().unwrap());
        mirrors.set(&self.registry.host(), urls.collect()).unwrap();
        Options { mirrors, ..options() }
    }

    fn open(&self, options: &Options) -> Arc<dyn Repository> {
        let name: ImageName = format!("{}/app:1", self.registry.host()).parse().unwrap();
        lazuli_registry::open(&name, options).unwrap()
    }

    /// Number of requests: mirrors, registry.
    fn requests(&self) -> [u64; 3] {
        [&self.mirrors[0], &self.mirrors[1], &self.registry].map(|server| server.stats().requests)
    }
}

#[tokio::test]
async fn mirrors_are_asked_in_order_before_the_registry() {
    let three = Three::start();
    let image = three.open(&three.options());
    assert_eq!(image.manifest(None).await.unwrap().raw, three.raw);
    assert_eq!(three.requests(), [1, 0, 0]);
    assert!(three.mirrors[0].log()[0].target.contains(&format!("?ns={}", urlencoded(&three))));
    let mut content = Vec::new();
    let digest = sha256(&three.blob);
    image.blob(&digest, 100_000).await.unwrap().read_to_end(&mut content).await.unwrap();
    assert!(content == three.blob);
    assert_eq!(three.requests(), [2, 0, 0]);

    // An object missing from one mirror is asked of the next; the first mirror stays first for all
    // others.
    three.mirrors[0].fault("GET", "/blobs/", 1, Fault::Status(404));
    three.mirrors[1].fault("GET", "/blobs/", 1, Fault::Status(403));
    let range = Stored(5)..Stored(9000);
    let part = image.read(&digest, 100_000, range.clone(), &|_| {}).await.unwrap();
    assert!(part == three.blob[5..9000]);
    assert_eq!(three.requests(), [3, 1, 1]);
    image.manifest(None).await.unwrap();
    assert_eq!(three.requests(), [4, 1, 1]);

    // A server that fails is not asked first for a while.
    three.mirrors[0].fault("GET", "", 1, Fault::Status(503));
    image.manifest(None).await.unwrap();
    image.manifest(None).await.unwrap();
    assert_eq!(three.requests(), [5, 3, 1]);

    // Pushes have one destination.
    push(&*image, b"new").await.unwrap();
    assert_eq!((three.requests()[0], three.requests()[1]), (5, 3));
    for server in [&three.mirrors[0], &three.mirrors[1], &three.registry] {
        assert_eq!(server.violations(), Vec::<String>::new());
    }
}

fn urlencoded(three: &Three) -> String {
    three.registry.host().replace(':', "%3A")
}

#[tokio::test]
async fn a_mirror_that_hangs_costs_seconds_once() {
    let three = Three::start();
    three.mirrors[0].fault("", "", 100, Fault::Hang(Duration::from_secs(10)));
    let image = three.open(&three.options());
    let started = Instant::now();
    image.manifest(None).await.unwrap();
    assert!(started.elapsed() < Duration::from_secs(4), "{:?}", started.elapsed());
    let started = Instant::now();
    image.manifest(None).await.unwrap();
    assert!(started.elapsed() < Duration::from_secs(1), "{:?}", started.elapsed());
}

#[tokio::test]
async fn credentials_stay_with_the_server_that_they_are_for() {
    use base64::{Engine as _, engine::general_purpose::STANDARD};
    let three = Three::start();
    three.registry.require(Login::Basic("me".into(), "secret".into()));
    // One mirror wants a login that doesn't exist, the other its own.
    three.mirrors[0].require(Login::Basic("me".into(), "secret".into()));
    three.mirrors[1].require(Login::Bearer("guest".into(), "other".into()));
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("config.json");
    let entry = |server: &FakeRegistry, pair: &str| {
        format!(r#""{}":{{"auth":"{}"}}"#, server.host(), STANDARD.encode(pair))
    };
    let known = [entry(&three.registry, "me:secret"), entry(&three.mirrors[1], "guest:other")];
    std::fs::write(&file, format!(r#"{{"auths":{{{}}}}}"#, known.join(","))).unwrap();
    let options = Options { credential_files: vec![file], ..three.options() };
    let image = three.open(&options);
    image.manifest(None).await.unwrap();
    assert!(three.mirrors[0].log().iter().all(|request| !request.authorized));
    assert_eq!(three.registry.stats().requests, 0);
    assert!(three.mirrors[1].stats().by_path.contains_key("/token"));

    three.mirrors[1].fault("GET", "", 100, Fault::Status(404));
    image.manifest(None).await.unwrap();
    assert!(three.registry.log().iter().any(|request| request.authorized));
}

#[tokio::test]
async fn an_error_lists_the_failure_of_every_server() {
    let three = Three::start();
    let image = three.open(&three.options());
    for server in [&three.mirrors[0], &three.registry] {
        server.fault("", "", 10, Fault::Status(404));
    }
    three.mirrors[1].fault("", "", 10, Fault::Status(500));
    let error = image.manifest(None).await.unwrap_err();
    assert!(matches!(error, RegistryError::Everywhere { .. }), "{error}");
    let text = error.to_string();
    for server in &three.mirrors {
        assert!(text.contains(&format!("mirror http://{}", server.host())), "{text}");
    }
    assert!(text.contains("answered 500"), "{text}");
    assert!(text.ends_with("check the name, and whether it was pushed"), "{text}");
    assert!(error.is_transient());
}
