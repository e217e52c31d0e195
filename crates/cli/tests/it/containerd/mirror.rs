//! Pulls through the mirror, as Kubernetes makes them.

use std::{
    net::{TcpListener, TcpStream},
    time::Duration,
};

use lazuli_testkit::{
    cri::{self, Login},
    registry::{self, FakeRegistry, Fault},
};

use super::{
    programs::{Containerd, on_both},
    rig::{Rig, wait},
};

on_both!(
    a_pull_secret_is_used_for_what_it_may_see,
    a_tag_means_the_lazy_image_where_the_operator_says_so,
    an_ordinary_pull_asks_the_registry_for_each_object_once,
    a_lazy_pull_fetches_everything_once,
    a_pull_goes_on_when_the_worker_dies,
    pods_restart_while_the_registry_is_away,
    pulls_go_to_the_registry_when_the_mirror_cannot_answer,
);

/// Pushes the rig's image to a registry of this process, converted or unchanged.
fn put(rig: &Rig, registry: &FakeRegistry, tag: &str, more: &[&str]) -> String {
    let ordinary = rig.push_ordinary();
    let image = format!("{}/app:{tag}", registry.host());
    match more {
        ["copy"] => drop(rig.lazuli.ok(["copy", &ordinary, &image])),
        more => drop(rig.lazuli.ok([&["convert", &ordinary, &image][..], more].concat())),
    }
    registry.reset_stats();
    image
}

/// The digest of an image's first layer.
fn layer(registry: &FakeRegistry, name: &str) -> String {
    let raw = registry.manifest("app", name).unwrap();
    let manifest: serde_json::Value = serde_json::from_slice(&raw).unwrap();
    match manifest["layers"][0]["digest"].as_str() {
        Some(layer) => layer.to_owned(),
        None => layer(registry, manifest["manifests"][0]["digest"].as_str().unwrap()),
    }
}

fn login(user: &str) -> Option<Login> {
    Some(Login { user: user.to_owned(), password: "secret".to_owned() })
}

/// Everything but the configuration was fetched once, and more than `least` objects.
pub(super) fn assert_each_fetched_once(registry: &FakeRegistry, config: &str, least: usize) {
    let log = registry.log();
    let fetched = log.iter().filter(|it| it.method == "GET" && !it.target.contains(config));
    let mut fetched: Vec<_> = fetched.map(|it| (&it.target, &it.range)).collect();
    assert!(fetched.len() > least, "{log:#?}");
    fetched.sort();
    let all = fetched.len();
    fetched.dedup();
    assert_eq!(fetched.len(), all, "{log:#?}");
}

/// A file that no start reads, out of a container that runs.
fn read(rig: &Rig, container: &str) -> cri::Output {
    rig.cri.exec(container, &["sh", "-c", "cat /bin/busybox | wc -c"]).unwrap()
}

/// Two tenants, and a client without a login: each gets only what the registry shows to its login,
/// later as well, and after the worker died.
fn a_pull_secret_is_used_for_what_it_may_see(containerd: Containerd) {
    for required in [
        registry::Login::Basic("ann".to_owned(), "secret".to_owned()),
        registry::Login::Bearer("ann".to_owned(), "secret".to_owned()),
    ] {
        let Some(rig) = Rig::mirrored(containerd, "busybox", "") else { return };
        let registry = FakeRegistry::start().unwrap();
        let image = put(&rig, &registry, "lazy", &[]);
        registry.require(required);
        let refused = |login: Option<Login>| rig.cri.pull(&image, login.as_ref()).unwrap_err();
        refused(None);
        refused(login("bob"));
        rig.cri.pull(&image, login("ann").as_ref()).unwrap();
        refused(None);
        refused(login("bob"));
        let [mounted] = &rig.mounts()[..] else { panic!("{:#?}", rig.mounts()) };
        assert!(mounted["image"].as_str().unwrap().starts_with(&image), "{mounted:#}");
        // Later reads use the same login, even those of the next worker.
        rig.kill_worker();
        registry.expire_tokens();
        let pod = rig.cri.start(&rig.own("ann"), &image, &["sleep", "1000"]).unwrap();
        assert_eq!(read(&rig, &pod.container).status, 0);
        rig.cri.remove(&pod.sandbox).unwrap();
        rig.remove_images(&[&image]);
        refused(None);
        refused(login("bob"));
        assert_eq!(registry.violations(), Vec::<String>::new());
        rig.nothing_left();
    }
}

fn a_tag_means_the_lazy_image_where_the_operator_says_so(containerd: Containerd) {
    for (lazy, mounts) in [("lazy = [\"*\"]", 1), ("", 0)] {
        let Some(rig) = Rig::mirrored(containerd, "busybox", lazy) else { return };
        let registry = FakeRegistry::start().unwrap();
        let image = put(&rig, &registry, "both", &["--keep-oci"]);
        rig.cri.pull(&image, None).unwrap();
        assert_eq!(rig.mounts().len(), mounts, "{lazy}: {:#?}", rig.mounts());
        let ran = rig.cri.run(&rig.own("c"), &image, &["ls", "/bin/sh"]).unwrap();
        assert_eq!(ran.status, 0, "{ran:?}");
        rig.remove_images(&[&image]);
        rig.nothing_left();
    }
}

/// The registry's requests for one pull with and without the mirror, in sequence.
fn an_ordinary_pull_asks_the_registry_for_each_object_once(containerd: Containerd) {
    let Some(rig) = Rig::mirrored(containerd, "busybox", "") else { return };
    let registry = FakeRegistry::start().unwrap();
    let image = put(&rig, &registry, "ordinary", &["copy"]);
    let manifests = || {
        rig.cri.pull(&image, None).unwrap();
        let log = registry.log();
        let asked = log.iter().filter(|request| request.target.contains("/manifests/"));
        let asked: Vec<_> = asked.map(|r| format!("{} {}", r.method, r.target)).collect();
        rig.remove_images(&[&image]);
        registry.reset_stats();
        asked
    };
    let with = manifests();
    rig.lazuli.ok(["setup", "mirror", "--undo"]);
    rig.plain_http(&registry.host());
    let without = manifests();
    eprintln!("with the mirror: {with:?}\nwithout: {without:?}");
    assert_eq!(with.len(), 1, "{with:?}");
    assert_eq!(without.len(), 2, "{without:?}");
    rig.nothing_left();
}

/// The mirror and the snapshotter both want the image's metadata. Only the configuration, which
/// containerd is waiting for, is fetched twice.
fn a_lazy_pull_fetches_everything_once(containerd: Containerd) {
    let Some(rig) = Rig::mirrored(containerd, "busybox", "") else { return };
    let registry = FakeRegistry::start().unwrap();
    let image = put(&rig, &registry, "lazy", &[]);
    // So that the snapshotter is asked while the mirror's requests are in flight.
    registry.fault("GET", "/blobs/", 1000, Fault::Latency(Duration::from_millis(100)));
    rig.cri.pull(&image, None).unwrap();
    registry.clear_faults();
    let manifest = registry.manifest("app", "lazy").unwrap();
    let manifest: serde_json::Value = serde_json::from_slice(&manifest).unwrap();
    let config = manifest["config"]["digest"].as_str().unwrap();
    assert_each_fetched_once(&registry, config, 2);
    rig.remove_images(&[&image]);
    rig.nothing_left();
}

/// A layer in transit: the client asks the next worker for the rest.
fn a_pull_goes_on_when_the_worker_dies(containerd: Containerd) {
    let Some(rig) = Rig::mirrored(containerd, "busybox", "") else { return };
    let registry = FakeRegistry::start().unwrap();
    let image = put(&rig, &registry, "ordinary", &["copy"]);
    let layer = layer(&registry, "ordinary");
    // The first part arrives at once, and the rest after the client has gone.
    registry.fault("GET", &layer, 1, Fault::Latency(Duration::ZERO));
    registry.fault("GET", &layer, 1, Fault::Latency(Duration::from_secs(20)));
    std::thread::scope(|scope| {
        let pull = scope.spawn(|| rig.cri.pull(&image, None));
        wait("the layer", || rig.lazuli.status()["mirror"]["bytes"].as_u64() > Some(0));
        rig.kill_worker();
        pull.join().unwrap().unwrap();
    });
    rig.remove_images(&[&image]);
    rig.nothing_left();
}

/// `imagePullPolicy: Always`: the kubelet has the image pulled before each start.
fn pods_restart_while_the_registry_is_away(containerd: Containerd) {
    let Some(rig) = Rig::mirrored(containerd, "busybox", "") else { return };
    let registry = FakeRegistry::start().unwrap();
    let image = put(&rig, &registry, "ordinary", &["copy"]);
    registry.require(registry::Login::Basic("ann".to_owned(), "secret".to_owned()));
    let pull = |login: Option<Login>| rig.cri.pull(&image, login.as_ref());
    pull(login("ann")).unwrap();
    registry.go_away();
    // Answers in memory are lost too.
    rig.kill_worker();
    pull(login("ann")).unwrap();
    pull(login("bob")).unwrap_err();
    pull(None).unwrap_err();
    let ran = rig.cri.run(&rig.own("c"), &image, &["ls", "/bin/sh"]).unwrap();
    assert_eq!(ran.status, 0, "{ran:?}");
    registry.come_back();
    rig.remove_images(&[&image]);
    rig.nothing_left();
}

/// Another process has the mirror's port.
fn pulls_go_to_the_registry_when_the_mirror_cannot_answer(containerd: Containerd) {
    let Some(rig) = Rig::mirrored(containerd, "busybox", "") else { return };
    let image = rig.push_ordinary();
    let mirror: String = rig.lazuli.status()["mirror"]["listen"].as_str().unwrap().to_owned();
    rig.kill_lazuli();
    wait("the port", || TcpStream::connect(&mirror).is_err());
    // Reads whatever is sent, and never answers.
    let impostor = TcpListener::bind(&mirror).unwrap();
    let told = std::thread::spawn(move || {
        let (mut stream, _) = impostor.accept().unwrap();
        let mut told = [0; 1 << 10];
        std::io::Read::read(&mut stream, &mut told).map(|length| told[..length].to_vec())
    });
    // With overlayfs: the snapshot service is away, too.
    let pull = ["image", "pull", "--snapshotter", "overlayfs", "--plain-http", "--hosts-dir"];
    let hosts = rig.lazuli.path(super::programs::HOSTS);
    rig.ctr(&[&pull[..], &[hosts.to_str().unwrap(), &image]].concat());
    let told = told.join().unwrap().unwrap();
    // The beginning of a handshake, in which there is no name and no secret.
    assert!(!told.is_empty() && told[0] == 0x16, "{told:?}");
    assert!(!told.windows(3).any(|part| part == b"app"), "{told:?}");
    rig.start_daemon();
    rig.settled(&["image", "rm", &image]);
    rig.reconnect();
}
