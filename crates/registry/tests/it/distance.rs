//! Round trips of a container start with a distant registry.

use std::{
    fs,
    sync::Arc,
    time::{Duration, Instant},
};

use lazuli_image::{Stored, oci::media_type};
use lazuli_registry::{CONNECTIONS, Hosts, ImageName, Options, Repository, config, open};
use lazuli_testkit::{
    kernel::{Feature, require},
    registry::FakeRegistry,
    tls::{self, Authority},
    wire::Wire,
};

use crate::{
    real::Server,
    support::{manifest, noise, options, push},
};

/// Long compared to this machine's own processing time.
const ROUND_TRIP: Duration = Duration::from_millis(100);

const CONFIG: &[u8] = b"{}";

fn bootstrap_layer() -> Vec<u8> {
    noise(300_000, 1)
}

fn data() -> Vec<u8> {
    noise(8 << 20, 2)
}

async fn push_image(host: &str) {
    let name: ImageName = format!("{host}/app:1").parse().unwrap();
    let repository = open(&name, &options()).unwrap();
    for blob in [CONFIG, &bootstrap_layer(), &data()] {
        push(&*repository, blob).await.unwrap();
    }
    let raw = manifest(CONFIG, &[&data(), &bootstrap_layer()]);
    repository.push_manifest(raw.into(), media_type::MANIFEST).await.unwrap();
}

/// A registry far away, and how it is reached.
pub(crate) struct Far {
    pub(crate) wire: Wire,
    name: ImageName,
    options: Options,
    _directory: tempfile::TempDir,
}

impl Far {
    /// The registry has had no request. With an authority, it speaks TLS.
    pub(crate) fn new(server: &str, authority: Option<&Authority>) -> Self {
        Far::by(server, ROUND_TRIP, authority)
    }

    /// A server by this name at this distance.
    fn by(server: &str, round_trip: Duration, authority: Option<&Authority>) -> Self {
        let wire = Wire::to(server.parse().unwrap(), round_trip).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let mut options = options();
        if let Some(authority) = authority {
            let ours = directory.path().join(wire.host());
            fs::create_dir(&ours).unwrap();
            fs::write(ours.join("ca.crt"), authority.certificate()).unwrap();
            options.hosts = Hosts::new(directory.path().to_str().unwrap());
        }
        let name = format!("{}/app:1", wire.host()).parse().unwrap();
        Far { wire, name, options, _directory: directory }
    }

    pub(crate) fn open(&self) -> Arc<dyn Repository> {
        open(&self.name, &self.options).unwrap()
    }

    /// Mounts an image that the node doesn't have, and reads what its first program needs.
    async fn start(&self) -> Cost {
        let before = self.wire.connections();
        let image = self.open();
        let mut since = Instant::now();
        let mut lap = || {
            let trips = since.elapsed().as_secs_f64() / ROUND_TRIP.as_secs_f64();
            since = Instant::now();
            trips
        };
        let opening = image.request_policy().preconnect();
        let found = image.manifest(None).await.unwrap();
        opening.done().await;
        let manifest = lap();
        let layer = &found.parsed.layers[1];
        let (config, bootstrap, referrers) = tokio::join!(
            config(&*image, &found),
            image.small_blob(layer),
            image.referrers(&found.digest, Some("application/x"))
        );
        assert!(bootstrap.unwrap().content == bootstrap_layer());
        config.unwrap();
        referrers.unwrap();
        let metadata = lap();
        let digest = found.parsed.layers[0].digest;
        let read = async |length: u64| {
            let reads = (0..8).map(|number| {
                let range = Stored(number << 20)..Stored((number << 20) + length);
                image.read(&digest, found.parsed.layers[0].size, range, &|_| {})
            });
            for bytes in futures_util::future::join_all(reads).await {
                assert_eq!(bytes.unwrap().len() as u64, length);
            }
        };
        read(64 << 10).await;
        let misses = lap();
        read(1 << 20).await;
        let windows = lap();
        let connections = self.wire.connections() - before;
        Cost { manifest, metadata, misses, windows, connections }
    }

    /// The start of an image after another one was started. The best of three, because other
    /// processes use this machine too.
    async fn start_again(&self) -> Cost {
        let mut best = self.start().await;
        for _ in 0..2 {
            let cost = self.start().await;
            best.manifest = best.manifest.min(cost.manifest);
            best.metadata = best.metadata.min(cost.metadata);
            best.misses = best.misses.min(cost.misses);
            best.windows = best.windows.min(cost.windows);
            best.connections = best.connections.max(cost.connections);
        }
        best
    }

    /// Reports the cost of starts. The second start must not pay for connections that the first one
    /// opened.
    #[allow(clippy::print_stderr)]
    async fn check(&self, what: &str) -> Cost {
        let cold = self.start().await;
        let warm = self.start_again().await;
        for (state, cost) in [("cold", &cold), ("warm", &warm)] {
            let Cost { manifest, metadata, misses, windows, connections } = cost;
            let sum = manifest + metadata + misses + windows;
            eprintln!(
                "{what}, {state}: manifest {manifest:.1} + metadata {metadata:.1} + 8 x 64 KiB {misses:.1} + 8 x 1 MiB \
                 {windows:.1} = {sum:.1} round trips, {connections} connections"
            );
        }
        assert!(warm.connections <= 1, "{warm:?}");
        assert!((1.0..1.9).contains(&warm.manifest), "{warm:?}");
        cold
    }
}

/// Round trips that each part of a start takes, and the connections it makes.
#[derive(Debug)]
struct Cost {
    manifest: f64,
    /// Config, bootstrap of 300 kB, and referrers, asked for at the same time.
    metadata: f64,
    /// Eight reads of 64 KiB at the same time.
    misses: f64,
    /// Eight reads of 1 MiB at the same time.
    windows: f64,
    connections: u64,
}

#[tokio::test(flavor = "multi_thread")]
async fn a_far_start_over_plain_http_opens_few_connections() {
    let server = FakeRegistry::start().unwrap();
    push_image(&server.host()).await;
    let cold = Far::new(&server.host(), None).check("plain HTTP").await;
    // The handshake, and the request.
    assert!(cold.manifest >= 2.0, "{cold:?}");
    // The preconnected ones and the manifest's, and as many again if the manifest arrives before
    // they are ready.
    assert!((17..=36).contains(&cold.connections), "{cold:?}");
}

/// Returns whether a cold start at this distance opens fewer connections. On a busy machine answers
/// come late, so one of ten attempts suffices.
async fn makes_fewer_than(connections: u64, round_trip: Duration) -> bool {
    let server = FakeRegistry::start().unwrap();
    push_image(&server.host()).await;
    for _ in 0..10 {
        if Far::by(&server.host(), round_trip, None).start().await.connections < connections {
            return true;
        }
    }
    false
}

#[tokio::test(flavor = "multi_thread")]
async fn no_connections_are_opened_ahead_to_a_near_registry() {
    assert!(makes_fewer_than(CONNECTIONS, Duration::ZERO).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_after_the_manifest_await_the_opening_connections() {
    assert!(makes_fewer_than(2 * CONNECTIONS - 2, ROUND_TRIP).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_far_start_over_tls_opens_few_connections() {
    let server = FakeRegistry::start().unwrap();
    push_image(&server.host()).await;
    let authority = Authority::new("ours");
    let shown = authority.server("127.0.0.1");
    let tls = tls::in_front_of(server.host().parse().unwrap(), &shown, None).unwrap();
    let cold = Far::new(&tls.to_string(), Some(&authority)).check("TLS").await;
    // The handshakes of TCP and TLS, and the request.
    assert!(cold.manifest >= 3.0, "{cold:?}");
    assert!((17..=36).contains(&cold.connections), "{cold:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_from_docker_registry() {
    if !require(Feature::Program("docker-registry")) {
        return;
    }
    let plain = Server::start();
    push_image(&plain.host).await;
    Far::new(&plain.host, None).check("docker-registry, plain HTTP").await;
    let authority = Authority::new("ours");
    let tls = plain.with_tls(&authority.server("127.0.0.1"));
    Far::new(&tls.host, Some(&authority)).check("docker-registry, TLS").await;
}
