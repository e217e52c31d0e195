//! Connections that are opened ahead.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use lazuli_registry::{ImageName, Mirrors, Options, Repository, open};
use lazuli_testkit::{
    kernel::{Feature, require},
    registry::{FakeRegistry, Fault, Login},
    tls::{self, Authority},
};
use tokio::time::sleep;

use crate::{
    distance::Far,
    real::Server,
    support::{noise, options, push, read},
};

/// Connections that are opened.
const PREPARED: u64 = lazuli_registry::CONNECTIONS + 1;

const CONTENT: usize = 100_000;

/// Time until the connections of finished answers are free again.
const ANSWERS: Duration = Duration::from_millis(200);

/// Asks for as much at the same time as there should be connections.
async fn crowd(image: &Arc<dyn Repository>) {
    let content = noise(CONTENT, 21);
    let parts = (0..PREPARED).map(|n| read(&**image, &content, n * 1000..n * 1000 + 10_000));
    for (n, part) in futures_util::future::join_all(parts).await.into_iter().enumerate() {
        assert!(part.unwrap() == content[n * 1000..n * 1000 + 10_000]);
    }
}

async fn pinged(server: &FakeRegistry) {
    let started = Instant::now();
    while server.stats().pings < PREPARED {
        assert!(started.elapsed() < Duration::from_secs(20), "{:?}", server.stats());
        sleep(Duration::from_millis(10)).await;
    }
    sleep(ANSWERS).await;
}

/// Attempts that a check has. On a busy machine the end of an answer may not have been read yet,
/// and its connection is not free then; if connections were not used again at all, no attempt would
/// succeed.
const ATTEMPTS: usize = 5;

/// Repeats a check until it finds nothing wrong.
async fn at_last<F: Future<Output = Result<(), String>>>(check: impl Fn() -> F) {
    let mut found = Vec::new();
    while found.len() < ATTEMPTS {
        match check().await {
            Ok(()) => return,
            Err(problem) => found.push(problem),
        }
    }
    panic!("in {ATTEMPTS} attempts: {found:#?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_find_connections_that_were_opened_ahead() {
    at_last(|| check_near(Login::None)).await;
    // A token server that serves anonymous clients makes no difference.
    at_last(|| check_near(Login::Bearer(String::new(), String::new()))).await;
}

async fn check_near(login: Login) -> Result<(), String> {
    let server = FakeRegistry::start().unwrap();
    server.put_blob("app", &noise(CONTENT, 21));
    server.require(login);
    let options = options();
    let name: ImageName = format!("{}/app:1", server.host()).parse().unwrap();
    let image = open(&name, &options).unwrap();
    image.request_policy().preconnect();
    pinged(&server).await;
    // Brings the token: a refused request is repeated over another connection, while the refusal is
    // still being read.
    read(&*image, &noise(CONTENT, 21), 0..1000).await.unwrap();
    sleep(ANSWERS).await;
    server.fault("GET", "/blobs/", 100, Fault::Latency(Duration::from_millis(300)));
    let expected = |what: &str| {
        let stats = server.stats();
        let is_right = (stats.connections, stats.pings) == (PREPARED, PREPARED);
        if is_right { Ok(()) } else { Err(format!("{what}: {stats:?}")) }
    };
    crowd(&image).await;
    expected("first requests")?;
    // Once a minute is enough, for all images of the server together.
    open(&name, &options).unwrap().request_policy().preconnect();
    image.request_policy().preconnect();
    crowd(&image).await;
    expected("prepared again")
}

/// The same from far away, where each connection that is not there would cost round trips.
async fn check_far(host: &str, authority: Option<&Authority>) -> Result<(), String> {
    let far = Far::new(host, authority);
    let image = far.open();
    image.request_policy().preconnect();
    let started = Instant::now();
    while far.wire.connections() < PREPARED {
        assert!(started.elapsed() < Duration::from_secs(20), "{}", far.wire.connections());
        sleep(Duration::from_millis(10)).await;
    }
    // Handshakes, question and answer.
    sleep(Duration::from_millis(1000)).await;
    crowd(&image).await;
    let connections = far.wire.connections();
    if connections == PREPARED { Ok(()) } else { Err(format!("{connections} connections")) }
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_to_far_registries_are_opened_ahead() {
    let server = FakeRegistry::start().unwrap();
    server.put_blob("app", &noise(CONTENT, 21));
    let authority = Authority::new("ours");
    let shown = authority.server("127.0.0.1");
    let tls = tls::in_front_of(server.host().parse().unwrap(), &shown, None).unwrap();
    let [near, near_tls] = [server.host(), tls.to_string()];
    at_last(|| check_far(&near, None)).await;
    at_last(|| check_far(&near_tls, Some(&authority))).await;
    if !require(Feature::Program("docker-registry")) {
        return;
    }
    let plain = Server::start();
    let name: ImageName = format!("{}/app:1", plain.host).parse().unwrap();
    push(&*open(&name, &options()).unwrap(), &noise(CONTENT, 21)).await.unwrap();
    at_last(|| check_far(&plain.host, None)).await;
    let tls = plain.with_tls(&shown);
    at_last(|| check_far(&tls.host, Some(&authority))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_are_opened_to_the_first_server_only() {
    let [first, second, registry] = [(); 3].map(|()| FakeRegistry::start().unwrap());
    let mut mirrors = Mirrors::default();
    let urls = [&first, &second].map(|mirror| format!("http://{}", mirror.host()).parse().unwrap());
    mirrors.set(&registry.host(), urls.to_vec()).unwrap();
    let options = Options { mirrors, ..options() };
    let name = format!("{}/app:1", registry.host()).parse().unwrap();
    open(&name, &options).unwrap().request_policy().preconnect();
    pinged(&first).await;
    let pings = [&first, &second, &registry].map(|server| server.stats().pings);
    assert_eq!(pings, [PREPARED, 0, 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_not_there_makes_no_difference() {
    let server = FakeRegistry::start().unwrap();
    server.put_blob("app", &noise(CONTENT, 21));
    let name = format!("{}/app:1", server.host()).parse().unwrap();
    let image = open(&name, &options()).unwrap();
    server.go_away();
    image.request_policy().preconnect();
    sleep(Duration::from_millis(200)).await;
    server.come_back();
    sleep(Duration::from_millis(200)).await;
    crowd(&image).await;
}
