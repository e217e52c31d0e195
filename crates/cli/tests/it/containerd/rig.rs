//! A private containerd with a private Lazuli and a private registry.

use std::{
    fs::{self, File},
    net::TcpListener,
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use lazuli_image::Algorithm;
use lazuli_testkit::{
    cri::{Client, CriError},
    kernel::{Feature, require},
    listing::{self, Listing},
    pause,
};
use rustix::{
    io::Errno,
    mount::{UnmountFlags, unmount},
    process::{Pid, Signal, kill_process},
};
use serde_json::Value;

use super::{
    leaks::{self, Held},
    next_number,
    programs::{Containerd, HOSTS, PAUSE},
};
use crate::{
    keeper::kill_both,
    lazuli::{Lazuli, corpus},
    registry::Registry,
    reliability::processes::{self, Pids, pids},
};

/// Time limit for operations that take milliseconds.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The name space of Kubernetes' containers, which `ctr` can be told to use as well. Names of
/// containers of all machines' containerds meet there, in directories of shims and of runc: see
/// [`Rig::own`].
const SPACE: &str = "k8s.io";

pub(super) struct Rig {
    pub(super) lazuli: Lazuli,
    pub(super) cri: Client,
    pub(super) containerd: Containerd,
    registry: Registry,
    layout: PathBuf,
    number: usize,
    processes: Mutex<Processes>,
    /// Resources held before there was any image.
    idle: Held,
}

struct Processes {
    containerd: Child,
    /// The keeper that was started first, or by [`Rig::start_daemon`].
    daemon: Child,
}

impl Rig {
    /// Starts everything, for tests with one image of the corpus.
    pub(super) fn new(containerd: Containerd, image: &str) -> Option<Self> {
        Self::configured(containerd, image, "")
    }

    /// The same with more in Lazuli's `[snapshotter]`.
    pub(super) fn configured(containerd: Containerd, image: &str, settings: &str) -> Option<Self> {
        Self::open(containerd, image, |_| String::new(), settings)
    }

    /// The same with more above all tables of Lazuli's configuration.
    pub(super) fn with(
        containerd: Containerd,
        image: &str,
        top: impl FnOnce(&Lazuli) -> String,
    ) -> Option<Self> {
        Self::open(containerd, image, top, "")
    }

    /// The same with a mirror, of which containerd is told, at a port of its own.
    pub(super) fn mirrored(containerd: Containerd, image: &str, settings: &str) -> Option<Self> {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let mirror = format!("[mirror]\nlisten = \"127.0.0.1:{port}\"\n{settings}\n");
        let hosts = |lazuli: &Lazuli| format!("hosts_dir = {:?}", lazuli.directory(HOSTS));
        let rig = Self::open(containerd, image, hosts, &mirror)?;
        rig.set_up_mirror(&[]);
        Some(rig)
    }

    /// `lazuli setup mirror`.
    pub(super) fn set_up_mirror(&self, more: &[&str]) {
        let configuration = self.lazuli.path("containerd.toml");
        let setup = ["setup", "mirror", "--containerd", configuration.to_str().unwrap()];
        self.lazuli.ok([&setup, more].concat());
    }

    /// Both.
    pub(super) fn open(
        containerd: Containerd,
        image: &str,
        top: impl FnOnce(&Lazuli) -> String,
        settings: &str,
    ) -> Option<Self> {
        let programs = ["runc", "docker-registry", "skopeo"];
        let needed = [Feature::Root, Feature::Fanotify, Feature::ErofsFileBacked];
        let needed = needed.into_iter().chain(programs.map(Feature::Program));
        if !needed.into_iter().all(require) || !containerd.is_here() {
            return None;
        }
        let layout = corpus(image)?;
        let lazuli = Lazuli::new();
        let base = lazuli.directory("");
        let snapshotter = lazuli.path("s.sock");
        let table = format!("[snapshotter]\naddress = {snapshotter:?}\n{settings}");
        let top = top(&lazuli);
        // Unless a test is about that, containerd unpacks ordinary images.
        let index = if top.contains("[index]") { "" } else { "[index]\nfirst = \"leave\"\n" };
        let config = format!("{top}\n{table}\n{index}");
        lazuli.configure_all(&config);
        fs::write(lazuli.path("containerd.toml"), containerd.configuration(&base)).unwrap();
        let archive = lazuli.path("pause.tar");
        fs::write(&archive, pause::archive(PAUSE).unwrap()).unwrap();
        lazuli.directory("root");
        let daemon = spawn_daemon(&lazuli);
        wait("the snapshot service", || snapshotter.exists());
        let mut child = spawn_containerd(containerd, &lazuli);
        let cri = connect(&lazuli, &mut child);
        let processes = Mutex::new(Processes { containerd: child, daemon });
        let registry = Registry::start();
        let (number, idle) = (next_number(), Held::default());
        let mut rig = Rig { lazuli, cri, containerd, registry, layout, number, processes, idle };
        rig.ctr(&["image", "import", "--snapshotter", "lazuli", archive.to_str().unwrap()]);
        wait("the image of sandboxes", || rig.cri.images().is_ok_and(|images| images.len() == 1));
        rig.idle = leaks::held(&rig);
        Some(rig)
    }

    fn processes(&self) -> MutexGuard<'_, Processes> {
        self.processes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A name for a container that no other test's has.
    pub(super) fn own(&self, name: &str) -> String {
        format!("{name}-{}-{}", std::process::id(), self.number)
    }

    /// `ctr`, and whether it succeeded, with both of its outputs.
    pub(super) fn try_ctr(&self, arguments: &[&str]) -> (bool, String) {
        let (success, output) = self.ctr_output(arguments);
        (success, String::from_utf8_lossy(&output).into_owned())
    }

    fn ctr_output(&self, arguments: &[&str]) -> (bool, Vec<u8>) {
        let mut command = self.containerd.command("ctr");
        command.arg("--address").arg(self.lazuli.path("c.sock")).args(["-n", SPACE]);
        // Output goes to a file: of a program that exits at once, `ctr` may print nothing.
        let printed = self.lazuli.path(&format!("printed-{}", next_number()));
        let starts = [&["run"][..], &["task", "exec"]];
        if let Some(verb) = starts.into_iter().find(|verb| arguments.starts_with(verb)) {
            command.args(verb).arg("--log-uri").arg(format!("file://{}", printed.display()));
            command.args(&arguments[verb.len()..]);
        } else {
            command.args(arguments);
        }
        let output = command.output().unwrap();
        let success = output.status.success();
        let mut text = fs::read(printed).unwrap_or_default();
        text.extend(output.stdout);
        // The rest of its output is about deprecations.
        if !success {
            text.extend(output.stderr);
        }
        (success, text)
    }

    /// Output of `ctr`, which must succeed.
    #[track_caller]
    pub(super) fn ctr(&self, arguments: &[&str]) -> String {
        String::from_utf8_lossy(&self.ctr_bytes(arguments)).into_owned()
    }

    /// Output of `ctr`, which must succeed and may print anything.
    #[track_caller]
    pub(super) fn ctr_bytes(&self, arguments: &[&str]) -> Vec<u8> {
        let (success, output) = self.ctr_output(arguments);
        let log = || fs::read_to_string(self.lazuli.path("containerd.log")).unwrap_or_default();
        let text = || String::from_utf8_lossy(&output).into_owned();
        assert!(success, "{arguments:?}: {}\n{}\n{}", text(), self.lazuli.log(), log());
        output
    }

    /// Runs `ctr` until it succeeds: killed processes take a moment to end.
    pub(super) fn settled(&self, arguments: &[&str]) {
        wait(&format!("{arguments:?}"), || self.try_ctr(arguments).0);
    }

    /// Pushes the ordinary image.
    pub(super) fn push_ordinary(&self) -> String {
        self.copy(&self.layout, "app:ordinary")
    }

    /// The image in the registry, converted.
    pub(super) fn push_lazy(&self) -> String {
        self.convert(&self.layout, "app:lazy")
    }

    /// Puts an image into the registry.
    pub(super) fn copy(&self, layout: &Path, name: &str) -> String {
        let image = self.registry.image(name);
        let copied = Command::new("skopeo")
            .args(["copy", "--quiet", "--dest-tls-verify=false"])
            .arg(format!("oci:{}", layout.display()))
            .arg(format!("docker://{image}"))
            .output()
            .unwrap();
        assert!(copied.status.success(), "{}", String::from_utf8_lossy(&copied.stderr));
        image
    }

    /// Converts an image, into the registry.
    pub(super) fn convert(&self, layout: &Path, name: &str) -> String {
        let image = self.registry.image(name);
        self.lazuli.ok(["convert", &format!("oci:{}", layout.display()), &image]);
        image
    }

    /// Takes a blob out of the registry.
    pub(super) fn lose_blob(&self, blob: &str) {
        self.registry.remove_blob(blob);
    }

    /// Configures containerd to speak HTTP with a registry. It would try TLS first, which not every
    /// registry answers.
    pub(super) fn plain_http(&self, host: &str) {
        let directory = self.lazuli.directory(&format!("{HOSTS}/{host}"));
        fs::write(directory.join("hosts.toml"), format!("server = \"http://{host}\"\n")).unwrap();
    }

    /// Pulls an image as Kubernetes does, for Lazuli. The result is the name of the snapshot with
    /// all of its layers.
    pub(super) fn pull(&self, image: &str) -> Result<String, CriError> {
        self.cri.pull(image, None)?;
        Ok(self.chain_id(image))
    }

    /// The name of the snapshot that has all layers of an image that was pulled.
    pub(super) fn chain_id(&self, image: &str) -> String {
        let manifest = self.content(&self.manifest_digest(image));
        let config = self.content(manifest["config"]["digest"].as_str().unwrap());
        let diff_ids = config["rootfs"]["diff_ids"].as_array().unwrap().iter();
        diff_ids.fold(String::new(), |parent, diff_id| chain(&parent, diff_id.as_str().unwrap()))
    }

    /// A JSON document that containerd has.
    pub(super) fn content(&self, digest: &str) -> Value {
        serde_json::from_str(&self.ctr(&["content", "get", digest])).unwrap()
    }

    /// The manifest to which containerd resolves an image's name.
    pub(super) fn manifest_digest(&self, image: &str) -> String {
        let list = self.ctr(&["image", "ls"]);
        let line = list.lines().find(|line| line.split(' ').next() == Some(image));
        line.unwrap_or_else(|| panic!("{list}")).split_whitespace().nth(2).unwrap().to_owned()
    }

    /// The tree of a committed snapshot. (`ctr image mount` of 1.6 ignores `--snapshotter`.)
    pub(super) fn tree(&self, snapshotter: &str, chain_id: &str) -> Listing {
        // Not a view, which the garbage collector takes at any time.
        self.ctr(&["snapshot", "--snapshotter", snapshotter, "prepare", "tree", chain_id]);
        let listing = self.active_tree(snapshotter, "tree");
        self.ctr(&["snapshot", "--snapshotter", snapshotter, "rm", "tree"]);
        listing
    }

    /// The tree of an active snapshot.
    pub(super) fn active_tree(&self, snapshotter: &str, key: &str) -> Listing {
        let target = self.lazuli.directory(snapshotter);
        let path = target.to_str().unwrap();
        let mount = self.ctr(&["snapshot", "--snapshotter", snapshotter, "mounts", path, key]);
        assert!(Command::new("sh").args(["-c", &mount]).status().unwrap().success(), "{mount}");
        let listing = listing::list(&target);
        unmount_free(&target);
        listing.unwrap()
    }

    /// Ends a container that `ctr` has started, and forgets it.
    pub(super) fn end(&self, container: &str) {
        self.ctr(&["task", "kill", "--signal", "KILL", container]);
        self.settled(&["task", "rm", container]);
        self.ctr(&["container", "rm", container]);
    }

    /// Lazuli's mounts.
    pub(super) fn mounts(&self) -> Vec<Value> {
        self.lazuli.status()["mounts"].as_array().unwrap().clone()
    }

    /// The processes of Lazuli, as soon as there are such that `wanted` likes.
    pub(super) fn wait_for(&self, wanted: impl Fn(Pids) -> bool) -> Pids {
        let mut found = None;
        wait("Lazuli", || {
            let output = self.lazuli.output(["status", "--json"]);
            let status = serde_json::from_slice::<Value>(&output.stdout);
            found = status.ok().map(|status| pids(&status)).filter(|pids| wanted(*pids));
            found.is_some()
        });
        found.unwrap()
    }

    /// `kill -9` of the worker; the keeper starts another one.
    pub(super) fn kill_worker(&self) {
        let before = self.wait_for(|pids| pids.worker != 0);
        processes::kill(before.worker);
        self.wait_for(|pids| pids.worker != 0 && pids.worker != before.worker);
    }

    /// `kill -9` of the keeper; the worker starts another one.
    pub(super) fn kill_keeper(&self) {
        let before = self.wait_for(|pids| pids.keeper != 0);
        processes::kill(before.keeper);
        self.reap();
        self.wait_for(|pids| pids.keeper != 0 && pids.keeper != before.keeper);
    }

    /// `kill -9` of keeper and worker. No others are started.
    pub(super) fn kill_lazuli(&self) {
        let before = self.wait_for(|pids| pids.worker != 0 && pids.keeper != 0);
        kill_both([before.keeper, before.worker].map(processes::pid));
        self.reap();
        let gone = |pid: u32| !PathBuf::from(format!("/proc/{pid}/fd/0")).exists();
        wait("the end of Lazuli", || gone(before.keeper) && gone(before.worker));
    }

    /// Lets go of the process that was started as the daemon, if it has ended.
    fn reap(&self) {
        let _ = self.processes().daemon.try_wait();
    }

    /// `lazuli daemon`, after both were killed.
    pub(super) fn start_daemon(&self) {
        self.processes().daemon = spawn_daemon(&self.lazuli);
        let socket = self.lazuli.root().join("daemon.sock");
        // `status` starts a daemon when none listens.
        wait("the daemon", || {
            let mut processes = self.processes();
            // The dead may take a moment to let go of the lock.
            if processes.daemon.try_wait().unwrap().is_some() {
                processes.daemon = spawn_daemon(&self.lazuli);
            }
            UnixStream::connect(&socket).is_ok()
        });
        self.wait_for(|pids| pids.worker != 0 && pids.keeper != 0);
    }

    /// Waits until containerd, which was refused while Lazuli was dead, tries again.
    pub(super) fn reconnect(&self) {
        self.settled(&["snapshot", "--snapshotter", "lazuli", "ls"]);
    }

    /// Ends containerd; containers go on.
    pub(super) fn end_containerd(&self, signal: Signal) {
        let mut processes = self.processes();
        let pid = Pid::from_child(&processes.containerd);
        kill_process(pid, signal).unwrap();
        processes.containerd.wait().unwrap();
    }

    /// Starts it again.
    pub(super) fn start_containerd(&self) {
        self.processes().containerd = spawn_containerd(self.containerd, &self.lazuli);
        wait("containerd", || self.cri.list().is_ok());
    }

    /// Removes images, in the way of Kubernetes.
    pub(super) fn remove_images(&self, images: &[&str]) {
        for image in images {
            self.cri.remove_image(image).unwrap();
        }
    }

    /// After everything was removed: no snapshot, no directory, no mount, and nothing that was not
    /// held at the begin.
    pub(super) fn nothing_left(&self) {
        leaks::assert_none(self, &self.idle);
    }
}

fn spawn_daemon(lazuli: &Lazuli) -> Child {
    let log = File::options().create(true).append(true).open(lazuli.root().join("daemon.log"));
    lazuli.command(["daemon"]).stderr(log.unwrap()).spawn().unwrap()
}

fn spawn_containerd(containerd: Containerd, lazuli: &Lazuli) -> Child {
    let log = File::options().create(true).append(true).open(lazuli.path("containerd.log"));
    let mut command = containerd.command("containerd");
    command.arg("--config").arg(lazuli.path("containerd.toml"));
    command.stdout(Stdio::null()).stderr(log.unwrap()).spawn().unwrap()
}

/// A client, as soon as the service of `containerd` answers.
fn connect(lazuli: &Lazuli, containerd: &mut Child) -> Client {
    let mut client = None;
    wait("containerd", || {
        let ended = containerd.try_wait().unwrap();
        let log = || fs::read_to_string(lazuli.path("containerd.log")).unwrap_or_default();
        assert!(ended.is_none(), "containerd ended, {}:\n{}", ended.unwrap(), log());
        client = Client::connect(&lazuli.path("c.sock")).ok();
        client.as_ref().is_some_and(|client| client.list().is_ok())
    });
    client.unwrap()
}

impl Drop for Rig {
    fn drop(&mut self) {
        leaks::end_containers(self);
        let mut processes = self.processes();
        let _ = kill_process(Pid::from_child(&processes.containerd), Signal::TERM);
        let _ = processes.containerd.wait();
        let _ = self.lazuli.output(["stop", "--force"]);
        let _ = processes.daemon.wait();
    }
}

/// Compares two trees. The root's time is that of its mount directory.
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

/// Unmounts unused images. A program that another test is just starting inherits open files until
/// it runs.
#[track_caller]
pub(super) fn unmount_free(mountpoint: &Path) {
    wait("an unmount", || match unmount(mountpoint, UnmountFlags::empty()) {
        Err(Errno::BUSY) => false,
        result => result.map(|()| true).unwrap(),
    });
}

/// Asks again and again until it is done.
#[track_caller]
pub(super) fn wait(what: &str, mut done: impl FnMut() -> bool) {
    let started = Instant::now();
    while !done() {
        assert!(started.elapsed() < TIMEOUT, "waited for {what}");
        thread::sleep(Duration::from_millis(20));
    }
}
