//! The logins that may fetch an image: pull secrets of containerd's clients, and containerd's
//! directory of registries.

use std::{
    collections::HashMap,
    fs::{self, File},
    os::unix::{fs::PermissionsExt as _, net::UnixStream},
    path::{Path, PathBuf},
    process::Child,
    thread,
    time::{Duration, Instant},
};

use lazuli_image::{
    Algorithm, Digest,
    oci::{chain_ids, media_type},
};
use lazuli_snapshotter::api::snapshots::{
    PrepareSnapshotRequest, RemoveSnapshotRequest, StatSnapshotRequest,
    snapshots_client::SnapshotsClient,
};
use lazuli_testkit::{
    kernel::{Feature, require},
    odd,
    registry::{FakeRegistry, Fault, Login},
    tls::{self, Authority},
};
use serde_json::Value;
use tonic::{Code, Status, transport::Endpoint};

use crate::{drivers::able, lazuli::Lazuli, policy::signer::digest_of, registry::Registry};

/// Each is one chunk, so that reading one is one request.
const FILES: [&str; 5] = ["one", "two", "three", "four", "five"];

/// Only data that is read arrives.
const FETCH: &str =
    "[prefetch]\nahead = \"nothing\"\nrest_bytes_per_second = 0\n[fetch]\namplify_bytes = 0\n";

fn content(name: &str) -> Vec<u8> {
    let seed = FILES.iter().position(|file| *file == name).unwrap();
    odd::random(seed as u64, 200_000)
}

/// An image of [`FILES`] in a registry.
fn convert(lazuli: &Lazuli, image: &str) {
    let source = lazuli.directory("source");
    FILES.iter().for_each(|name| fs::write(source.join(name), content(name)).unwrap());
    lazuli.ok(["convert", "dir:source", image]);
}

fn read(directory: &Path, name: &str) -> bool {
    match fs::read(directory.join(name)) {
        Ok(bytes) => {
            assert!(bytes == content(name), "{name} has wrong bytes");
            true
        }
        Err(error) => {
            assert_eq!(error.raw_os_error(), Some(5), "{name}: {error}");
            false
        }
    }
}

fn wait(what: &str, mut done: impl FnMut() -> bool) {
    let started = Instant::now();
    while !done() {
        assert!(started.elapsed() < Duration::from_secs(30), "waited for {what}");
        thread::sleep(Duration::from_millis(50));
    }
}

/// A daemon that serves containerd, and a registry that requires a login.
struct Rig {
    lazuli: Lazuli,
    registry: FakeRegistry,
    daemon: Child,
    runtime: tokio::runtime::Runtime,
    /// Digest of the image's manifest.
    manifest: String,
    /// Chain ids of its layers: data, and the bootstrap.
    layers: [String; 2],
}

/// The labels that a client puts on a snapshot.
type Labels = HashMap<String, String>;

impl Rig {
    fn new() -> Self {
        let (lazuli, registry) = (Lazuli::new(), FakeRegistry::start().unwrap());
        convert(&lazuli, &format!("{}/app:1", registry.host()));
        let manifest = registry.manifest("app", "1").unwrap();
        let layers = layers(&registry, &manifest);
        let manifest = Algorithm::Sha256.digest(&manifest).to_string();
        let config = format!(
            "{FETCH}deadline_seconds = 5\n[snapshotter]\naddress = {:?}\n",
            lazuli.path("s.sock")
        );
        lazuli.configure_all(&config);
        let log = File::create(lazuli.directory("root").join("daemon.log")).unwrap();
        let mut command = lazuli.command(["--log", "debug", "daemon"]);
        command.env("REGISTRY_AUTH_FILE", lazuli.path("auth.json"));
        let daemon = command.stderr(log).spawn().unwrap();
        wait("the socket", || UnixStream::connect(lazuli.path("s.sock")).is_ok());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        Rig { lazuli, registry, daemon, runtime, manifest, layers }
    }

    /// Accepts this password alone from now on. Tokens given for the one before are refused.
    fn require(&self, password: &str) {
        self.registry.require(Login::Bearer("joe-the-user".into(), password.into()));
        self.registry.expire_tokens();
    }

    fn call<T>(
        &self,
        work: impl AsyncFnOnce(SnapshotsClient<tonic::transport::Channel>) -> T,
    ) -> T {
        let socket = format!("unix://{}", self.lazuli.path("s.sock").display());
        self.runtime.block_on(async {
            let channel = Endpoint::from_shared(socket).unwrap().connect().await.unwrap();
            work(SnapshotsClient::new(channel)).await
        })
    }

    fn prepare(&self, key: &str, parent: &str, labels: Labels) -> Status {
        let (snapshotter, key, parent) = ("lazuli".into(), key.into(), parent.into());
        let request = PrepareSnapshotRequest { snapshotter, key, parent, labels };
        self.call(async |mut client| client.prepare(request).await).unwrap_err()
    }

    /// Asks for both layers, as a client does that was given a pull secret; the answer to the
    /// second, or the first that is an error.
    fn pull(&self, password: Option<&str>) -> Status {
        let labels = |chain: &str, kind: &str| {
            let mut labels = Labels::from([
                ("containerd.io/snapshot.ref".into(), chain.into()),
                (format!("containerd.io/snapshot/{kind}"), "true".into()),
            ]);
            let image = format!("{}/app:1", self.registry.host());
            labels.insert("containerd.io/snapshot/cri.image-ref".into(), image);
            let digest = "containerd.io/snapshot/cri.manifest-digest";
            labels.insert(digest.into(), self.manifest.clone());
            for (name, value) in
                [("pullusername", "joe-the-user"), ("pullsecret", password.unwrap_or_default())]
            {
                labels.insert(format!("containerd.io/snapshot/{name}"), value.into());
            }
            labels
        };
        let [data, bootstrap] = &self.layers;
        let key = |target: &str| format!("default/1/extract-1 {target}");
        let answer = self.prepare(&key(data), "", labels(data, "nydus-blob"));
        if answer.code() != Code::AlreadyExists {
            return answer;
        }
        self.prepare(&key(bootstrap), data, labels(bootstrap, "nydus-bootstrap"))
    }

    /// The directory at which the image is mounted.
    fn mounted(&self) -> PathBuf {
        let status = self.lazuli.status();
        let [mount] = &status["mounts"].as_array().unwrap()[..] else { panic!("{status:#}") };
        mount["mountpoint"].as_str().unwrap().into()
    }

    fn logins(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.lazuli.root().join("logins")).unwrap();
        entries.map(|entry| entry.unwrap().path()).collect()
    }
}

/// Chain ids of the two layers that the configuration of an image in the registry lists.
fn layers(registry: &FakeRegistry, manifest: &[u8]) -> [String; 2] {
    let manifest: Value = serde_json::from_slice(manifest).unwrap();
    let config = manifest["config"]["digest"].as_str().unwrap().parse().unwrap();
    let config: Value = serde_json::from_slice(&registry.blob("app", &config).unwrap()).unwrap();
    let diff_ids = config["rootfs"]["diff_ids"].as_array().unwrap().iter();
    let diff_ids: Vec<Digest> = diff_ids.map(|id| id.as_str().unwrap().parse().unwrap()).collect();
    let chain = chain_ids(diff_ids).iter().map(Digest::to_string).collect::<Vec<_>>();
    chain.try_into().unwrap()
}

impl Drop for Rig {
    fn drop(&mut self) {
        let _ = self.lazuli.output(["stop", "--force"]);
        let _ = self.daemon.wait();
    }
}

#[test]
fn pull_secrets_are_used_kept_renewed_and_never_shown() {
    if !able("fanotify") {
        return;
    }
    let rig = Rig::new();
    rig.require("hush-1");
    for password in [None, Some("hush-wrong")] {
        let refused = rig.pull(password);
        assert_eq!(refused.code(), Code::Unavailable, "{refused}");
        let text = refused.message();
        assert!(text.contains("refuses access") || text.contains("access token"), "{text}");
        assert!(!text.contains("hush"), "{text}");
    }
    assert!(rig.logins().is_empty());
    let here = rig.pull(Some("hush-1"));
    assert_eq!(here.code(), Code::AlreadyExists, "{here}");
    let image = rig.mounted();
    assert!(read(&image, "one"));

    // A client that brings a wrong one takes the mount's away neither here nor on the disk.
    assert_eq!(rig.pull(Some("hush-wrong")).code(), Code::AlreadyExists);

    // Another worker has it, too.
    rig.lazuli.kill(rig.lazuli.worker());
    rig.registry.expire_tokens();
    assert!(read(&image, "two"));
    let mut takeover = rig.lazuli.command(["--log", "debug", "daemon", "--takeover"]);
    takeover.env("REGISTRY_AUTH_FILE", rig.lazuli.path("auth.json"));
    assert!(takeover.status().unwrap().success());
    rig.registry.expire_tokens();
    assert!(read(&image, "three"));

    // The password is changed while the image is in use, and a client pulls with the new one.
    rig.require("hush-2");
    assert!(!read(&image, "four"));
    assert_eq!(rig.pull(Some("hush-2")).code(), Code::AlreadyExists);
    assert!(read(&image, "four"));

    // It is changed again, and this time the node's own file is.
    rig.require("hush-3");
    assert!(!read(&image, "five"));
    let host = rig.registry.host();
    let entry =
        format!(r#"{{"auths":{{"{host}":{{"username":"joe-the-user","password":"hush-3"}}}}}}"#);
    fs::write(rig.lazuli.path("auth.json"), entry).unwrap();
    wait("the new password", || read(&image, "five"));

    // No credential is visible.
    let stat = StatSnapshotRequest { snapshotter: "lazuli".into(), key: rig.layers[1].clone() };
    let stat = rig.call(async |mut client| client.stat(stat).await).unwrap();
    let status = rig.lazuli.status();
    let log = rig.lazuli.log();
    assert!(log.contains("DEBUG lazuli_registry"), "is the log verbose? {log}");
    for text in [format!("{stat:?}"), format!("{status}"), log] {
        assert!(!text.contains("hush") && !text.contains("joe-the-user"), "{text}");
    }
    let [login] = &rig.logins()[..] else { panic!("{:?}", rig.logins()) };
    assert_eq!(fs::metadata(login).unwrap().permissions().mode() & 0o777, 0o600);
    for key in rig.layers.iter().rev().cloned() {
        let remove = RemoveSnapshotRequest { snapshotter: "lazuli".into(), key };
        rig.call(async |mut client| client.remove(remove).await).unwrap();
    }
    assert!(rig.logins().is_empty());
    assert_eq!(rig.registry.violations(), Vec::<String>::new());
}

/// The descriptors of the configuration and the layers in a manifest.
fn blobs(manifest: &[u8]) -> Vec<Digest> {
    let manifest: Value = serde_json::from_slice(manifest).unwrap();
    let layers = manifest["layers"].as_array().unwrap().iter();
    let all = layers.chain([&manifest["config"]]);
    all.map(|blob| blob["digest"].as_str().unwrap().parse().unwrap()).collect()
}

/// A tenant that knows the digests of another tenant's image, and has a registry.
#[test]
fn a_registry_that_lacks_a_private_blob_gets_nothing_of_it_from_the_cache() {
    if !able("fanotify") {
        return;
    }
    let rig = Rig::new();
    rig.require("hush-1");
    assert_eq!(rig.pull(Some("hush-1")).code(), Code::AlreadyExists);
    let image = rig.mounted();
    assert!(read(&image, "one"));

    let other = FakeRegistry::start().unwrap();
    let manifest = rig.registry.manifest("app", "1").unwrap();
    let blobs = blobs(&manifest);
    for digest in &blobs {
        other.put_blob("stolen", &rig.registry.blob("app", digest).unwrap());
    }
    other.put_manifest("stolen", "1", media_type::MANIFEST, &manifest);
    // It answers HEAD, and delivers something else.
    let data = &blobs[0].to_string();
    other.fault("GET", data, usize::MAX, Fault::WrongBytes);
    let (name, at) = (format!("{}/stolen:1", other.host()), rig.lazuli.directory("stolen"));
    for restart in [false, true] {
        if restart {
            rig.lazuli.kill(rig.lazuli.worker());
        }
        let error = rig.lazuli.fails(["mount", &name, "stolen"]);
        let expected = format!("the registry does not deliver blob {data}");
        assert!(error.contains(&expected) && error.contains(&other.host()), "{error}");
        assert!(read(&image, "one"));
    }

    other.clear_faults();
    rig.lazuli.ok(["mount", &name, "stolen"]);
    assert!(read(&at, "one") && read(&image, "one"));
    rig.lazuli.ok(["umount", "stolen"]);
    // From now on it need not prove it again.
    other.fault("GET", data, usize::MAX, Fault::WrongBytes);
    rig.lazuli.ok(["mount", &name, "stolen"]);
    rig.lazuli.ok(["umount", "stolen"]);
}

/// The same on a node with a bundle, which has the private blob and another image of the tenant.
#[test]
fn a_bundle_proves_the_blobs_of_its_own_images_alone() {
    if !able("fanotify") {
        return;
    }
    let rig = Rig::new();
    let other = FakeRegistry::start().unwrap();
    let [harmless, stolen] = ["0", "1"].map(|tag| format!("{}/stolen:{tag}", other.host()));
    fs::write(rig.lazuli.path("source").join("more"), odd::random(9, 300_000)).unwrap();
    convert(&rig.lazuli, &harmless);
    let app = format!("{}/app:1", rig.registry.host());
    let bundle = rig.lazuli.root().join("bundle");
    let deliver = |image: &str| {
        rig.lazuli.ok(["bundle", "--to", bundle.to_str().unwrap(), image]);
    };
    deliver(&app);
    deliver(&harmless);
    rig.lazuli.ok(["copy", &app, &stolen]);
    rig.require("hush-1");
    assert_eq!(rig.pull(Some("hush-1")).code(), Code::AlreadyExists);
    assert!(read(&rig.mounted(), "one"));
    let data = blobs(&other.manifest("stolen", "1").unwrap())[0].to_string();
    other.fault("GET", &data, usize::MAX, Fault::WrongBytes);
    let at = rig.lazuli.directory("stolen");
    let pinned = format!("{}/stolen@{}", other.host(), digest_of(&other, "stolen", "1"));
    for image in [&stolen, &pinned] {
        let error = rig.lazuli.fails(["mount", image, "stolen"]);
        assert!(error.contains(&format!("the registry does not deliver blob {data}")), "{error}");
    }

    other.clear_faults();
    deliver(&stolen);
    other.go_away();
    rig.lazuli.ok(["mount", &stolen, "stolen"]);
    assert!(read(&at, "one"));
    rig.lazuli.ok(["umount", "stolen"]);
}

/// The same with a blob of its own that has a chunk of the private one.
#[test]
fn chunks_of_a_private_image_are_copied_within_its_repository_only() {
    if !able("fanotify") {
        return;
    }
    let rig = Rig::new();
    let other = FakeRegistry::start().unwrap();
    let name = format!("{}/stolen:1", other.host());
    fs::write(rig.lazuli.path("source").join("more"), odd::random(9, 300_000)).unwrap();
    convert(&rig.lazuli, &name);
    let stolen = blobs(&other.manifest("stolen", "1").unwrap())[0];
    assert_ne!(stolen, blobs(&rig.registry.manifest("app", "1").unwrap())[0]);
    rig.require("hush-1");
    assert_eq!(rig.pull(Some("hush-1")).code(), Code::AlreadyExists);
    assert!(read(&rig.mounted(), "one"));

    other.fault("GET", &stolen.to_string(), usize::MAX, Fault::WrongBytes);
    let at = rig.lazuli.directory("stolen");
    rig.lazuli.ok(["mount", &name, "stolen"]);
    assert!(!read(&at, "one"));
    rig.lazuli.ok(["umount", "stolen"]);
}

/// An authority of our own, and files that change while the image is in use.
#[test]
fn registries_are_reached_as_containerds_directory_says() {
    if !able("fanotify") || !require(Feature::Program("docker-registry")) {
        return;
    }
    let lazuli = Lazuli::new();
    let config =
        |directory: &Path| format!("hosts_dir = {directory:?}\n{FETCH}deadline_seconds = 30\n");
    fs::write(lazuli.path("config.toml"), config(&lazuli.path("certs.d"))).unwrap();
    let [ours, newer] = ["ours", "newer"].map(Authority::new);
    let plain = Registry::start();
    let serve = |authority: &Authority, name: &str| {
        let tls::Certificate { certificate, key } = authority.server("127.0.0.1");
        let [shown, secret] = ["pem", "key"].map(|end| lazuli.path(&format!("{name}.{end}")));
        fs::write(&shown, certificate).unwrap();
        fs::write(&secret, key).unwrap();
        plain.with_tls(&shown, &secret)
    };
    let registry = serve(&ours, "first");
    let host = registry.image("").trim_end_matches('/').to_owned();
    let image = format!("{host}/app:1");
    let file = |name: &str, text: &str| {
        let path = lazuli.directory(&format!("certs.d/{host}")).join(name);
        fs::write(&path, text).unwrap();
        path
    };
    let hosts = file("hosts.toml", "ca = 'ca.pem'\n");
    let error = lazuli.fails(["inspect", &image]);
    assert!(
        error.contains("ca.pem: there is no such file") && error.contains("hosts.toml"),
        "{error}"
    );
    file("ca.pem", &newer.certificate());
    let error = lazuli.fails(["inspect", &image]);
    assert!(error.contains("UnknownIssuer") && error.contains("`ca` in its hosts.toml"), "{error}");
    file("ca.pem", &ours.certificate());
    convert(&lazuli, &image);
    lazuli.ok(["inspect", &image]);
    let at = lazuli.directory("mnt");
    lazuli.ok(["mount", &image, "mnt"]);
    assert!(read(&at, "one"));

    // The registry moves, behind another authority. A reader waits until the file names the new
    // address.
    let moved = serve(&newer, "second");
    drop(registry);
    thread::scope(|scope| {
        let reader = scope.spawn(|| read(&at, "two"));
        thread::sleep(Duration::from_secs(1));
        file("new.pem", &newer.certificate());
        let port = moved.port();
        let text = format!("server = 'https://127.0.0.1:{port}'\nca = 'new.pem'\n");
        fs::write(&hosts, text).unwrap();
        assert!(reader.join().unwrap());
    });
    let right = fs::read(&hosts).unwrap();

    // The file is half written: images in use are fetched by the last good route.
    fs::write(&hosts, "ca = [").unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    while !lazuli.log().contains("the image is fetched as before") {
        assert!(Instant::now() < deadline, "the daemon does not look at the file");
        thread::sleep(Duration::from_millis(100));
    }
    assert!(read(&at, "three"));

    // The next worker has no route. It serves cached data, and other reads wait for the file.
    lazuli.kill(lazuli.worker());
    assert!(read(&at, "one") && read(&at, "three"));
    thread::scope(|scope| {
        let reader = scope.spawn(|| read(&at, "four"));
        thread::sleep(Duration::from_secs(1));
        fs::write(&hosts, right).unwrap();
        assert!(reader.join().unwrap());
    });
    fs::write(&hosts, "ca = [").unwrap();
    let other = lazuli.directory("other");
    let error = lazuli.fails(["mount", &image, other.to_str().unwrap()]);
    assert!(error.contains("hosts.toml: line 1"), "{error}");
    let mount: Value = lazuli.mount_status(&at);
    assert_eq!(mount["image"], image.as_str());
    lazuli.ok(["umount", "mnt"]);
}
