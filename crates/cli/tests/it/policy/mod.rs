//! The images that a node may run: attacks by a tenant, and the operator's policy.

mod keyless;
pub(crate) mod signer;
mod statements;
mod verify_image;

use std::{
    fs,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use lazuli_image::Digest;
use lazuli_testkit::{
    kernel::{Feature, require},
    registry::{FakeRegistry, Fault},
};
use signer::{MANIFEST, Signer, digest_of, signature_tag};

use crate::{
    lazuli::Lazuli,
    prefetch::{fill, wait},
};

/// Files of the image, and bytes of each.
const FILES: usize = 20;
const SIZE: usize = 100_000;

/// A node with a policy that requires signatures, and a registry with an image.
pub(crate) struct Scene {
    pub(crate) lazuli: Lazuli,
    pub(crate) registry: FakeRegistry,
    pub(crate) signer: Signer,
    pub(crate) digest: Digest,
}

impl Scene {
    fn new() -> Option<Self> {
        let needed = [Feature::Root, Feature::Fuse, Feature::Program("openssl")];
        if !needed.into_iter().all(require) {
            return None;
        }
        let (lazuli, registry) = (Lazuli::new(), FakeRegistry::start().unwrap());
        fill(&lazuli.directory("source"), FILES, SIZE);
        lazuli.ok(["convert", "dir:source", &format!("{}/app:1", registry.host())]);
        lazuli.configure(&format!("policy = {:?}\n", lazuli.path("policy.toml")));
        let signer = Signer::new(&lazuli.directory(""), "good");
        let digest = digest_of(&registry, "app", "1");
        let scene = Scene { lazuli, registry, signer, digest };
        scene.require(&[&scene.signer]);
        Some(scene)
    }

    /// Makes the policy require a signature by one of `signers`.
    fn require(&self, signers: &[&Signer]) {
        let keys: Vec<PathBuf> = signers.iter().map(|signer| signer.public()).collect();
        self.policy(&format!("default = {{ keys = {keys:?} }}\n"));
    }

    pub(crate) fn policy(&self, text: &str) {
        fs::write(self.lazuli.path("policy.toml"), text).unwrap();
    }

    pub(crate) fn repository(&self) -> String {
        format!("{}/app", self.registry.host())
    }

    pub(crate) fn image(&self) -> String {
        format!("{}:1", self.repository())
    }

    pub(crate) fn mountpoint(&self, name: &str) -> String {
        self.lazuli.directory(name).to_str().unwrap().to_owned()
    }

    fn mount(&self, name: &str) -> String {
        let mountpoint = self.mountpoint(name);
        self.lazuli.ok(["mount", &self.image(), &mountpoint]);
        mountpoint
    }

    /// Why the image cannot be mounted.
    #[track_caller]
    pub(crate) fn refused(&self, image: &str) -> String {
        let error = self.lazuli.fails(["mount", image, &self.mountpoint("refused")]);
        assert!(error.contains("may not run"), "{error}");
        error
    }

    /// The node's files of images.
    fn kept(&self) -> Vec<PathBuf> {
        let directories = ["images", "cache/blobs"].map(|name| self.lazuli.root().join(name));
        let entries = directories.iter().flat_map(|it| fs::read_dir(it).into_iter().flatten());
        entries.map(|entry| entry.unwrap().path()).collect()
    }
}

fn read(mountpoint: &str, number: usize) -> Vec<u8> {
    fs::read(Path::new(mountpoint).join(format!("file-{number:02}"))).unwrap()
}

#[test]
fn only_a_signature_by_the_policy_s_key_of_this_image_and_name_lets_it_run() {
    let Some(scene) = Scene::new() else { return };
    let Scene { lazuli, registry, signer, digest } = &scene;
    let (image, repository) = (scene.image(), scene.repository());
    let evil = Signer::new(&lazuli.directory(""), "evil");
    let no_signature = scene.refused(&image);
    assert!(no_signature.contains("there is no signature"), "{no_signature}");
    assert!(no_signature.contains("policy.toml") && no_signature.contains("default"));

    // Another key's signature, this key's of another image, and one under another payload.
    evil.tag(registry, "app", digest, &repository);
    evil.refer(registry, "app", digest);
    assert!(scene.refused(&image).contains("by none of its keys"));
    let other = Digest::sha256([7; 32]);
    let payload = |digest: &Digest| {
        format!(
            r#"{{"critical":{{"identity":{{"docker-reference":"{repository}"}},"image":{{"docker-manifest-digest":"{digest}"}},"type":"cosign container image signature"}},"optional":null}}"#
        )
    };
    signer.tag_payload(registry, "app", digest, payload(&other).as_bytes());
    assert!(scene.refused(&image).contains(&format!("a signature is of {other}")));
    let tag = signature_tag(digest);
    let of_other = registry.manifest("app", &tag).unwrap();
    let own = registry.put_blob("app", payload(digest).as_bytes());
    let forged = String::from_utf8(of_other).unwrap();
    let stated = lazuli_image::Algorithm::Sha256.digest(payload(&other).as_bytes());
    let forged = forged.replace(&stated.to_string(), &own.to_string());
    registry.put_manifest("app", &tag, MANIFEST, forged.as_bytes());
    assert!(scene.refused(&image).contains("by none of its keys"));
    // Garbage of every kind.
    for garbage in [&b"{"[..], b"{}", b"\0\xff"] {
        signer.tag_payload(registry, "app", digest, garbage);
        scene.refused(&image);
    }
    assert_eq!(scene.kept(), [] as [PathBuf; 0], "something of it was kept");

    // Signed, under one name; the same manifest and signature under another are not.
    signer.tag(registry, "app", digest, &repository);
    let mountpoint = scene.mount("mnt");
    assert_eq!(read(&mountpoint, 1).len(), SIZE);
    lazuli.ok(["copy", &image, &format!("{}/other:1", registry.host())]);
    let replayed = scene.refused(&format!("{}/other:1", registry.host()));
    assert!(replayed.contains(&format!("as \"{repository}\"")), "{replayed}");
    lazuli.ok(["umount", &mountpoint]);
    let error = lazuli.fails(["prefetch", "--wait", &format!("{}/other:1", registry.host())]);
    assert!(error.contains("may not run"), "{error}");
    lazuli.ok(["prefetch", "--wait", &image]);
}

#[test]
fn bundles_beside_the_image_count_also_where_no_referrers_are_listed() {
    let Some(scene) = Scene::new() else { return };
    scene.refused(&scene.image());
    scene.signer.refer(&scene.registry, "app", &scene.digest);
    let mountpoint = scene.mount("mnt");
    scene.lazuli.ok(["umount", &mountpoint]);

    let Some(scene) = Scene::new() else { return };
    scene.registry.without_referrers();
    scene.refused(&scene.image());
    // The list that clients keep under a tag.
    let bundle = {
        scene.signer.refer(&scene.registry, "app", &scene.digest);
        (0..100).find_map(|n| scene.registry.manifest("app", &format!("bundle-{n}"))).unwrap()
    };
    let digest = lazuli_image::Algorithm::Sha256.digest(&bundle);
    let index = serde_json::json!({
        "schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [{
            "mediaType": MANIFEST, "digest": digest, "size": bundle.len(),
            "artifactType": "application/vnd.dev.sigstore.bundle.v0.3+json",
        }],
    });
    let tag = format!("sha256-{}", scene.digest.hex());
    let media_type = "application/vnd.oci.image.index.v1+json";
    scene.registry.put_manifest("app", &tag, media_type, index.to_string().as_bytes());
    let mountpoint = scene.mount("mnt");
    scene.lazuli.ok(["umount", &mountpoint]);
}

#[test]
fn a_changed_policy_stops_new_starts_and_no_running_one() {
    let Some(scene) = Scene::new() else { return };
    let Scene { lazuli, registry, signer, digest } = &scene;
    signer.tag(registry, "app", digest, &scene.repository());
    let running = scene.mount("running");
    read(&running, 1);
    // The key is revoked; another one has not signed yet.
    let next = Signer::new(&lazuli.directory(""), "next");
    for (text, expected) in [
        (format!("default = {{ keys = [{:?}] }}", next.public()), "by none of its keys"),
        ("default = 'reject'".to_owned(), "nothing of it may run here"),
    ] {
        scene.policy(&text);
        assert!(scene.refused(&scene.image()).contains(expected));
    }
    scene.policy("default = 'reject");
    let error = lazuli.fails(["mount", &scene.image(), &scene.mountpoint("refused")]);
    assert!(error.contains("policy.toml is not valid"), "{error}");
    fs::remove_file(lazuli.path("policy.toml")).unwrap();
    let error = lazuli.fails(["mount", &scene.image(), &scene.mountpoint("refused")]);
    assert!(error.contains("policy.toml: No such file"), "{error}");
    // Running images stay readable meanwhile, even after a change of workers.
    read(&running, 2);
    lazuli.kill(lazuli.worker());
    read(&running, 3);
    lazuli.ok(["daemon", "--takeover"]);
    for number in 4..FILES {
        assert_eq!(read(&running, number).len(), SIZE);
    }
    // Signed again, it starts.
    scene.require(&[&next]);
    next.refer(registry, "app", digest);
    let again = scene.mount("again");
    for mountpoint in [running, again] {
        lazuli.ok(["umount", &mountpoint]);
    }
}

#[test]
fn signatures_that_cannot_be_had_stop_starts_and_no_reader() {
    let Some(scene) = Scene::new() else { return };
    let Scene { lazuli, registry, signer, digest } = &scene;
    signer.tag(registry, "app", digest, &scene.repository());
    let running = scene.mount("running");
    scene.policy(&format!("# another\ndefault = {{ keys = [{:?}] }}", signer.public()));
    for path in [".sig", "/referrers/"] {
        registry.fault("GET", path, 1000, Fault::Status(403));
    }
    let refused = scene.refused(&scene.image());
    assert!(refused.contains("refuses access") || refused.contains("403"), "{refused}");
    for number in 0..FILES {
        assert_eq!(read(&running, number).len(), SIZE);
    }
    registry.clear_faults();
    let again = scene.mount("again");
    // From now on no registry is asked for them, also by another worker.
    for path in [".sig", "/referrers/"] {
        registry.fault("GET", path, 1000, Fault::Status(403));
    }
    lazuli.kill(lazuli.worker());
    let third = scene.mount("third");
    for mountpoint in [running, again, third] {
        lazuli.ok(["umount", &mountpoint]);
    }
}

/// Requests for signatures, and others.
fn requests(registry: &FakeRegistry) -> (usize, usize) {
    let log = registry.log();
    let is_signature =
        |target: &str| target.contains("/manifests/sha256-") || target.contains("/referrers/");
    let signatures = log.iter().filter(|it| is_signature(&it.target)).count();
    (signatures, log.len() - signatures)
}

#[test]
fn signatures_are_asked_for_beside_the_bootstrap_and_once() {
    let Some(scene) = Scene::new() else { return };
    let Scene { lazuli, registry, signer, digest } = &scene;
    signer.tag(registry, "app", digest, &scene.repository());
    scene.policy("default = 'accept'");
    lazuli.ok(["umount", &scene.mount("mnt")]);
    lazuli.ok(["stop"]);
    fs::remove_dir_all(lazuli.root()).unwrap();
    registry.reset_stats();
    lazuli.ok(["umount", &scene.mount("mnt")]);
    let (signatures, unsigned) = requests(registry);
    assert_eq!(signatures, 0);
    lazuli.ok(["stop"]);
    fs::remove_dir_all(lazuli.root()).unwrap();

    // The answer about signatures is late; everything else is requested meanwhile.
    scene.require(&[signer]);
    registry.reset_stats();
    let late = Duration::from_secs(5);
    registry.fault("GET", ".sig", 1, Fault::Latency(late));
    thread::scope(|scope| {
        let mounted = scope.spawn(|| scene.mount("mnt"));
        wait("everything but what is late", || requests(registry).1 >= unsigned);
        let before_the_answer = !mounted.is_finished();
        let kept = scene.kept();
        let is_partial = |path: &PathBuf| path.to_str().unwrap().contains("/.partial-");
        assert!(kept.iter().all(is_partial), "{kept:?}");
        assert!(before_the_answer, "the image was mounted without its signature");
        lazuli.ok(["umount", &mounted.join().unwrap()]);
    });
    // One for the signature's tag, and one each for the list of referrers by API and by tag: that
    // by tag only as long as it is not known whether the registry has the API. The payload is known
    // without asking.
    let (signatures, others) = requests(registry);
    assert!((2..=3).contains(&signatures) && others == unsigned, "{signatures} and {others}");
    lazuli.ok(["umount", &scene.mount("mnt")]);
    assert_eq!(requests(registry).0, signatures, "a second start asked for signatures");
    lazuli.ok(["stop"]);
    lazuli.ok(["umount", &scene.mount("mnt")]);
    let after = requests(registry).0;
    assert_eq!(after, signatures, "a start after that of the daemon asked for signatures");
}

#[test]
fn without_a_policy_nothing_is_asked_for() {
    let Some(scene) = Scene::new() else { return };
    scene.lazuli.configure("");
    scene.registry.reset_stats();
    scene.lazuli.ok(["umount", &scene.mount("mnt")]);
    let log = scene.registry.log();
    assert!(log.iter().all(|it| !it.target.contains(".sig")), "{log:#?}");
    assert!(!scene.lazuli.root().join("verdicts").exists());
}
