//! A private containerd with a private Lazuli and a private registry.

use std::{
    collections::HashMap,
    fs::{self, File},
    os::unix::net::UnixStream,
    path::PathBuf,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use lazuli_image::Algorithm;
use lazuli_snapshotter::api::snapshots::{
    PrepareSnapshotRequest, StatSnapshotRequest, snapshots_client::SnapshotsClient,
};
use lazuli_testkit::{
    kernel::{Feature, require},
    listing::{self, Listing},
};
use rustix::{
    mount::{UnmountFlags, unmount},
    process::{Pid, Signal, kill_process},
};
use serde_json::Value;
use tonic::{Code, Request, transport::Endpoint};

use super::names;
use crate::{
    lazuli::{Lazuli, corpus},
    registry::Registry,
};

/// How long things may take that take milliseconds.
const PATIENCE: Duration = Duration::from_secs(30);

/// The name of every pull's lease.
const LEASE: &str = "pull";

pub(super) struct Rig {
    pub(super) lazuli: Lazuli,
    registry: Registry,
    layout: PathBuf,
    /// containerd's name space: shims and runc have directories by it that are the machine's.
    space: String,
    containerd: Child,
    daemon: Child,
}

impl Rig {
    /// Starts everything, for tests with one image of the corpus.
    pub(super) fn new(image: &str) -> Option<Self> {
        let programs = ["containerd", "ctr", "runc", "docker-registry", "skopeo"];
        let needed = [Feature::Root, Feature::Fanotify, Feature::ErofsFileBacked];
        let needed = needed.into_iter().chain(programs.map(Feature::Program));
        if !needed.into_iter().all(require) {
            return None;
        }
        let layout = corpus(image)?;
        let lazuli = Lazuli::new();
        let snapshotter = lazuli.path("s.sock");
        fs::write(
            lazuli.path("config.toml"),
            format!("[snapshotter]\naddress = {snapshotter:?}\n"),
        )
        .unwrap();
        let log = File::create(lazuli.directory("root").join("daemon.log")).unwrap();
        let daemon = lazuli.command(["daemon"]).stderr(log).spawn().unwrap();
        let [root, state, socket, ttrpc] =
            ["containerd", "state", "c.sock", "t.sock"].map(|name| lazuli.path(name));
        let config = format!(
            "version = 2\nroot = {root:?}\nstate = {state:?}\n\
             disabled_plugins = [\"io.containerd.grpc.v1.cri\", \"io.containerd.internal.v1.opt\"]\n\
             [grpc]\naddress = {socket:?}\n[ttrpc]\naddress = {ttrpc:?}\n\
             [proxy_plugins.lazuli]\ntype = \"snapshot\"\naddress = {snapshotter:?}\n"
        );
        fs::write(lazuli.path("containerd.toml"), config).unwrap();
        let log = File::create(lazuli.path("containerd.log")).unwrap();
        let containerd = Command::new("containerd")
            .arg("--config")
            .arg(lazuli.path("containerd.toml"))
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        let number = std::process::id();
        let space = format!("lazuli-{number}-{}", super::next_number());
        let registry = Registry::start();
        let rig = Rig { lazuli, registry, layout, space, containerd, daemon };
        for socket in [snapshotter, socket] {
            wait(&format!("{}", socket.display()), || UnixStream::connect(&socket).is_ok());
        }
        Some(rig)
    }

    /// `ctr`, and whether it succeeded, with both of its outputs.
    pub(super) fn try_ctr(&self, arguments: &[&str]) -> (bool, String) {
        let mut command = Command::new("ctr");
        command.arg("--address").arg(self.lazuli.path("c.sock"));
        let output = command.args(["-n", &self.space]).args(arguments).output().unwrap();
        let text = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8_lossy(&text).into_owned())
    }

    /// Output of `ctr`, which must succeed.
    #[track_caller]
    pub(super) fn ctr(&self, arguments: &[&str]) -> String {
        let (success, output) = self.try_ctr(arguments);
        let log = || fs::read_to_string(self.lazuli.path("containerd.log")).unwrap_or_default();
        assert!(success, "{arguments:?}: {output}\n{}\n{}", self.lazuli.log(), log());
        output
    }

    /// Asks `ctr` until it succeeds: what was killed takes a moment to end.
    pub(super) fn settled(&self, arguments: &[&str]) {
        wait(&format!("{arguments:?}"), || self.try_ctr(arguments).0);
    }

    /// The image in the registry, as it is.
    pub(super) fn push_ordinary(&self) -> String {
        let image = self.registry.image("app:ordinary");
        let copied = Command::new("skopeo")
            .args(["copy", "--quiet", "--dest-tls-verify=false"])
            .arg(format!("oci:{}", self.layout.display()))
            .arg(format!("docker://{image}"))
            .output()
            .unwrap();
        assert!(copied.status.success(), "{}", String::from_utf8_lossy(&copied.stderr));
        image
    }

    /// The image in the registry, converted.
    pub(super) fn push_lazy(&self) -> String {
        let image = self.registry.image("app:lazy");
        self.lazuli.ok(["convert", &format!("oci:{}", self.layout.display()), &image]);
        image
    }

    /// Takes a data blob of an image out of the registry, and says which.
    pub(super) fn lose_data(&mut self, image: &str) -> String {
        let (manifest, _) = self.metadata(image);
        let blob = manifest["layers"][0]["digest"].as_str().unwrap().to_owned();
        self.registry.remove_blob(&blob);
        blob
    }

    /// Pulls as a client does that passes snapshot annotations on, such as the CRI service: asks for the snapshot of each
    /// layer, with its labels, and fetches the layer only if there is no such snapshot yet. Debian's `ctr` asks without
    /// labels. The result is the chain id of the image, or what containerd says against a layer.
    pub(super) fn pull_lazily(&self, image: &str) -> Result<String, String> {
        // Until the image refers to its snapshots, nothing else keeps the garbage collector from them.
        self.ctr(&["leases", "create", "--id", LEASE]);
        let pulled = self.pull_leased(image);
        self.ctr(&["leases", "rm", "--sync", LEASE]);
        pulled
    }

    fn pull_leased(&self, image: &str) -> Result<String, String> {
        let (manifest, config) = self.metadata(image);
        let layers = manifest["layers"].as_array().unwrap();
        let diff_ids = config["rootfs"]["diff_ids"].as_array().unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let socket = format!("unix://{}", self.lazuli.path("c.sock").display());
        let digest = self.manifest_digest(image);
        let chain = runtime.block_on(async {
            let channel = Endpoint::from_shared(socket).unwrap().connect().await.unwrap();
            let mut client = SnapshotsClient::new(channel);
            let mut parent = String::new();
            for (layer, diff_id) in layers.iter().zip(diff_ids) {
                let diff_id = diff_id.as_str().unwrap();
                let chain = chain(&parent, diff_id);
                let mut labels: HashMap<String, String> =
                    serde_json::from_value(layer["annotations"].clone()).unwrap();
                for (label, value) in [
                    ("containerd.io/snapshot.ref", &*chain),
                    ("containerd.io/snapshot/cri.image-ref", image),
                    ("containerd.io/snapshot/cri.manifest-digest", &*digest),
                    ("containerd.io/snapshot/cri.layer-digest", layer["digest"].as_str().unwrap()),
                ] {
                    labels.insert(label.to_owned(), value.to_owned());
                }
                let prepare = PrepareSnapshotRequest {
                    snapshotter: "lazuli".to_owned(),
                    key: format!("extract-{} {chain}", super::next_number()),
                    parent,
                    labels,
                };
                let refused = client.prepare(self.in_space(prepare)).await.unwrap_err();
                if refused.code() != Code::AlreadyExists {
                    return Err(refused.message().to_owned());
                }
                let stat =
                    StatSnapshotRequest { snapshotter: "lazuli".to_owned(), key: chain.clone() };
                client.stat(self.in_space(stat)).await.unwrap();
                parent = chain;
            }
            Ok(parent)
        })?;
        // What an unpacking client notes, so that the snapshots live as long as the image.
        let note = format!("containerd.io/gc.ref.snapshot.lazuli={chain}");
        self.ctr(&["content", "label", manifest["config"]["digest"].as_str().unwrap(), &note]);
        Ok(chain)
    }

    /// The name of the snapshot that has all layers of an image.
    pub(super) fn chain_id(&self, image: &str) -> String {
        let (_, config) = self.metadata(image);
        let diff_ids = config["rootfs"]["diff_ids"].as_array().unwrap().iter();
        diff_ids.fold(String::new(), |parent, diff_id| chain(&parent, diff_id.as_str().unwrap()))
    }

    /// What is seen of a snapshot. (`ctr image mount` of 1.6 does not heed its `--snapshotter`.)
    pub(super) fn tree(&self, snapshotter: &str, chain_id: &str) -> Listing {
        let target = self.lazuli.directory(snapshotter);
        let path = target.to_str().unwrap();
        let snapshot = |arguments: &[&str]| {
            self.ctr(&[&["snapshot", "--snapshotter", snapshotter], arguments].concat())
        };
        // Not a view, which the garbage collector takes at any time.
        snapshot(&["prepare", "tree", chain_id]);
        let mount = snapshot(&["mounts", path, "tree"]);
        assert!(Command::new("sh").args(["-c", &mount]).status().unwrap().success(), "{mount}");
        let listing = listing::list(&target);
        unmount(&target, UnmountFlags::empty()).unwrap();
        snapshot(&["rm", "tree"]);
        listing.unwrap()
    }

    fn in_space<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        request.metadata_mut().insert("containerd-namespace", self.space.parse().unwrap());
        request.metadata_mut().insert("containerd-lease", LEASE.parse().unwrap());
        request
    }

    /// Manifest and config of an image, fetched into containerd.
    fn metadata(&self, image: &str) -> (Value, Value) {
        self.ctr(&["content", "fetch", "--plain-http", "--metadata-only", image]);
        let get = |digest: &str| -> Value {
            serde_json::from_str(&self.ctr(&["content", "get", digest])).unwrap()
        };
        let manifest = get(&self.manifest_digest(image));
        let config = get(manifest["config"]["digest"].as_str().unwrap());
        (manifest, config)
    }

    fn manifest_digest(&self, image: &str) -> String {
        let list = self.ctr(&["image", "ls"]);
        let line = list.lines().find(|line| line.starts_with(image)).unwrap();
        line.split_whitespace().nth(2).unwrap().to_owned()
    }

    /// What Lazuli has mounted.
    pub(super) fn mounts(&self) -> Vec<Value> {
        self.lazuli.status()["mounts"].as_array().unwrap().clone()
    }

    /// After everything was removed: no snapshot, no directory, no mount.
    pub(super) fn nothing_left(&self) {
        let snapshots = self.lazuli.root().join("snapshots");
        wait("the end of all snapshots", || {
            let list = self.ctr(&["snapshot", "--snapshotter", "lazuli", "ls"]);
            list.lines().count() == 1 && self.mounts().is_empty()
        });
        wait("an empty disk", || {
            let mut left = names(&snapshots);
            left.sort();
            left == ["metadata.redb", "trash"] && names(&snapshots.join("trash")).is_empty()
        });
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        for id in ["c", "c1", "c2"] {
            let _ = self.try_ctr(&["task", "rm", "--force", id]);
            let _ = self.try_ctr(&["container", "rm", id]);
        }
        let _ = self
            .containerd
            .id()
            .try_into()
            .map(|pid| Pid::from_raw(pid).map(|pid| kill_process(pid, Signal::TERM)));
        let _ = self.containerd.wait();
        let _ = self.lazuli.output(["stop", "--force"]);
        let _ = self.daemon.wait();
        for directory in ["runc", "fifo"] {
            let _ =
                fs::remove_dir(PathBuf::from("/run/containerd").join(directory).join(&self.space));
        }
    }
}

/// Compares two trees. The time of the root is that of the moment when somebody made a directory for it.
#[track_caller]
pub(super) fn assert_same(a: &Listing, b: &Listing) {
    assert!(a.paths().eq(b.paths()));
    for path in a.paths() {
        let [a, b] = [a, b].map(|tree| tree.get(path).unwrap().split(' '));
        let words = if path == b"/" { 3 } else { usize::MAX };
        assert!(a.clone().take(words).eq(b.clone().take(words)), "{path:?}: {a:?}, {b:?}");
    }
}

/// The name of a layer's snapshot on top of `parent`.
fn chain(parent: &str, diff_id: &str) -> String {
    if parent.is_empty() {
        return diff_id.to_owned();
    }
    Algorithm::Sha256.digest(format!("{parent} {diff_id}").as_bytes()).to_string()
}

#[track_caller]
fn wait(what: &str, mut done: impl FnMut() -> bool) {
    let started = Instant::now();
    while !done() {
        assert!(started.elapsed() < PATIENCE, "waited for {what}");
        thread::sleep(Duration::from_millis(20));
    }
}
