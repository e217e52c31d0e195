//! Manifests: answers to clients, and requests to the registry.

use std::time::Duration;

use lazuli_registry::Login;
use lazuli_testkit::registry::Fault;
use tokio::time::{sleep, timeout};

use crate::scene::{APP, Scene, header};

/// containerd's questions for an ordinary image, and the registry's log: one request for each
/// object.
#[tokio::test]
async fn each_object_of_a_pull_is_asked_for_once() {
    let scene = Scene::new().await;
    let [index, manifest, config] = scene.put_image("1", b"layer");
    let resolved = scene.head("manifests/1").await;
    assert_eq!(resolved.status(), 200);
    assert_eq!(header(&resolved, "docker-content-digest"), index.to_string());
    assert_eq!(header(&resolved, "etag"), format!("\"{index}\""));
    assert_ne!(header(&resolved, "content-length"), "0");
    for path in
        [format!("manifests/{index}"), format!("manifests/{manifest}"), format!("blobs/{config}")]
    {
        let answer = scene.get(&path).await;
        assert_eq!(answer.status(), 200, "{path}");
        let digest = path.split_once('/').unwrap().1.parse::<lazuli_image::Digest>().unwrap();
        assert!(digest.matches(&answer.bytes().await.unwrap()), "{path}");
    }
    // The kubelet, a moment later.
    assert_eq!(scene.head("manifests/1").await.status(), 200);
    let mut asked = scene.asked();
    asked.sort();
    let mut expected = vec![
        format!("GET /v2/{APP}/manifests/1"),
        format!("GET /v2/{APP}/manifests/{manifest}"),
        format!("GET /v2/{APP}/blobs/{config}"),
    ];
    expected.sort();
    assert_eq!(asked, expected);
    let activity = scene.mirror.activity();
    assert_eq!((activity.hits, activity.misses), (4, 1), "{activity:?}");
}

/// A pull goes on with several requests at a time, and each new connection costs a round trip.
#[tokio::test]
async fn connections_are_opened_while_a_name_is_resolved() {
    for by_digest in [false, true] {
        let scene = Scene::new().await;
        let [index, ..] = scene.put_image("1", b"layer");
        let name = if by_digest { index.to_string() } else { "1".to_owned() };
        // Nothing follows an answer that does not come.
        let silent = Fault::Hang(Duration::from_secs(3));
        scene.registry.fault("GET", &format!("/manifests/{name}"), 100, silent);
        assert_eq!(scene.get(&format!("manifests/{name}")).await.status(), 503);
        let pinged = async {
            while scene.registry.stats().pings == 0 {
                sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(Duration::from_secs(20), pinged).await.expect("connections that are opened ahead");
    }
}

#[tokio::test]
async fn a_manifest_that_the_client_has_is_not_sent_again() {
    let scene = Scene::new().await;
    let [index, ..] = scene.put_image("1", b"layer");
    let request = scene.client.get(scene.url("manifests/1"));
    let answer = request.header("if-none-match", format!("\"{index}\"")).send().await.unwrap();
    assert_eq!(answer.status(), 304);
    assert_eq!(answer.bytes().await.unwrap().len(), 0);
}

#[tokio::test]
async fn a_tag_that_the_operator_lists_means_the_lazy_form() {
    for (lazy, is_lazy) in [(&["*"][..], true), (&[], false), (&["other.example/*"], false)] {
        let scene = Scene::with(lazy).await;
        let [index, ordinary, lazy] = scene.put_both("1");
        let expected = if is_lazy { lazy } else { index };
        let resolved = scene.head("manifests/1").await;
        assert_eq!(header(&resolved, "docker-content-digest"), expected.to_string());
        // A digest is exactly that digest.
        for digest in [index, ordinary, lazy] {
            let answer = scene.get(&format!("manifests/{digest}")).await;
            assert!(digest.matches(&answer.bytes().await.unwrap()));
        }
    }
}

#[tokio::test]
async fn the_node_learns_of_images_with_the_clients_login() {
    let scene = Scene::with(&["*"]).await;
    let [_, plain, _] = scene.put_image("plain", b"another layer");
    let [_, ordinary, lazy] = scene.put_both("1");
    let name = format!("{}/{APP}", scene.registry.host());
    let ann = Login::new("ann", "secret");
    scene.get_as("ann", "secret", &format!("manifests/{plain}")).await;
    scene.get_as("ann", "secret", "manifests/1").await;
    let told = scene.node.0.lock().unwrap().clone();
    let expected = [format!("{name}@{plain}"), format!("{name}:1@{lazy}")];
    assert_eq!(told, expected.map(|image| (image, Some(ann.clone()))));
    let login = |digest| scene.mirror.login(&format!("{name}@{digest}").parse().unwrap());
    assert_eq!((login(lazy), login(ordinary)), (Some(ann), None));
}

#[tokio::test]
async fn other_requests_are_refused_as_a_registry_does() {
    let scene = Scene::new().await;
    let url = |path: &str| format!("https://{}{path}", scene.address);
    let status = async |path: &str| scene.client.get(url(path)).send().await.unwrap().status();
    assert_eq!(status("/v2/").await, 200);
    assert_eq!(status("/v2/_catalog").await, 404);
    assert_eq!(status("/v2/a/manifests/1?ns=nonsense").await, 400);
    let own = format!("/v2/a/manifests/1?ns={}", scene.address);
    assert_eq!(status(&own).await, 404);
    let put = scene.client.put(scene.url("manifests/1")).body("{}").send().await.unwrap();
    assert_eq!((put.status().as_u16(), header(&put, "allow")), (405, "GET, HEAD"));
    assert_eq!(scene.get("manifests/none").await.status(), 404);
    // By path, as podman asks.
    let [index, ..] = scene.put_image("1", b"layer");
    let by_path = format!("/v2/{}/{APP}/manifests/1", scene.registry.host());
    let answer = scene.client.get(url(&by_path)).send().await.unwrap();
    assert_eq!(header(&answer, "docker-content-digest"), index.to_string());
}
