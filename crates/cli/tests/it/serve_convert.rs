//! Conversion where images are pushed: events of registries, and what is in the registry
//! afterwards.

use std::{
    fs::{self, File},
    io::{Read as _, Write as _},
    net::{TcpListener, TcpStream},
    os::unix::{
        fs::{PermissionsExt as _, chown},
        process::CommandExt as _,
    },
    path::{Path, PathBuf},
    process::Child,
    thread,
    time::{Duration, Instant},
};

use lazuli_image::{Algorithm, Digest};
use lazuli_testkit::{
    kernel::{Feature, require},
    oci::{Compression, Image, Layer},
    registry::{FakeRegistry, Fault, Logged},
    tarball::{self, Entry},
};
use rustix::process::{Pid, Signal, geteuid, kill_process};
use serde_json::{Value, json};

use crate::{lazuli::Lazuli, policy::signer::Signer, registry::Registry};

/// More than any step takes on the busiest machine.
const TIMEOUT: Duration = Duration::from_secs(180);

const SECRET: &str = "a-secret-of-the-registry";

/// A user without any rights.
const NOBODY: u32 = 65534;

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const INDEX: &str = "application/vnd.oci.image.index.v1+json";
const LAYER_INDEX: &str = "application/vnd.lazuli.index.v1";

#[track_caller]
fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < TIMEOUT, "{what}");
        thread::sleep(Duration::from_millis(30));
    }
}

/// Sends a request, and returns status and body of the answer.
fn ask(address: &str, head: &str, body: &[u8]) -> std::io::Result<(u16, Vec<u8>)> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    let head = format!("{head}\r\nhost: {address}\r\nconnection: close\r\n");
    stream.write_all(format!("{head}content-length: {}\r\n\r\n", body.len()).as_bytes())?;
    stream.write_all(body)?;
    let mut answer = Vec::new();
    let mut buffer = [0; 4096];
    // The testkit's registry keeps the connection.
    let expected = |answer: &[u8]| {
        let end = answer.windows(4).position(|it| it == b"\r\n\r\n")? + 4;
        let head = String::from_utf8_lossy(&answer[..end]).to_ascii_lowercase();
        let length = head.split("content-length: ").nth(1)?.split('\r').next()?.parse::<usize>();
        Some((end, length.ok()?))
    };
    while expected(&answer).is_none_or(|(end, length)| answer.len() < end + length) {
        match stream.read(&mut buffer)? {
            0 => break,
            size => answer.extend(&buffer[..size]),
        }
    }
    let (end, length) = expected(&answer).ok_or(std::io::ErrorKind::UnexpectedEof)?;
    let status = String::from_utf8_lossy(&answer[9..12]).parse().unwrap();
    Ok((status, answer[end..end + length].to_vec()))
}

/// An event as CNCF distribution sends it.
fn event(action: &str, repository: &str, tag: &str, digest: &Digest) -> String {
    let mut target = json!({
        "mediaType": MANIFEST, "digest": digest, "repository": repository, "size": 1,
        "url": format!("http://elsewhere.example/v2/{repository}/manifests/{digest}"),
    });
    if action == "push" {
        target["tag"] = tag.into();
    }
    json!({"events": [{"id": "1", "action": action, "target": target}]}).to_string()
}

fn free_address() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

/// A server that makes images lazy, as a user without rights where tests are root.
struct Server<'a> {
    lazuli: &'a Lazuli,
    child: Child,
    address: String,
}

impl<'a> Server<'a> {
    fn configure(lazuli: &Lazuli, listen: &str, registry: &str, more: &str) {
        let secret = lazuli.path("secret");
        fs::write(&secret, format!("{SECRET}\n")).unwrap();
        fs::set_permissions(&secret, fs::Permissions::from_mode(0o600)).unwrap();
        let queue = lazuli.path("queue");
        lazuli.configure_all(&format!(
            "[convert]\nlisten = \"{listen}\"\nsecret_file = {secret:?}\nregistry = \"{registry}\"\n\
             repositories = [\"team/*\"]\ndirectory = {queue:?}\njobs = 2\n{more}\n"
        ));
    }

    fn start(lazuli: &'a Lazuli, registry: &str, more: &str) -> Self {
        let address = free_address();
        Self::configure(lazuli, &address, registry, more);
        Self::run(lazuli, &address)
    }

    fn run(lazuli: &'a Lazuli, address: &str) -> Self {
        let mut command = lazuli.command(["serve-convert"]);
        if geteuid().is_root() {
            for path in [lazuli.path("."), lazuli.path("secret")] {
                chown(path, Some(NOBODY), Some(NOBODY)).unwrap();
            }
            command.uid(NOBODY).gid(NOBODY);
        }
        let log = File::options().create(true).append(true).open(lazuli.path("log")).unwrap();
        let child = command.stderr(log).spawn().unwrap();
        let mut server = Server { lazuli, child, address: address.to_owned() };
        until("it answers", || {
            assert!(server.child.try_wait().unwrap().is_none(), "{}", server.log());
            ask(&server.address, "GET /healthz HTTP/1.1", b"")
                .is_ok_and(|(status, _)| status == 200)
        });
        server
    }

    /// Starts it once more after it has ended.
    fn again(&self) -> Self {
        Self::run(self.lazuli, &self.address)
    }

    fn post_with(&self, header: &str, path: &str, body: &[u8]) -> u16 {
        let head = format!("POST {path} HTTP/1.1\r\n{header}content-type: application/json");
        ask(&self.address, &head, body).unwrap().0
    }

    fn post(&self, body: &str) -> u16 {
        let header = format!("authorization: Bearer {SECRET}\r\n");
        self.post_with(&header, "/", body.as_bytes())
    }

    fn files(&self, name: &str) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.lazuli.path("queue").join(name)).unwrap();
        entries.map(|entry| entry.unwrap().path()).collect()
    }

    #[track_caller]
    fn until_idle(&self) {
        until("all jobs are done", || self.files("jobs").is_empty());
        until("temporary files are removed", || self.files("tmp").is_empty());
        assert!(self.files("failed").is_empty(), "{}", self.log());
    }

    fn log(&self) -> String {
        fs::read_to_string(self.lazuli.path("log")).unwrap_or_default()
    }

    /// Processes of this server, with its children.
    fn processes(&self) -> usize {
        let root = self.lazuli.root();
        let entries = fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().path());
        let is_ours = |path: &PathBuf| {
            let line = fs::read(path.join("cmdline")).unwrap_or_default();
            String::from_utf8_lossy(&line).contains(root.to_str().unwrap())
        };
        entries.into_iter().filter(is_ours).count()
    }

    fn signal(&mut self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }
}

impl Drop for Server<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if thread::panicking() {
            eprintln!("log:\n{}", self.log());
        } else {
            until("children end with it", || self.processes() == 0);
        }
    }
}

/// An image of its own for each seed.
fn image(seed: usize) -> Image {
    let content = format!("content {seed}\n").repeat(2000);
    let tar = tarball::write(&[Entry::file("file", content)]);
    Image::new([Layer::new(tar, Compression::Gzip)])
}

/// Puts an image into a registry. Returns the digest of its manifest.
fn put(registry: &FakeRegistry, repository: &str, tag: &str, image: &Image) -> Digest {
    let layout = tempfile::tempdir().unwrap();
    let digest = image.write_layout(layout.path(), "x").unwrap();
    let blobs = fs::read_dir(layout.path().join("blobs/sha256")).unwrap();
    for blob in blobs {
        let content = fs::read(blob.unwrap().path()).unwrap();
        if Algorithm::Sha256.digest(&content).to_string() == digest.to_string() {
            registry.put_manifest(repository, tag, MANIFEST, &content);
        } else {
            registry.put_blob(repository, &content);
        }
    }
    digest.to_string().parse().unwrap()
}

/// What refers to a manifest, of one type.
fn referrers(host: &str, repository: &str, subject: &Digest, kind: &str) -> Vec<Digest> {
    let encoded = kind.replace('+', "%2B");
    let head = format!("GET /v2/{repository}/referrers/{subject}?artifactType={encoded} HTTP/1.1");
    let (status, body) = ask(host, &head, b"").unwrap();
    let tag = subject.to_string().replace(':', "-");
    let body = match status {
        200 => body,
        _ => match ask(
            host,
            &format!("GET /v2/{repository}/manifests/{tag} HTTP/1.1\r\naccept: {INDEX}"),
            b"",
        ) {
            Ok((200, body)) => body,
            _ => return Vec::new(),
        },
    };
    let list: Value = serde_json::from_slice(&body).unwrap();
    let entries = list["manifests"].as_array().unwrap().iter();
    let entries = entries.filter(|entry| entry["artifactType"] == kind);
    entries.map(|entry| entry["digest"].as_str().unwrap().parse().unwrap()).collect()
}

fn indexes(registry: &FakeRegistry, repository: &str, subject: &Digest) -> Vec<Digest> {
    referrers(&registry.host(), repository, subject, LAYER_INDEX)
}

#[test]
fn no_push_is_lost_when_the_server_is_killed() {
    let (lazuli, registry) = (Lazuli::new(), FakeRegistry::start().unwrap());
    let mut server = Server::start(&lazuli, &registry.host(), "");
    let tags: Vec<(String, Digest)> = (0..50)
        .map(|seed| (seed.to_string(), put(&registry, "team/app", &seed.to_string(), &image(seed))))
        .collect();
    thread::scope(|scope| {
        let server = &server;
        for some in tags.chunks(5) {
            scope.spawn(move || {
                for (number, (tag, digest)) in some.iter().enumerate() {
                    let body = event("push", "team/app", tag, digest);
                    for _ in 0..=number % 2 {
                        assert_eq!(server.post(&body), 202);
                    }
                }
            });
        }
    });
    let done =
        || tags.iter().filter(|(_, it)| indexes(&registry, "team/app", it).len() == 1).count();
    until("a few are done", || done() >= 5);
    server.signal(Signal::KILL);
    server.child.wait().unwrap();
    until("children end with the server", || server.processes() == 0);
    assert!(done() < 50, "it was too fast for this test");
    assert!(!server.files("jobs").is_empty());
    let again = server.again();
    again.until_idle();
    for (tag, digest) in &tags {
        assert_eq!(indexes(&registry, "team/app", digest).len(), 1, "{tag}");
        let now = Algorithm::Sha256.digest(&registry.manifest("team/app", tag).unwrap());
        assert_eq!(now, *digest);
    }
    let entries = fs::read_dir(lazuli.path("queue")).unwrap().count();
    assert_eq!(entries, 4, "jobs, failed, tmp, lock");
    assert_eq!(registry.violations(), Vec::<String>::new());
}

#[test]
fn failures_are_repeated_and_hold_up_no_other_job() {
    let (lazuli, registry) = (Lazuli::new(), FakeRegistry::start().unwrap());
    let server = Server::start(&lazuli, &registry.host(), "");
    registry.fault("GET", "/v2/team/broken/blobs/", usize::MAX, Fault::Status(503));
    registry.fault("GET", "/v2/team/weak/blobs/", 2, Fault::Status(503));
    let names = ["broken", "weak", "a", "b", "c"].map(|name| format!("team/{name}"));
    let digests: Vec<Digest> = names
        .iter()
        .enumerate()
        .map(|(seed, name)| put(&registry, name, "1", &image(seed)))
        .collect();
    for (name, digest) in names.iter().zip(&digests) {
        assert_eq!(server.post(&event("push", name, "1", digest)), 202);
    }
    for (name, digest) in names.iter().zip(&digests).skip(1) {
        until(name, || indexes(&registry, name, digest).len() == 1);
    }
    // What fails waits, with its error.
    until("the failure is recorded", || {
        server.files("jobs").iter().any(|path| {
            let text = fs::read_to_string(path).unwrap_or_default();
            text.contains("team/broken:1") && text.contains("503") && text.contains("\"tries\":")
        })
    });
    assert!(indexes(&registry, "team/broken", &digests[0]).is_empty());
    assert!(server.log().contains("failed, and is tried again"));
    registry.clear_faults();
    server.until_idle();
    assert_eq!(indexes(&registry, "team/broken", &digests[0]).len(), 1);
}

#[test]
fn forged_events_cause_nothing() {
    let (lazuli, registry) = (Lazuli::new(), FakeRegistry::start().unwrap());
    let server = Server::start(&lazuli, &registry.host(), "");
    let elsewhere = TcpListener::bind("127.0.0.1:0").unwrap();
    elsewhere.set_nonblocking(true).unwrap();
    let digest = put(&registry, "team/app", "1", &image(1));
    let right = event("push", "team/app", "1", &digest);
    for header in ["", "authorization: Bearer wrong\r\n", "authorization: Basic YTpi\r\n"] {
        let head = format!("POST / HTTP/1.1\r\n{header}content-type: application/json");
        let (status, body) = ask(&server.address, &head, right.as_bytes()).unwrap();
        assert_eq!((status, body.len()), (401, 0), "{header}");
        let (status, _) =
            ask(&server.address, &format!("GET /jobs HTTP/1.1\r\n{header}a: b"), b"").unwrap();
        assert_eq!(status, 401);
    }
    let header = format!("authorization: Bearer {SECRET}\r\n");
    let host = elsewhere.local_addr().unwrap();
    let moved = right
        .replace("team/app", &format!("{host}/app"))
        .replace("elsewhere.example", &host.to_string());
    for body in [
        event("push", "other/app", "1", &digest),
        event("push", "team/app/deeper", "1", &digest),
        event("push", "team/../secret/app", "1", &digest),
        event("push", "team/..", "1", &digest),
        event("push", "team/app", "../1", &digest),
        event("push", "team/app", "1@sha256:00", &digest),
        event("pull", "team/app", "1", &digest),
        event("delete", "other/app", "", &digest),
        moved,
        json!({"type": "PULL_ARTIFACT"}).to_string(),
        json!({"type": "PUSH_ARTIFACT", "event_data": {"resources": [{"tag": "1",
            "resource_url": format!("{host}/team/app:1")}],
            "repository": {"repo_full_name": "../team/app"}}})
        .to_string(),
    ] {
        assert_eq!(server.post(&body), 202, "{body}");
    }
    for body in ["", "garbage", "{}", "[1]", "{\"events\":[{\"target\":1}]}", "\u{0}\u{ffff}"] {
        assert_eq!(server.post(body), 400, "{body}");
    }
    assert_eq!(server.post_with(&header, "/other", right.as_bytes()), 404);
    let (status, _) =
        ask(&server.address, &format!("PUT / HTTP/1.1\r\n{header}a: b"), b"").unwrap();
    assert_eq!(status, 405);
    // Too large by its announcement, and in pieces.
    let large = "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1048577\r\n";
    let chunked = "POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n";
    for (head, pieces) in [(large, 0), (chunked, 17)] {
        let mut stream = TcpStream::connect(&server.address).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        stream.write_all(format!("{head}{header}\r\n").as_bytes()).unwrap();
        for _ in 0..pieces {
            let piece = format!("10000\r\n{}\r\n", "x".repeat(0x10000));
            // It may have answered, and closed the connection.
            let _ = stream.write_all(piece.as_bytes());
        }
        let mut answer = [0; 12];
        match stream.read_exact(&mut answer) {
            Ok(()) => assert_eq!(&answer, b"HTTP/1.1 413"),
            Err(error) => assert!(pieces > 0, "{error}"),
        }
    }
    assert!(server.files("jobs").is_empty());
    assert_eq!(registry.stats().requests, 0, "{:?}", registry.log());
    assert!(elsewhere.accept().is_err());
    // The server still works.
    assert_eq!(server.post(&right), 202);
    server.until_idle();
    assert_eq!(indexes(&registry, "team/app", &digest).len(), 1);
}

#[test]
fn the_event_of_its_own_push_ends_without_work() {
    let (lazuli, registry) = (Lazuli::new(), FakeRegistry::start().unwrap());
    let server = Server::start(&lazuli, &registry.host(), "form = \"both\"");
    let ordinary = put(&registry, "team/app", "1", &image(1));
    assert_eq!(server.post(&event("push", "team/app", "1", &ordinary)), 202);
    server.until_idle();
    let raw = registry.manifest("team/app", "1").unwrap();
    let both: Value = serde_json::from_slice(&raw).unwrap();
    assert_eq!(both["manifests"][0]["digest"], ordinary.to_string());
    assert_eq!(both["manifests"].as_array().unwrap().len(), 2);
    registry.reset_stats();
    let digest = Algorithm::Sha256.digest(&raw);
    assert_eq!(server.post(&event("push", "team/app", "1", &digest)), 202);
    server.until_idle();
    assert!(server.log().contains("it has a lazy form"), "{}", server.log());
    let log = registry.log();
    assert!(!log.is_empty() && log.iter().all(|it| it.method == "GET"), "{log:#?}");
    assert_eq!(registry.manifest("team/app", "1").unwrap(), raw);
}

#[test]
fn a_tag_that_is_pushed_while_it_is_converted_keeps_the_new_image() {
    let (lazuli, registry) = (Lazuli::new(), FakeRegistry::start().unwrap());
    let server = Server::start(&lazuli, &registry.host(), "form = \"both\"");
    let old = put(&registry, "team/app", "1", &image(1));
    // The conversion is at its end when the other image is pushed.
    registry.fault("PUT", "/manifests/sha256:", 1, Fault::Latency(Duration::from_secs(3)));
    assert_eq!(server.post(&event("push", "team/app", "1", &old)), 202);
    let stores = |it: &Logged| it.method == "PUT" && it.target.contains("/manifests/sha256:");
    until("it stores manifests", || registry.log().iter().any(stores));
    let new = put(&registry, "team/app", "1", &image(2));
    server.until_idle();
    assert!(server.log().contains("was pushed again meanwhile"), "{}", server.log());
    let raw = registry.manifest("team/app", "1").unwrap();
    let both: Value = serde_json::from_slice(&raw).unwrap();
    assert_eq!(both["manifests"][0]["digest"], new.to_string());
    assert_eq!(both["manifests"].as_array().unwrap().len(), 2);
}

/// Converting would leave one platform under the tag.
#[test]
fn an_image_of_several_platforms_keeps_them_and_each_gets_an_index() {
    let (lazuli, registry) = (Lazuli::new(), FakeRegistry::start().unwrap());
    let server = Server::start(&lazuli, &registry.host(), "form = \"both\"");
    let entry = |seed: usize, os: &str, architecture: &str| {
        let digest = put(&registry, "team/app", "part", &image(seed));
        let size = registry.manifest("team/app", "part").unwrap().len();
        let platform = json!({"os": os, "architecture": architecture});
        json!({"mediaType": MANIFEST, "digest": digest, "size": size, "platform": platform})
    };
    let entries =
        [entry(1, "linux", "amd64"), entry(2, "linux", "arm64"), entry(3, "unknown", "unknown")];
    let digests =
        entries.clone().map(|it| it["digest"].as_str().unwrap().parse::<Digest>().unwrap());
    let index = json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": entries}).to_string();
    let digest = registry.put_manifest("team/app", "1", INDEX, index.as_bytes());
    for round in 0..2 {
        assert_eq!(server.post(&event("push", "team/app", "1", &digest)), 202);
        server.until_idle();
        let counts = digests.map(|it| indexes(&registry, "team/app", &it).len());
        assert_eq!(counts, [1, 1, 0]);
        assert_eq!(registry.manifest("team/app", "1").unwrap(), index.as_bytes());
        let pushes = registry.log().iter().filter(|it| it.method == "PUT").count();
        assert_eq!(pushes > 0, round == 0);
        registry.reset_stats();
    }
}

/// CNCF distribution writes a tag after it has sent the event.
#[test]
fn an_event_that_comes_before_its_tag_is_not_lost() {
    let (lazuli, registry) = (Lazuli::new(), FakeRegistry::start().unwrap());
    let server = Server::start(&lazuli, &registry.host(), "");
    let [old, new] = [1, 2].map(|seed| put(&registry, "team/app", "old", &image(seed)));
    let content = |digest: &Digest| registry.manifest("team/app", &digest.to_string()).unwrap();
    for (round, digest) in [old, new].iter().enumerate() {
        assert_eq!(server.post(&event("push", "team/app", "1", digest)), 202);
        let said = "it does not name sha256:";
        until("it waits for the tag", || server.log().matches(said).count() > round);
        assert!(indexes(&registry, "team/app", digest).is_empty());
        registry.put_manifest("team/app", "1", MANIFEST, &content(digest));
        server.until_idle();
        assert_eq!(indexes(&registry, "team/app", digest).len(), 1);
    }
}

#[test]
fn what_is_no_image_is_left_alone() {
    let (lazuli, registry) = (Lazuli::new(), FakeRegistry::start().unwrap());
    let server = Server::start(&lazuli, &registry.host(), "form = \"both\"");
    let blob = registry.put_blob("team/app", b"{}");
    let part = |kind: &str| json!({"mediaType": kind, "digest": blob, "size": 2});
    for (number, manifest) in [
        json!({"config": part("application/vnd.cncf.helm.config.v1+json"),
            "layers": [part("application/vnd.cncf.helm.chart.content.v1.tar+gzip")]}),
        json!({"config": part("application/vnd.oci.image.config.v1+json"),
            "layers": [part("application/vnd.dev.cosign.simplesigning.v1+json")]}),
    ]
    .into_iter()
    .enumerate()
    {
        let mut manifest = manifest;
        manifest["schemaVersion"] = 2.into();
        manifest["mediaType"] = MANIFEST.into();
        let raw = manifest.to_string();
        let digest =
            registry.put_manifest("team/app", &number.to_string(), MANIFEST, raw.as_bytes());
        assert_eq!(server.post(&event("push", "team/app", &number.to_string(), &digest)), 202);
    }
    assert_eq!(server.post(&event("push", "team/app", "gone", &blob)), 202);
    server.until_idle();
    let log = registry.log();
    assert!(log.len() >= 3 && log.iter().all(|it| it.method == "GET"), "{log:#?}");
}

#[test]
fn an_index_goes_with_its_image() {
    if !require(Feature::Program("openssl")) {
        return;
    }
    const BUNDLE: &str = "application/vnd.dev.sigstore.bundle.v0.3+json";
    for has_referrers in [true, false] {
        let (lazuli, registry) = (Lazuli::new(), FakeRegistry::start().unwrap());
        if !has_referrers {
            registry.without_referrers();
        }
        let signer = Signer::new(&lazuli.directory(""), "key");
        fs::set_permissions(signer.private(), fs::Permissions::from_mode(0o644)).unwrap();
        let sign = format!("sign = {:?}", signer.private());
        let server = Server::start(&lazuli, &registry.host(), &sign);
        let [kept, gone] = [1, 2].map(|it| put(&registry, "team/app", &it.to_string(), &image(it)));
        for (tag, digest) in [("1", &kept), ("2", &gone)] {
            assert_eq!(server.post(&event("push", "team/app", tag, digest)), 202);
        }
        server.until_idle();
        registry.reset_stats();
        assert_eq!(server.post(&event("push", "team/app", "1", &kept)), 202);
        server.until_idle();
        assert!(registry.log().iter().all(|it| it.method == "GET"), "{:#?}", registry.log());
        let host = registry.host();
        let index = indexes(&registry, "team/app", &gone)[0];
        assert_eq!(referrers(&host, "team/app", &index, BUNDLE).len(), 1);
        let (status, _) =
            ask(&host, &format!("DELETE /v2/team/app/manifests/{gone} HTTP/1.1"), b"").unwrap();
        assert_eq!(status, 202);
        // An event about an image that is there deletes nothing.
        for digest in [&kept, &gone] {
            assert_eq!(server.post(&event("delete", "team/app", "", digest)), 202);
        }
        server.until_idle();
        assert!(indexes(&registry, "team/app", &gone).is_empty());
        assert!(referrers(&host, "team/app", &index, BUNDLE).is_empty());
        assert!(registry.manifest("team/app", &index.to_string()).is_none());
        let list = gone.to_string().replace(':', "-");
        assert!(registry.manifest("team/app", &list).is_none());
        assert_eq!(indexes(&registry, "team/app", &kept).len(), 1);
        assert_eq!(registry.violations(), Vec::<String>::new());
    }
}

#[test]
fn a_signal_leaves_jobs_in_the_queue_and_no_process() {
    let (lazuli, registry) = (Lazuli::new(), FakeRegistry::start().unwrap());
    let mut server = Server::start(&lazuli, &registry.host(), "");
    if geteuid().is_root() {
        let status = fs::read_to_string(format!("/proc/{}/status", server.child.id())).unwrap();
        assert!(status.contains(&format!("Uid:\t{NOBODY}\t{NOBODY}\t{NOBODY}")), "{status}");
    }
    registry.fault("GET", "/blobs/", usize::MAX, Fault::Hang(Duration::from_secs(600)));
    let digest = put(&registry, "team/app", "1", &image(1));
    assert_eq!(server.post(&event("push", "team/app", "1", &digest)), 202);
    until("a job reads", || registry.log().iter().any(|it| it.target.contains("/blobs/")));
    assert!(server.processes() > 1);
    server.signal(Signal::TERM);
    assert!(server.child.wait().unwrap().success());
    assert_eq!(
        (server.processes(), server.files("jobs").len(), server.files("tmp").len()),
        (0, 1, 0)
    );
    registry.clear_faults();
    server.again().until_idle();
    assert_eq!(indexes(&registry, "team/app", &digest).len(), 1);
}

#[test]
fn a_job_that_takes_too_long_is_ended_and_repeated() {
    let (lazuli, registry) = (Lazuli::new(), FakeRegistry::start().unwrap());
    let server = Server::start(&lazuli, &registry.host(), "deadline_seconds = 2");
    let digest = put(&registry, "team/app", "1", &image(1));
    registry.fault("GET", "/blobs/", usize::MAX, Fault::Hang(Duration::from_secs(600)));
    assert_eq!(server.post(&event("push", "team/app", "1", &digest)), 202);
    let reason = "it took longer than 2s";
    until("it is ended", || {
        let jobs = server.files("jobs");
        jobs.iter().any(|path| fs::read_to_string(path).unwrap_or_default().contains(reason))
    });
    registry.clear_faults();
    server.until_idle();
    assert_eq!(indexes(&registry, "team/app", &digest).len(), 1);
}

#[test]
fn it_does_not_start_without_a_secret_or_twice() {
    let (lazuli, registry) = (Lazuli::new(), FakeRegistry::start().unwrap());
    lazuli.configure("");
    assert!(lazuli.fails(["serve-convert"]).contains("[convert]"));
    Server::configure(&lazuli, &free_address(), &registry.host(), "");
    let secret = lazuli.path("secret");
    fs::set_permissions(&secret, fs::Permissions::from_mode(0o644)).unwrap();
    assert!(lazuli.fails(["serve-convert"]).contains("chmod 0600"));
    fs::remove_file(&secret).unwrap();
    assert!(lazuli.fails(["serve-convert"]).contains("convert.secret_file"));
    Server::configure(&lazuli, &free_address(), &registry.host(), "sign = \"/nowhere/key\"");
    assert!(lazuli.fails(["serve-convert"]).contains("/nowhere/key"));
    let server = Server::start(&lazuli, &registry.host(), "");
    assert!(lazuli.fails(["serve-convert"]).contains("another process works in"));
    drop(server);
}

/// The table for a repository that follows another registry's.
fn following(from: &FakeRegistry, tags: &str) -> String {
    let host = from.host();
    format!(
        "[[convert.sync]]\nfrom = \"{host}/upstream/redis\"\nto = \"copies/redis\"\ntags = [{tags}]"
    )
}

#[test]
fn a_repository_follows_that_of_another_registry() {
    let (lazuli, registry) = (Lazuli::new(), FakeRegistry::start().unwrap());
    let source = FakeRegistry::start().unwrap();
    let numbers = (0..12).map(|number| format!("7.{number}"));
    let tags: Vec<String> = numbers.chain(["latest".to_owned()]).collect();
    let mut wanted: Vec<(String, Digest)> = tags
        .iter()
        .enumerate()
        .map(|(seed, tag)| (tag.clone(), put(&source, "upstream/redis", tag, &image(seed))))
        .collect();
    put(&source, "upstream/redis", "8.0", &image(80));
    let more = following(&source, "\"7.*\", \"latest\", \"absent\"");
    // Slow enough that it is killed in the middle.
    source.fault("GET", "/blobs/", usize::MAX, Fault::Latency(Duration::from_secs(1)));
    let mut server = Server::start(&lazuli, &registry.host(), &more);
    let has = |tag: &str| registry.manifest("copies/redis", tag).is_some();
    until("a few are copied", || wanted.iter().filter(|(tag, _)| has(tag)).count() >= 2);
    server.signal(Signal::KILL);
    server.child.wait().unwrap();
    until("children end with the server", || server.processes() == 0);
    assert!(wanted.iter().any(|(tag, _)| !has(tag)), "it was too fast for this test");
    source.clear_faults();
    let check = |server: &Server<'_>, wanted: &[(String, Digest)]| {
        until("all are there", || {
            wanted.iter().all(|(tag, digest)| {
                registry.manifest("copies/redis", tag).is_some_and(|raw| {
                    Algorithm::Sha256.digest(&raw) == *digest
                        && indexes(&registry, "copies/redis", digest).len() == 1
                })
            })
        });
        server.until_idle();
        assert!(!has("8.0") && !has("absent"));
    };
    let mut server = server.again();
    check(&server, &wanted);

    // A tag that moves is copied once more, and nothing else is.
    server.signal(Signal::TERM);
    server.child.wait().unwrap();
    wanted[12].1 = put(&source, "upstream/redis", "latest", &image(99));
    registry.reset_stats();
    let again = server.again();
    check(&again, &wanted);
    let is_tag = |it: &Logged| it.method == "PUT" && it.target.contains("/redis/manifests/");
    let log = registry.log();
    let pushed: Vec<&str> = log.iter().filter(|it| is_tag(it)).map(|it| &*it.target).collect();
    let others = |target: &&&str| !target.contains("sha256");
    assert_eq!(pushed.iter().filter(others).count(), 1, "{pushed:#?}");
    assert_eq!(registry.violations(), Vec::<String>::new());
}

#[test]
fn a_tag_of_both_forms_is_not_copied_again() {
    let (lazuli, registry) = (Lazuli::new(), FakeRegistry::start().unwrap());
    let source = FakeRegistry::start().unwrap();
    put(&source, "upstream/redis", "7.2", &image(1));
    let more = format!("form = \"both\"\n{}", following(&source, "\"7.2\""));
    let mut server = Server::start(&lazuli, &registry.host(), &more);
    let is_both = |raw: Vec<u8>| {
        let index: Value = serde_json::from_slice(&raw).unwrap();
        index["manifests"].as_array().is_some_and(|entries| entries.len() == 2)
    };
    until("it has both forms", || registry.manifest("copies/redis", "7.2").is_some_and(is_both));
    server.until_idle();
    server.signal(Signal::TERM);
    server.child.wait().unwrap();
    registry.reset_stats();
    let again = server.again();
    until("it is looked at", || again.log().contains("it has a lazy form"));
    again.until_idle();
    let log = registry.log();
    assert!(!log.is_empty() && log.iter().all(|it| it.method == "GET"), "{log:#?}");
}

/// Debian's docker-registry, its own notifications, and pushes by `lazuli copy`.
#[test]
fn images_pushed_to_docker_registry_get_an_index() {
    if !require(Feature::Program("docker-registry")) {
        return;
    }
    let lazuli = Lazuli::new();
    let address = free_address();
    let registry = Registry::with_events(&address, SECRET);
    let host = format!("127.0.0.1:{}", registry.port());
    Server::configure(&lazuli, &address, &host, "");
    let server = Server::run(&lazuli, &address);
    let digest: Digest =
        image(1).write_layout(&lazuli.path("layout"), "1").unwrap().to_string().parse().unwrap();
    lazuli.ok(["copy", "oci:layout:1", &registry.image("team/app:1")]);
    // It has no referrers API: the list is under a tag, whose event ends without work.
    until("an index", || referrers(&host, "team/app", &digest, LAYER_INDEX).len() == 1);
    server.until_idle();
    lazuli.ok(["copy", &registry.image("team/app:1"), "oci:copied:1"]);
    assert!(Path::new(&lazuli.path("copied/index.json")).exists());
    let index = referrers(&host, "team/app", &digest, LAYER_INDEX)[0];
    let (status, _) =
        ask(&host, &format!("DELETE /v2/team/app/manifests/{digest} HTTP/1.1"), b"").unwrap();
    assert_eq!(status, 202);
    let head = format!("GET /v2/team/app/manifests/{index} HTTP/1.1\r\naccept: {MANIFEST}");
    until("it is deleted", || ask(&host, &head, b"").unwrap().0 == 404);
    until("its list, too", || referrers(&host, "team/app", &digest, LAYER_INDEX).is_empty());
}
