//! The daemon's socket: lookups of blobs, and reads through it when the proxy is gone.

use std::{
    fs,
    ops::Range,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use lazuli_image::Stored;
use lazuli_registry::{PeerCredentials, Repository, Urgency};
use lazuli_testkit::{
    dragonfly::{Fault, Logged},
    registry::Login,
};

use super::{NOTHING, Scene, found, within};
use crate::support::{read, sha256};

/// How long a reader is kept with a question; 20 ms, if the machine is not busy.
const QUESTION: Duration = Duration::from_millis(100);

impl Scene {
    /// The same image, where the daemon's socket is known as well.
    fn open_with_socket(&self, credentials: PeerCredentials) -> Arc<dyn Repository> {
        let socket = self.files.path().join("dfdaemon.sock");
        self.daemon.listen_at(&socket).unwrap();
        fs::create_dir_all(self.links()).unwrap();
        self.open_through(found(&self.daemon, credentials).with_socket(&socket, &self.links()))
    }

    fn links(&self) -> PathBuf {
        self.files.path().join("links")
    }

    fn links_left(&self) -> Vec<PathBuf> {
        fs::read_dir(self.links()).unwrap().map(|entry| entry.unwrap().path()).collect()
    }

    async fn suits_range(&self, image: &Arc<dyn Repository>, range: Range<u64>) -> bool {
        let place = image.clone().places().remove(0);
        // As a part of a blob that has more pieces.
        let range = Stored(range.start)..Stored(range.end);
        let urgency = Urgency::Demand;
        place.request_policy().suits_range(&sha256(&self.blob), 1 << 30, &range, urgency).await
    }

    fn downloads(&self) -> Vec<Logged> {
        let log = self.daemon.log_at_socket();
        log.into_iter().filter(|logged| logged.method == "DownloadTask").collect()
    }
}

#[tokio::test]
async fn the_socket_tells_which_nodes_have_a_blob() {
    let scene = Scene::start();
    let peer = scene.swarm.daemon().unwrap();
    let image = scene.open_with_socket(PeerCredentials::Withheld);
    let of_peer = scene.open_through(found(&peer, PeerCredentials::Withheld)).places().remove(0);
    // On a machine too busy for the first connection, the answer may still be yes.
    within(5, async || !scene.suits_range(&image, 5..9_000).await).await;
    read(&*of_peer, &scene.blob, 5..9_000).await.unwrap();
    assert!(peer.stats().served > 0);
    assert!(scene.suits_range(&image, 5..9_000).await);
    assert!(scene.suits_range(&image, 0..10_000).await);
    for range in [5..10_001, 9_000..15_000, 12_000..13_000] {
        within(5, async || !scene.suits_range(&image, range.clone()).await).await;
    }
    read(&*of_peer, &scene.blob, 20_000..30_000).await.unwrap();
    within(5, async || !scene.suits_range(&image, 5..30_000).await).await;
    read(&*of_peer, &scene.blob, 19_000..20_000).await.unwrap();
    assert!(scene.suits_range(&image, 5..30_000).await);
}

/// 128 KiB for each of more than 32 nodes are more than a piece.
#[tokio::test]
async fn blobs_that_many_nodes_read_are_fetched_from_peers() {
    let scene = Scene::start();
    let peer = scene.swarm.daemon().unwrap();
    let image = scene.open_with_socket(PeerCredentials::Withheld);
    let of_peer = scene.open_through(found(&peer, PeerCredentials::Withheld)).places().remove(0);
    let of_this = image.clone().places().remove(0);
    let all = scene.blob.len() as u64;
    for _ in 0..31 {
        read(&*of_peer, &scene.blob, 0..1).await.unwrap();
    }
    // A node that has downloaded nothing yet cannot tell whether the reads came from a single other
    // one.
    within(5, async || !scene.suits_range(&image, 0..all).await).await;
    read(&*of_this, &scene.blob, 0..1).await.unwrap();
    within(5, async || !scene.suits_range(&image, 0..all).await).await;
    read(&*of_peer, &scene.blob, 0..1).await.unwrap();
    assert!(scene.suits_range(&image, 0..all).await);
    // Unless it is this node itself that has read so often.
    for _ in 0..32 {
        read(&*of_this, &scene.blob, 0..1).await.unwrap();
    }
    assert_eq!(scene.daemon.stats().requests, 33);
    within(5, async || !scene.suits_range(&image, 0..all).await).await;
}

#[tokio::test]
async fn a_silent_socket_is_skipped_after_its_time_out() {
    for fault in [Fault::Gone, Fault::Hung, Fault::Alone] {
        // With and without an existing connection.
        for is_new in [false, true] {
            let scene = Scene::start();
            let image = scene.open_with_socket(PeerCredentials::Withheld);
            if !is_new {
                within(5, async || !scene.suits_range(&image, 5..9_000).await).await;
            }
            scene.daemon.set(fault);
            let begun = Instant::now();
            assert!(scene.suits_range(&image, 5..9_000).await, "{fault:?}, new: {is_new}");
            assert!(begun.elapsed() < QUESTION, "{fault:?}, new: {is_new}: {:?}", begun.elapsed());
            scene.daemon.heal();
            within(5, async || !scene.suits_range(&image, 5..9_000).await).await;
        }
    }
}

#[tokio::test]
async fn bytes_come_through_the_socket_when_the_proxy_is_gone() {
    let scene = Scene::start();
    let image = scene.open_with_socket(PeerCredentials::Withheld);
    let link = |made: u64| format!("{}-{made}-1-0", sha256(b"old").hex());
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    // Links that another process may still use remain.
    let (old, young, other) = (link(now - 3600), link(now - 60), "not-a-link");
    for name in [&old, &young, other] {
        fs::write(scene.links().join(name), "").unwrap();
    }
    scene.daemon.set(Fault::ProxyGone);
    for range in [5..40_000, 9_999..45_001, 0..scene.blob.len()] {
        let bytes = read(&*image, &scene.blob, range.start as u64..range.end as u64).await.unwrap();
        assert!(bytes == scene.blob[range.clone()], "{range:?}");
        let mut left = scene.links_left();
        left.sort();
        assert_eq!(left, [scene.links().join(&young), scene.links().join(other)], "{range:?}");
    }
    assert_eq!((scene.asked_directly(), scene.daemon.stats().requests), (0, 0));
    let [first, ..] = &scene.downloads()[..] else { panic!("nothing was asked for") };
    let url = format!("http://{}/v2/app/blobs/{}", scene.registry.host(), sha256(&scene.blob));
    assert_eq!((&first.target, &*first.headers["range"]), (&url, "bytes=5-39999"));
    scene.daemon.heal();
    within(5, async || {
        scene.read(&image).await;
        scene.daemon.stats().requests > 0
    })
    .await;
    let downloads = scene.downloads().len();
    scene.read(&image).await;
    assert_eq!(scene.downloads().len(), downloads, "the proxy comes first");
}

#[tokio::test]
async fn the_registry_is_asked_at_once_when_both_are_gone() {
    let scene = Scene::start();
    let image = scene.open_with_socket(PeerCredentials::Withheld);
    scene.daemon.set(Fault::Gone);
    let (took, came) = scene.read(&image).await;
    assert!(took < NOTHING && came == 0, "{took:?}");
    assert_eq!((scene.asked_directly(), scene.links_left()), (1, Vec::new()));
}

#[tokio::test]
async fn an_abandoned_read_leaves_no_link() {
    let scene = Scene::start();
    let image = scene.open_with_socket(PeerCredentials::Withheld);
    let place = image.places().remove(0);
    scene.daemon.set(Fault::ProxyGone);
    scene.registry.set_latency(Duration::from_millis(300));
    let waits = read(&*place, &scene.blob, 5..9_000);
    tokio::time::timeout(Duration::from_millis(150), waits).await.unwrap_err();
    assert_eq!(scene.downloads().len(), 1);
    within(5, async || scene.daemon.stats().served > 0).await;
    within(5, async || scene.links_left().is_empty()).await;
}

#[tokio::test]
async fn the_daemon_sees_logins_only_where_the_operator_allows_it() {
    for credentials in [PeerCredentials::Withheld, PeerCredentials::Shown] {
        let is_trusted = credentials == PeerCredentials::Shown;
        let scene = Scene::start();
        scene.registry.require(Login::Basic("joe".into(), "secret".into()));
        let image = scene.open_with_socket(credentials);
        image.manifest(None).await.unwrap();
        scene.daemon.set(Fault::ProxyGone);
        let came = scene.read(&image).await.1;
        assert_eq!((came > 0, scene.asked_directly()), (is_trusted, u64::from(!is_trusted)));
        let downloads = scene.downloads();
        assert_eq!(downloads.len(), usize::from(is_trusted), "{downloads:#?}");
        assert!(downloads.iter().all(Logged::is_authorized), "{downloads:#?}");
    }
}
