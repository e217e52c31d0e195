//! The node's policy decides which images containerd gets.

use std::{
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt as _,
    thread,
    time::Duration,
};

use lazuli_testkit::{
    kernel::{Feature, require},
    registry::{FakeRegistry, Fault, Logged},
};

use super::{
    programs::{Containerd, VERIFIERS, on_both},
    rig::{Rig, wait},
};
use crate::{
    lazuli::{Lazuli, corpus},
    policy::signer::{Signer, digest_of},
};

on_both!(
    only_signed_images_are_pulled_and_started,
    a_changed_policy_stops_no_container_that_runs,
    the_bootstrap_is_fetched_while_signatures_are_looked_for,
);

/// A node that requires signatures, and a registry with an image.
struct Scene {
    rig: Rig,
    registry: FakeRegistry,
    signer: Signer,
    repository: String,
    image: String,
}

impl Scene {
    fn new(containerd: Containerd) -> Option<Self> {
        if !require(Feature::Program("openssl")) {
            return None;
        }
        let policy = |lazuli: &Lazuli| {
            let path = lazuli.path("policy.toml");
            fs::write(&path, "default = 'reject'").unwrap();
            format!("policy = {path:?}")
        };
        let rig = Rig::with(containerd, "busybox", policy)?;
        let registry = FakeRegistry::start().unwrap();
        rig.plain_http(&registry.host());
        let repository = format!("{}/app", registry.host());
        let image = format!("{repository}:1");
        let layout = format!("oci:{}", corpus("busybox")?.display());
        rig.lazuli.ok(["convert", &layout, &image]);
        let signer = Signer::new(&rig.lazuli.directory(""), "good");
        let scene = Scene { rig, registry, signer, repository, image };
        scene.require(&scene.signer);
        Some(scene)
    }

    fn require(&self, signer: &Signer) {
        let text = format!("default = {{ keys = [{:?}] }}", signer.public());
        fs::write(self.rig.lazuli.path("policy.toml"), text).unwrap();
    }

    fn sign(&self, signer: &Signer) {
        let digest = digest_of(&self.registry, "app", "1");
        signer.tag(&self.registry, "app", &digest, &self.repository);
    }

    fn run(&self, name: &str) -> Result<Vec<u8>, String> {
        let name = self.rig.own(name);
        let output = self.rig.cri.run(&name, &self.image, &["echo", "here"]);
        output.map(|output| output.stdout).map_err(|error| error.to_string())
    }

    /// Why the image cannot be pulled.
    fn refused(&self) -> String {
        let error = self.rig.pull(&self.image).unwrap_err().to_string();
        assert!(error.contains("may not run"), "{error}");
        error
    }
}

fn only_signed_images_are_pulled_and_started(containerd: Containerd) {
    let Some(scene) = Scene::new(containerd) else { return };
    assert!(scene.refused().contains("there is no signature"));
    let evil = Signer::new(&scene.rig.lazuli.directory(""), "evil");
    scene.sign(&evil);
    assert!(scene.refused().contains("by none of its keys"));
    let images = scene.rig.lazuli.root().join("images");
    // containerd has its answer before a fetch that was begun has been cleaned up.
    wait("nothing of it to be kept", || fs::read_dir(&images).unwrap().count() == 0);
    scene.sign(&scene.signer);
    scene.rig.pull(&scene.image).unwrap();
    assert_eq!(scene.run("c").unwrap(), b"here\n");
}

fn a_changed_policy_stops_no_container_that_runs(containerd: Containerd) {
    let Some(scene) = Scene::new(containerd) else { return };
    let Scene { rig, registry, signer, image, .. } = &scene;
    scene.sign(signer);
    rig.pull(image).unwrap();
    let pod = rig.cri.start(&rig.own("running"), image, &["sleep", "1000"]).unwrap();
    let exec = || rig.cri.exec(&pod.container, &["cat", "/etc/passwd"]).unwrap();
    let before = exec().stdout;
    let next = Signer::new(&rig.lazuli.directory(""), "next");
    scene.require(&next);
    let error = scene.run("second").unwrap_err();
    assert!(error.contains("may not run") && error.contains("by none of its keys"), "{error}");
    for path in [".sig", "/referrers/"] {
        registry.fault("GET", path, 1000, Fault::Status(403));
    }
    assert!(scene.run("third").unwrap_err().contains("may not run"));
    rig.kill_worker();
    assert_eq!(exec().stdout, before);
    registry.clear_faults();
    scene.sign(&next);
    wait("a start of what is signed again", || scene.run("fourth").is_ok());
    rig.cri.stop(&pod.sandbox).unwrap();
    rig.cri.remove(&pod.sandbox).unwrap();
}

fn the_bootstrap_is_fetched_while_signatures_are_looked_for(containerd: Containerd) {
    let Some(scene) = Scene::new(containerd) else { return };
    let Scene { rig, registry, signer, image, .. } = &scene;
    signer.refer(registry, "app", &digest_of(registry, "app", "1"));
    let manifest = registry.manifest("app", "1").unwrap();
    let manifest: serde_json::Value = serde_json::from_slice(&manifest).unwrap();
    let bootstrap = manifest["layers"].as_array().unwrap().last().unwrap()["digest"].clone();
    let bootstrap = bootstrap.as_str().unwrap();
    registry.fault("GET", "/referrers/", 1, Fault::Latency(Duration::from_secs(5)));
    let asked = || {
        let log = registry.log();
        let of_bootstrap = |it: &&Logged| it.method == "GET" && it.target.contains(bootstrap);
        log.iter().filter(of_bootstrap).map(|it| it.range.clone()).collect::<Vec<_>>()
    };
    thread::scope(|scope| {
        let pulled = scope.spawn(|| rig.pull(image));
        wait("a request for the bootstrap", || !asked().is_empty());
        assert!(!pulled.is_finished(), "the image was pulled before it was verified");
        pulled.join().unwrap().unwrap();
    });
    let mut ranges = asked();
    let all = ranges.len();
    ranges.sort();
    ranges.dedup();
    assert_eq!(ranges.len(), all, "the bootstrap was fetched twice");
    assert_eq!(scene.run("c").unwrap(), b"here\n");
}

/// Ordinary images are unpacked by containerd itself, which asks a program before.
#[test]
fn ordinary_images_are_pulled_by_the_same_policy() {
    let Some(scene) = Scene::new(Containerd::Current) else { return };
    let Scene { rig, registry, signer, .. } = &scene;
    let program = rig.lazuli.directory(VERIFIERS).join("lazuli");
    let command = rig.lazuli.command(["verify-image"]);
    let words = [command.get_program()].into_iter().chain(command.get_args());
    let words: Vec<_> = words.map(|word| format!("{word:?}")).collect();
    fs::write(&program, format!("#!/bin/sh\nexec {} \"$@\"\n", words.join(" "))).unwrap();
    fs::set_permissions(&program, Permissions::from_mode(0o755)).unwrap();
    let name = format!("{}/ordinary", registry.host());
    let image = format!("{name}:1");
    let layout = format!("oci:{}", corpus("busybox").unwrap().display());
    rig.lazuli.ok(["copy", &layout, &image]);
    let pull = ["image", "pull", "--plain-http", "--snapshotter", "lazuli", &image];
    let (pulled, said) = rig.try_ctr(&pull);
    assert!(!pulled && said.contains("may not run") && said.contains("no signature"), "{said}");
    signer.tag(registry, "ordinary", &digest_of(registry, "ordinary", "1"), &name);
    rig.ctr(&pull);
    rig.remove_images(&[&image]);
}
