//! The mirror of a daemon: its port while processes are replaced, and the cost of a crowd.

use std::{
    fs::{self, File},
    net::TcpListener,
    os::fd::OwnedFd,
    process::{Child, Command},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use lazuli_image::oci::annotation::INDEX_OF;
use lazuli_testkit::{
    kernel::{Feature, require},
    odd,
    registry::{FakeRegistry, Logged},
};
use rustix::process::Signal;
use serde_json::json;

use crate::{
    lazuli::{Lazuli, corpus},
    policy::signer::Signer,
};

/// Time limit for operations that take milliseconds.
const TIMEOUT: Duration = Duration::from_secs(60);

struct Scene {
    lazuli: Lazuli,
    registry: FakeRegistry,
    address: String,
    daemon: Child,
}

impl Scene {
    fn new() -> Option<Self> {
        Self::with(|_| String::new())
    }

    /// `top` begins the configuration, after a key and before a table.
    fn with(top: impl FnOnce(&Lazuli) -> String) -> Option<Self> {
        if !require(Feature::Root) || !require(Feature::Fuse) {
            return None;
        }
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let address = format!("127.0.0.1:{port}");
        let lazuli = Lazuli::new();
        let hosts = lazuli.path("certs.d");
        let top = top(&lazuli);
        let mirror = format!("[mirror]\nlisten = \"{address}\"\n");
        lazuli.configure_all(&format!("hosts_dir = {hosts:?}\n{top}{mirror}"));
        lazuli.directory("root");
        let daemon = spawn(&lazuli);
        let scene = Scene { lazuli, registry: FakeRegistry::start().unwrap(), address, daemon };
        scene.set_up(&[]);
        let started = Instant::now();
        while scene.activity().is_null() {
            assert!(started.elapsed() < TIMEOUT, "{}", scene.lazuli.log());
            thread::sleep(Duration::from_millis(20));
        }
        Some(scene)
    }

    fn set_up(&self, more: &[&str]) -> String {
        self.lazuli.ok([&["setup", "mirror", "--containerd", "none.toml"][..], more].concat())
    }

    /// The mirror's activity, if there is one.
    fn activity(&self) -> serde_json::Value {
        let output = self.lazuli.output(["status", "--json"]);
        let status: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        status["mirror"].clone()
    }

    fn client(&self) -> reqwest::Client {
        let file = |name: &str| fs::read(self.lazuli.root().join("mirror").join(name)).unwrap();
        let ca = reqwest::Certificate::from_pem(&file("ca.pem")).unwrap();
        let identity = reqwest::Identity::from_pem(&file("client.pem")).unwrap();
        let builder = reqwest::Client::builder().tls_certs_only([ca]).identity(identity);
        // Each request has a connection of its own: two that wait in a pool die together, and two
        // requests in a row would meet them.
        builder.no_proxy().pool_max_idle_per_host(0).build().unwrap()
    }

    fn url(&self, path: &str) -> String {
        format!("https://{}/v2/app/{path}?ns={}", self.address, self.registry.host())
    }

    fn put_manifest(&self) -> String {
        let config = self.registry.put_blob("app", b"{}");
        let manifest = json!({"schemaVersion": 2, "layers": [],
            "config": {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": config, "size": 2}});
        let raw = serde_json::to_vec(&manifest).unwrap();
        let kind = "application/vnd.oci.image.manifest.v1+json";
        self.registry.put_manifest("app", "1", kind, &raw).to_string()
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        let _ = self.lazuli.output(["stop", "--force"]);
        let _ = self.daemon.wait();
    }
}

fn spawn(lazuli: &Lazuli) -> Child {
    let log = File::options().create(true).append(true).open(lazuli.root().join("daemon.log"));
    lazuli.command(["daemon"]).stderr(log.unwrap()).spawn().unwrap()
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

/// An ordinary image: nobody but the mirror asks for anything of it.
#[test]
fn signed_indexes_are_fetched_when_a_client_asks_for_the_image() {
    if let Some(indexed) = Indexed::new("signed") {
        indexed.ask();
        let started = Instant::now();
        while indexed.fetched() == 0 {
            assert!(started.elapsed() < TIMEOUT, "{:#?}", indexed.scene.registry.log());
            thread::sleep(Duration::from_millis(20));
        }
    }
}

#[test]
fn indexes_that_do_not_count_are_not_fetched() {
    for trust in ["nothing", "proven"] {
        if let Some(indexed) = Indexed::new(trust) {
            indexed.ask();
            thread::sleep(Duration::from_millis(500));
            assert_eq!(indexed.fetched(), 0, "{trust}");
        }
    }
}

/// A registry with an image and a signed index of it, and a mirror whose node trusts the key.
struct Indexed {
    scene: Scene,
    client: reqwest::Client,
    /// The digest of the index of its layer.
    digest: String,
}

impl Indexed {
    fn new(trust: &str) -> Option<Self> {
        let layout = corpus("busybox").filter(|_| require(Feature::Program("openssl")))?;
        let mut signer = None;
        let scene = Scene::with(|lazuli| {
            let made = signer.insert(Signer::new(&lazuli.directory(""), "good"));
            let policy = lazuli.path("policy.toml");
            let rule = format!("default = {{ accept = true, statements = [{:?}] }}", made.public());
            fs::write(&policy, rule).unwrap();
            format!("policy = {policy:?}\n[index]\ntrust = {trust:?}\n")
        })?;
        let image = format!("{}/app:1", scene.registry.host());
        let (key, signer) = (["index", &image, "--sign"], signer?);
        let layout = format!("oci:{}:latest", layout.display());
        scene.lazuli.ok(["copy", &layout, &image]);
        scene.lazuli.ok([&key[..], &[signer.private().to_str().unwrap()]].concat());
        let client = scene.client();
        let manifest = scene.registry.manifest("app", "1").unwrap();
        let subject = lazuli_image::Algorithm::Sha256.digest(&manifest);
        let listed = format!("http://{}/v2/app/referrers/{subject}", scene.registry.host());
        let listed: serde_json::Value = serde_json::from_str(&get(&client, listed)).unwrap();
        let index = listed["manifests"][0]["digest"].as_str().unwrap();
        let index = scene.registry.manifest("app", index).unwrap();
        let index: serde_json::Value = serde_json::from_slice(&index).unwrap();
        let of_layer = |it: &&serde_json::Value| it["annotations"][INDEX_OF].is_string();
        let of_layer = index["layers"].as_array().unwrap().iter().find(of_layer).unwrap();
        let digest = of_layer["digest"].as_str().unwrap().to_owned();
        scene.registry.reset_stats();
        Some(Indexed { scene, client, digest })
    }

    /// Asks the mirror for the image.
    fn ask(&self) {
        get(&self.client, self.scene.url("manifests/1"));
    }

    /// How often the index was asked for.
    fn fetched(&self) -> usize {
        let is_it = |it: &&Logged| it.method == "GET" && it.target.contains(&self.digest);
        self.scene.registry.log().iter().filter(is_it).count()
    }
}

fn get(client: &reqwest::Client, url: String) -> String {
    let answer = async { client.get(url).send().await?.error_for_status()?.text().await };
    runtime().block_on(answer).unwrap()
}

/// A client that asks all the time meets a mirror, whatever becomes of the worker: a request may
/// fail, the next one does not.
#[test]
fn a_worker_that_dies_or_is_replaced_costs_a_client_one_retry() {
    let Some(scene) = Scene::new() else { return };
    let digest = scene.put_manifest();
    let (client, url) = (scene.client(), scene.url("manifests/1"));
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let answered = Arc::new(AtomicUsize::new(0));
    let answers = answered.clone();
    let asking = thread::spawn(move || {
        runtime().block_on(async {
            let (mut asked, mut failed, mut in_a_row) = (0, 0, 0);
            while stopped.try_recv() == Err(std::sync::mpsc::TryRecvError::Empty) {
                let answer = client.head(&url).send().await;
                asked += 1;
                match answer {
                    Ok(answer) => {
                        assert_eq!(answer.status(), 200);
                        assert_eq!(answer.headers()["docker-content-digest"], digest.as_str());
                        in_a_row = 0;
                        answers.fetch_add(1, Ordering::Relaxed);
                    }
                    Err(error) => {
                        (failed, in_a_row) = (failed + 1, in_a_row + 1);
                        assert!(in_a_row < 2, "{error:?}");
                    }
                }
            }
            (asked, failed)
        })
    });
    let more = || {
        let (before, started) = (answered.load(Ordering::Relaxed), Instant::now());
        while answered.load(Ordering::Relaxed) < before + 2 && !asking.is_finished() {
            assert!(started.elapsed() < TIMEOUT, "no answers");
            thread::sleep(Duration::from_millis(10));
        }
    };
    for _ in 0..3 {
        let before = scene.lazuli.worker();
        scene.lazuli.kill(before);
        more();
        scene.lazuli.ok(["daemon", "--takeover"]);
        more();
    }
    let _ = stop.send(());
    let (asked, failed) = asking.join().unwrap();
    // Each of the two ends the connection once.
    assert!(asked > 6 && failed <= 6, "{failed} of {asked} failed");
}

/// The data of one pull, and the number of concurrent pulls.
const LAYER: usize = 1 << 20;
const CROWD: usize = 1000;

/// The memory that the worker may have had at most.
const MOST_KIB: u64 = 256 << 10;

#[test]
fn a_thousand_pulls_at_once_take_less_than_256_mib() {
    let Some(scene) = Scene::new() else { return };
    let layers: Vec<_> = (0..10).map(|seed| odd::random(seed, LAYER)).collect();
    let digests = layers.iter().map(|layer| scene.registry.put_blob("app", layer));
    let digests: Vec<_> = digests.collect();
    let client = scene.client();
    let urls: Vec<_> = digests.iter().map(|digest| scene.url(&format!("blobs/{digest}"))).collect();
    let layers = Arc::new(layers);
    let (whole, later) = runtime().block_on(async {
        let pulls = (0..CROWD).map(|number| {
            let (client, url, layers) = (client.clone(), urls[number % 10].clone(), layers.clone());
            tokio::spawn(async move {
                let answer = client.get(url).send().await.unwrap();
                if answer.status() == 503 {
                    return false;
                }
                assert_eq!(answer.status(), 200);
                assert!(answer.bytes().await.unwrap() == layers[number % 10]);
                true
            })
        });
        let pulls: Vec<_> = pulls.collect();
        let (mut whole, mut later) = (0, 0);
        for pull in pulls {
            match pull.await.unwrap() {
                true => whole += 1,
                false => later += 1,
            }
        }
        (whole, later)
    });
    let worker = scene.lazuli.worker();
    let status = fs::read_to_string(format!("/proc/{}/status", worker.as_raw_nonzero())).unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    let peak: u64 = peak.trim().strip_suffix(" kB").unwrap().parse().unwrap();
    eprintln!("{whole} delivered, {later} left to the registry, {peak} KiB at most");
    assert!(peak < MOST_KIB, "{peak} KiB");
    // How many depends on how busy the machine is.
    assert!(whole > 0, "{later} left to the registry");
}

/// systemd owns the socket, which exists before the daemon and after it.
#[test]
fn a_socket_that_systemd_holds_is_the_mirrors() {
    let Some(mut scene) = Scene::new() else { return };
    scene.put_manifest();
    scene.lazuli.ok(["stop"]);
    scene.daemon.wait().unwrap();
    let listener = TcpListener::bind(&scene.address).unwrap();
    let root = scene.lazuli.root();
    let log = File::options().append(true).open(root.join("daemon.log")).unwrap();
    let daemon = scene.lazuli.command(["daemon"]);
    // As sd_listen_fds(3) has it.
    let script = "exec 3<&0 </dev/null; export LISTEN_PID=$$ LISTEN_FDS=1 LISTEN_FDNAMES=mirror; \
                  exec \"$0\" \"$@\"";
    let mut shell = Command::new("sh");
    shell.args(["-c", script]).arg(daemon.get_program()).args(daemon.get_args());
    shell.stdin(OwnedFd::from(listener.try_clone().unwrap())).stderr(log);
    scene.daemon = shell.spawn().unwrap();
    let (client, url) = (scene.client(), scene.url("manifests/1"));
    let answer = runtime().block_on(async { client.get(url).send().await.unwrap() });
    assert_eq!(answer.status(), 200);
    assert!(scene.lazuli.log().contains("answering pulls"));
    let pid = rustix::process::Pid::from_child(&scene.daemon);
    rustix::process::kill_process(pid, Signal::TERM).unwrap();
    scene.daemon.wait().unwrap();
    // It is still ours.
    assert!(TcpListener::bind(&scene.address).is_err());
}

#[test]
fn setting_up_and_undoing_leave_nothing_behind() {
    let Some(scene) = Scene::new() else { return };
    let file = scene.lazuli.path("certs.d/_default/hosts.toml");
    assert!(fs::read_to_string(&file).unwrap().contains(&scene.address));
    assert!(scene.set_up(&[]).contains("config_path"));
    assert!(scene.set_up(&["--undo"]).contains("removed"));
    assert!(!file.exists());
    assert!(scene.set_up(&["--undo"]).contains("nothing was set up"));
    let registry =
        "[plugins.\"io.containerd.grpc.v1.cri\".registry.mirrors.\"docker.io\"]\nendpoint = []\n";
    fs::write(scene.lazuli.path("c.toml"), registry).unwrap();
    let error = scene.lazuli.fails(["setup", "mirror", "--containerd", "c.toml"]);
    assert!(error.contains("registry.mirrors") && !file.exists(), "{error}");
}
