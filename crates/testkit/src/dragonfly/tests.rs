//! Tests of the fake itself, on whose behaviour other tests depend.

use std::{
    io::{BufReader, Read as _, Write as _},
    net::TcpStream,
    thread,
    time::{Duration, Instant},
};

use lazuli_image::Digest;

use super::*;
use crate::{
    http::read_head,
    odd,
    registry::{FakeRegistry, Login},
};

const PIECE: u64 = 10_000;
const SIZE: usize = 95_000;
/// For an answer that comes, on a busy machine too.
const PATIENCE: Duration = Duration::from_secs(10);
/// For an answer that does not come.
const SILENCE: Duration = Duration::from_millis(300);
const ALWAYS: (&str, &str) = ("x-dragonfly-scheduling-policy", "always");

struct Scene {
    registry: FakeRegistry,
    content: Vec<u8>,
    digest: Digest,
    daemons: [Daemon; 2],
}

struct Answer {
    status: u16,
    headers: Headers,
    body: Vec<u8>,
}

impl Scene {
    fn new() -> Self {
        let registry = FakeRegistry::start().unwrap();
        let content = odd::random(1, SIZE);
        let digest = registry.put_blob("app", &content);
        let swarm = Swarm::with_pieces_of(PIECE);
        Scene { registry, content, digest, daemons: [(); 2].map(|()| swarm.daemon().unwrap()) }
    }

    /// Asks a daemon for a range of the blob, or for all of it.
    fn get(&self, number: usize, range: Option<Range>, more: &[(&str, &str)]) -> Answer {
        let path = format!("/v2/app/blobs/{}", self.digest);
        let range = range.map(|range| format!("bytes={}-{}", range.start, range.end - 1));
        let upstream = format!("http://{}", self.registry.host());
        let mut headers = vec![("x-dragonfly-registry", upstream.as_str())];
        headers.extend(range.as_deref().map(|range| ("range", range)));
        headers.extend(more);
        get(&self.daemons[number].proxy(), &path, &headers).unwrap()
    }

    /// The same, of bytes that must be right.
    #[track_caller]
    fn read(&self, number: usize, range: Range, more: &[(&str, &str)]) {
        let answer = self.get(number, Some(range.clone()), more);
        assert_eq!(answer.status, 206);
        let expected = format!("bytes {}-{}/{SIZE}", range.start, range.end - 1);
        assert_eq!(answer.headers["content-range"], expected);
        assert_eq!(answer.headers["x-dragonfly-task-id"], self.digest.hex().to_string());
        assert!(answer.body == self.content[range], "wrong bytes");
    }

    /// The ranges that the registry was asked for.
    fn asked(&self) -> Vec<String> {
        self.registry.log().into_iter().map(|logged| logged.range.unwrap()).collect()
    }
}

type Range = std::ops::Range<usize>;

fn get(server: &str, path: &str, headers: &[(&str, &str)]) -> std::io::Result<Answer> {
    get_within(PATIENCE, server, path, headers)
}

fn get_within(
    patience: Duration,
    server: &str,
    path: &str,
    headers: &[(&str, &str)],
) -> std::io::Result<Answer> {
    let mut stream = TcpStream::connect(server.trim_start_matches("http://"))?;
    stream.set_read_timeout(Some(patience))?;
    let headers: String =
        headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    stream.write_all(format!("GET {path} HTTP/1.1\r\n{headers}\r\n").as_bytes())?;
    let mut reader = BufReader::new(stream);
    let (first, headers) = read_head(&mut reader)?.ok_or(std::io::ErrorKind::UnexpectedEof)?;
    let mut body = vec![0; headers["content-length"].parse().unwrap()];
    reader.read_exact(&mut body)?;
    Ok(Answer { status: first.split(' ').nth(1).unwrap().parse().unwrap(), headers, body })
}

#[test]
fn a_piece_comes_from_the_registry_once_for_all() {
    let scene = Scene::new();
    scene.registry.set_latency(Duration::from_millis(20));
    thread::scope(|scope| {
        for reader in 0..8 {
            let scene = &scene;
            scope.spawn(move || scene.read(reader % 2, 12_345..34_567, &[ALWAYS]));
        }
    });
    let mut asked = scene.asked();
    asked.sort();
    let pieces = ["bytes=10000-19999", "bytes=20000-29999", "bytes=30000-39999"];
    assert_eq!(asked, [&["bytes=0-0"; 2][..], &pieces].concat());
    let [one, two] = [0, 1].map(|number| scene.daemons[number].stats());
    assert_eq!(one.from_origin + two.from_origin, 30_002);
    assert_eq!(one.from_peers + two.from_peers, 30_000);
    assert_eq!((one.requests, one.served), (4, 4 * 22_222));
    scene.read(1, 90_000..SIZE, &[ALWAYS]);
    assert_eq!(scene.asked().last().unwrap(), "bytes=90000-94999");
}

#[test]
fn without_the_policy_no_peer_learns_of_a_piece() {
    let scene = Scene::new();
    for (number, header) in [(0, &[][..]), (1, &[ALWAYS][..]), (0, &[ALWAYS][..])] {
        scene.read(number, 0..10, header);
    }
    let [one, two] = [0, 1].map(|number| scene.daemons[number].stats());
    assert_eq!((one.from_origin, one.from_peers), (10_001, 0));
    assert_eq!((two.from_origin, two.from_peers), (10_001, 0));
}

#[test]
fn the_whole_is_fetched_when_it_is_asked_for_or_expected() {
    let scene = Scene::new();
    let whole = scene.get(0, None, &[ALWAYS]);
    assert!(whole.status == 200 && whole.body == scene.content);
    let prefetch = ("x-dragonfly-prefetch", "true");
    for _ in 0..2 {
        scene.read(1, 5..6, &[ALWAYS, prefetch]);
    }
    let begun = Instant::now();
    while scene.daemons[1].stats().from_peers < SIZE as u64 {
        assert!(begun.elapsed() < PATIENCE, "{:?}", scene.daemons[1].stats());
        thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(scene.daemons[1].stats().from_origin, 1);
}

#[test]
fn refusals_name_their_server() {
    let scene = Scene::new();
    let kind = |answer: Answer| (answer.status, answer.headers["x-dragonfly-error-type"].clone());
    let own = |status: u16| (status, "dfdaemon".to_owned());
    assert_eq!(kind(scene.get(0, Some(SIZE..SIZE + 1), &[])), own(500));
    let digest = scene.digest;
    let path = format!("/v2/app/blobs/{digest}?ns={}", scene.registry.host());
    assert_eq!(get(&scene.daemons[0].proxy(), &path, &[]).unwrap().status, 200);
    let manifest = get(&scene.daemons[0].proxy(), "/v2/app/manifests/1", &[]).unwrap();
    assert_eq!(kind(manifest), own(501));
    scene.registry.require(Login::Basic("joe".into(), "secret".into()));
    let backend = |status: u16| (status, "backend".to_owned());
    assert_eq!(kind(scene.get(1, Some(0..1), &[])), backend(401));
    scene.read(1, 0..1, &[("authorization", "Basic am9lOnNlY3JldA==")]);
    let log = scene.daemons[1].log();
    assert_eq!(log.iter().map(Logged::is_authorized).collect::<Vec<_>>(), [false, true]);
}

#[test]
fn a_healed_daemon_serves_again() {
    let scene = Scene::new();
    let [daemon, other] = &scene.daemons;
    let works = || scene.read(0, 0..10, &[ALWAYS]);
    let healthy = |patience| {
        get_within(patience, &daemon.health(), "/healthy", &[])
            .is_ok_and(|answer| answer.status == 200)
    };
    let blob = format!("/v2/app/blobs/{}", scene.digest);
    let silent = || get_within(SILENCE, &daemon.proxy(), &blob, &[]).is_err();
    let listens = || TcpStream::connect(daemon.proxy().trim_start_matches("http://")).is_ok();
    works();
    for (fault, lives) in [(Fault::Hung, false), (Fault::Stuck, true), (Fault::Gone, false)] {
        daemon.set(fault);
        assert!(silent(), "{fault:?}");
        assert_eq!(healthy(if lives { PATIENCE } else { SILENCE }), lives, "{fault:?}");
        daemon.heal();
        let begun = Instant::now();
        // Its two ports come back one after the other.
        while !healthy(PATIENCE) || !listens() {
            assert!(begun.elapsed() < PATIENCE, "{fault:?}");
        }
        works();
    }
    daemon.set(Fault::DiskFull);
    works();
    assert_eq!(scene.get(0, Some(20_000..20_001), &[ALWAYS]).status, 507);
    daemon.set(Fault::Alone);
    scene.read(1, 30_000..30_001, &[ALWAYS]);
    scene.read(0, 30_000..30_001, &[ALWAYS]);
    assert_eq!((daemon.stats().from_peers, other.stats().from_peers), (0, 0));
    daemon.set(Fault::WrongBytes);
    let inverted = |answer: Answer| answer.body[0] == !scene.content[0];
    assert!(inverted(scene.get(0, Some(0..1), &[ALWAYS])));
    assert!(inverted(scene.get(1, Some(0..1), &[ALWAYS])));
}
