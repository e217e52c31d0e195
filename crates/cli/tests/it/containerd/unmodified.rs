//! Ordinary images, by their own names, that containerd does not unpack.

use std::{
    fs,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{TcpListener, TcpStream},
    panic::{AssertUnwindSafe, catch_unwind},
    thread,
    time::Duration,
};

use lazuli_image::{Digest, oci::annotation::INDEX_OF};
use lazuli_testkit::{
    kernel::{Feature, require},
    oci::{Compression, Layer},
    odd,
    registry::{FakeRegistry, Fault, Logged},
    tarball::{self, Entry},
};
use serde_json::{Value, json};

use super::{
    chain_ids::{WHO, busybox, push, put_manifest, who},
    mirror::assert_each_fetched_once,
    programs::{Containerd, HOSTS, on_both},
    rig::{Rig, wait},
};
use crate::{
    lazuli::{Lazuli, corpus},
    policy::signer::{MANIFEST, Signer, digest_of},
    prefetch::{FAR, asked, guessed},
};

on_both!(
    an_indexed_image_starts_lazily_by_its_own_name,
    what_the_indexer_guessed_is_fetched_with_the_indexes,
    a_pull_through_the_mirror_fetches_everything_once,
    an_index_without_a_valid_statement_is_left_to_containerd,
    the_first_node_pulls_whole_and_the_second_starts_lazily,
    nodes_publish_what_the_indexer_makes,
    a_pulled_image_starts_without_its_registry,
    a_layer_that_cannot_be_pulled_is_left_to_containerd,
    a_registry_that_hangs_holds_up_no_pull_of_another,
    a_stated_layer_that_turns_out_wrong_is_not_served,
    a_stated_layer_that_turns_out_wrong_is_not_served_from_loop_devices,
);

/// Further settings: only what is read is fetched.
pub(super) const ON_DEMAND: &str = "\n[prefetch]\nahead = \"nothing\"\nrest_bytes_per_second = 0";

/// A node whose policy trusts a key's statements about layers, and a registry.
pub(super) struct Scene {
    pub(super) rig: Rig,
    pub(super) registry: FakeRegistry,
    pub(super) signer: Signer,
}

impl Scene {
    pub(super) fn new(containerd: Containerd, index: &str) -> Option<Self> {
        let registry = FakeRegistry::start().unwrap();
        Self::with(containerd, index, registry)
    }

    pub(super) fn with(
        containerd: Containerd,
        index: &str,
        registry: FakeRegistry,
    ) -> Option<Self> {
        Self::driven(containerd, index, registry, "auto")
    }

    /// A node with a mirror, of which containerd is told.
    fn mirrored(containerd: Containerd, index: &str, registry: FakeRegistry) -> Option<Self> {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let mirror = format!("[mirror]\nlisten = \"127.0.0.1:{port}\"\n");
        let hosts = |lazuli: &Lazuli| format!("hosts_dir = {:?}\n", lazuli.directory(HOSTS));
        let scene = Self::opened(containerd, index, registry, hosts, &mirror)?;
        scene.rig.set_up_mirror(&[]);
        Some(scene)
    }

    /// Another node with the same registry, which trusts this one's statements.
    pub(super) fn succeeded_by(self, containerd: Containerd, index: &str) -> Option<Self> {
        let public = fs::read(self.signer.public()).unwrap();
        let registry = self.registry.clone();
        drop(self);
        let node = Self::with(containerd, index, registry)?;
        let key = node.rig.lazuli.path("first.pub");
        fs::write(&key, public).unwrap();
        let rule = format!("default = {{ accept = true, statements = [{key:?}] }}");
        fs::write(node.rig.lazuli.path("policy.toml"), rule).unwrap();
        Some(node)
    }

    fn driven(
        containerd: Containerd,
        index: &str,
        registry: FakeRegistry,
        driver: &str,
    ) -> Option<Self> {
        let driver = format!("driver = \"{driver}\"\n");
        let scene = Self::opened(containerd, index, registry, |_| String::new(), &driver)?;
        scene.rig.plain_http(&scene.registry.host());
        Some(scene)
    }

    fn opened(
        containerd: Containerd,
        index: &str,
        registry: FakeRegistry,
        top: impl FnOnce(&Lazuli) -> String,
        tables: &str,
    ) -> Option<Self> {
        if !require(Feature::Program("openssl")) {
            return None;
        }
        let mut signer = None;
        let top = |lazuli: &Lazuli| {
            let made = Signer::new(&lazuli.directory(""), "good");
            let path = lazuli.path("policy.toml");
            let rule = format!("default = {{ accept = true, statements = [{:?}] }}", made.public());
            fs::write(&path, rule).unwrap();
            let content = lazuli.path("containerd/io.containerd.content.v1.content");
            let index = index.replace("KEY", made.private().to_str().unwrap());
            let index = index.replace("CONTENT", content.to_str().unwrap());
            signer = Some(made);
            format!("policy = {path:?}\n{}[index]\n{index}", top(lazuli))
        };
        let rig = Rig::open(containerd, "busybox", top, tables)?;
        Some(Scene { rig, registry, signer: signer.unwrap() })
    }

    fn index(&self, image: &str, signer: &Signer) {
        self.rig.lazuli.ok(["index", image, "--sign", signer.private().to_str().unwrap()]);
    }

    pub(super) fn run(&self, image: &str, command: &[&str]) -> String {
        let name = self.rig.own(&image.replace(['/', ':', '@'], "-"));
        let output = self.rig.cri.run(&name, image, command).unwrap();
        String::from_utf8(output.stdout).unwrap()
    }

    /// Bytes of a layer that were asked for.
    pub(super) fn fetched(&self, layer: &Layer) -> u64 {
        fetched(&self.registry, layer)
    }
}

pub(super) fn fetched(registry: &FakeRegistry, layer: &Layer) -> u64 {
    let stored = layer.stored().unwrap();
    let digest = lazuli_image::Algorithm::Sha256.digest(&stored).to_string();
    let of_layer = |it: &&Logged| it.method == "GET" && it.target.contains(&digest);
    let bytes =
        |it: &Logged| it.bytes().map_or(stored.len() as u64, |range| range.end - range.start);
    registry.log().iter().filter(of_layer).map(bytes).sum()
}

/// A layer of some MiB.
fn big() -> Layer {
    let bytes = |number: u64| odd::random(number, 1 << 20);
    let files: Vec<_> =
        (0..4).map(|number| Entry::file(format!("file{number}"), bytes(number))).collect();
    Layer::new(tarball::write(&files), Compression::Gzip)
}

pub(super) fn layers() -> [Layer; 3] {
    [Layer::new(busybox(), Compression::Gzip), big(), who("me")]
}

fn an_indexed_image_starts_lazily_by_its_own_name(containerd: Containerd) {
    let settings = format!("first = \"leave\"{ON_DEMAND}");
    let Some(scene) = Scene::new(containerd, &settings) else { return };
    let Scene { rig, registry, signer, .. } = &scene;
    let layers = layers();
    let image = push(registry, "app", &layers);
    scene.index(&image, signer);
    registry.reset_stats();
    let before = digest_of(registry, "app", "1");
    rig.pull(&image).unwrap();
    assert_eq!(layers.each_ref().map(|layer| scene.fetched(layer)), [0; 3]);
    assert_eq!(rig.manifest_digest(&image), before.to_string());
    assert_eq!(scene.run(&image, &WHO), "me\n");
    let (fetched, all) = (scene.fetched(&layers[1]), layers[1].stored().unwrap().len() as u64);
    assert!(fetched < all, "{fetched} of {all}");
    // Images based on all of its layers, and on some; containerd unpacks their own layers.
    let above = [&layers[..], &[who("above")]].concat();
    let beside = [&layers[..1], &[who("beside")]].concat();
    for (name, layers) in [("above", above), ("beside", beside)] {
        let image = push(registry, name, &layers);
        rig.pull(&image).unwrap();
        assert_eq!(scene.run(&image, &WHO), format!("{name}\n"));
    }
    let listed = scene.run(&format!("{}/beside:1", registry.host()), &["ls", "/file0"]);
    assert!(listed.contains("No such file"), "{listed}");
    rig.kill_worker();
    let script = "cat /file0 /file1 /file2 /file3 | sha256sum";
    let sum = scene.run(&image, &["sh", "-c", script]);
    let content: Vec<_> = (0..4).flat_map(|number| odd::random(number, 1 << 20)).collect();
    let expected = lazuli_image::Algorithm::Sha256.digest(&content);
    assert_eq!(sum, format!("{}  -\n", expected.hex()));
    let all = ["app", "above", "beside"].map(|name| format!("{}/{name}:1", registry.host()));
    rig.remove_images(&all.each_ref().map(String::as_str));
    rig.nothing_left();
}

fn what_the_indexer_guessed_is_fetched_with_the_indexes(containerd: Containerd) {
    let Some(redis) = corpus("redis") else { return };
    let settings = "first = \"leave\"\n[prefetch]\nrest_bytes_per_second = 0";
    let Some(scene) = Scene::new(containerd, settings) else { return };
    let Scene { rig, registry, signer, .. } = &scene;
    let image = format!("{}/app:1", registry.host());
    rig.lazuli.ok(["copy", &format!("oci:{}:latest", redis.display()), &image]);
    scene.index(&image, signer);
    let (_, index) = index(registry, "app");
    let is_index = |layer: &&Value| layer["annotations"][INDEX_OF].is_string();
    let indexes: Vec<_> = index["layers"].as_array().unwrap().iter().filter(is_index).collect();
    let guessed = guessed(&index);
    let expected: u64 = guessed.values().sum();
    assert!(expected > 1 << 20, "{expected} bytes are guessed");
    registry.reset_stats();
    registry.set_latency(FAR);
    for index in &indexes {
        let digest = index["digest"].as_str().unwrap();
        registry.fault("GET", digest, 1, Fault::Latency(Duration::from_secs(3)));
    }
    thread::scope(|scope| {
        let pull = scope.spawn(|| rig.pull(&image).unwrap());
        let asked = || guessed.keys().map(|layer| asked(registry, layer)).sum::<u64>();
        wait("what was guessed", || asked() == expected);
        assert!(!pull.is_finished(), "the indexes were not waited for");
    });
    rig.remove_images(&[&image]);
}

/// The mirror and the snapshotter both want the indexes. Only the configuration, which containerd
/// is waiting for, is fetched twice.
fn a_pull_through_the_mirror_fetches_everything_once(containerd: Containerd) {
    let settings = format!("first = \"leave\"{ON_DEMAND}");
    let registry = FakeRegistry::start().unwrap();
    let Some(scene) = Scene::mirrored(containerd, &settings, registry) else { return };
    let Scene { rig, registry, signer, .. } = &scene;
    let image = push(registry, "app", &layers());
    scene.index(&image, signer);
    let manifest = registry.manifest("app", "1").unwrap();
    let manifest: Value = serde_json::from_slice(&manifest).unwrap();
    let config = manifest["config"]["digest"].as_str().unwrap();
    registry.reset_stats();
    // So that the snapshotter is asked while the mirror's requests are in flight.
    registry.fault("GET", "/blobs/", 1000, Fault::Latency(Duration::from_millis(100)));
    rig.pull(&image).unwrap();
    assert_each_fetched_once(registry, config, 4);
    registry.clear_faults();
    assert_eq!(scene.run(&image, &WHO), "me\n");
    rig.remove_images(&[&image]);
    rig.nothing_left();
}

/// Each of these is an ordinary image for containerd, and shows its own files.
fn an_index_without_a_valid_statement_is_left_to_containerd(containerd: Containerd) {
    let Some(scene) = Scene::new(containerd, "first = \"leave\"") else { return };
    let Scene { rig, registry, signer, .. } = &scene;
    let evil = Signer::new(&rig.lazuli.directory(""), "evil");
    let of = |name: &str| [Layer::new(busybox(), Compression::Gzip), who(name)];
    let forged = |name: &str| push(registry, name, &of(name));
    // Without an index, with an unsigned one, and with another key.
    let mut images = vec![forged("none"), forged("unsigned"), forged("stranger")];
    rig.lazuli.ok(["index", &images[1]]);
    scene.index(&images[2], &evil);
    // Another image's statement, and one for another name.
    let other = forged("other");
    scene.index(&other, signer);
    let statement = |name: &str, tag: &str, change: &dyn Fn(&mut Value)| {
        let image = forged(tag);
        rig.lazuli.ok(["index", &image]);
        let index = index_of(registry, tag);
        let mut predicate = stated(registry, tag, &of(tag));
        change(&mut predicate);
        let kind = ("urn:lazuli:index:v1", predicate);
        signer.state(registry, tag, (Some(name), &index), kind);
        image
    };
    let own = |tag: &str| format!("{}/{tag}", registry.host());
    let foreign = own("other");
    images.push(statement(&foreign, "renamed", &|_| {}));
    // Of another image, of other layers, with another tar, by an index that is not listed.
    let elsewhere = digest_of(registry, "other", "1").to_string();
    images.push(statement(&own("source"), "source", &|it| {
        it["source"]["manifest"] = elsewhere.clone().into();
    }));
    images.push(statement(&own("layer"), "layer", &|it| {
        it["layers"][0]["layer"] = elsewhere.clone().into();
    }));
    images.push(statement(&own("tar"), "tar", &|it| {
        it["layers"][0]["diffId"] = elsewhere.clone().into();
    }));
    images.push(statement(&own("index"), "index", &|it| {
        it["layers"][1]["index"] = elsewhere.clone().into();
    }));
    images.push(statement(&own("less"), "less", &|it| {
        it["layers"].as_array_mut().unwrap().pop();
    }));
    for image in &images {
        rig.pull(image).unwrap();
        let tag = image.rsplit_once('/').unwrap().1.split(':').next().unwrap();
        assert_eq!(scene.run(image, &WHO), format!("{tag}\n"));
        assert!(rig.mounts().is_empty(), "{image}: {:#?}", rig.mounts());
    }
    // The same by a statement as it should be.
    let good = statement(&own("good"), "good", &|_| {});
    rig.pull(&good).unwrap();
    assert_eq!(scene.run(&good, &WHO), "good\n");
    assert_eq!(rig.mounts().len(), 1);
}

/// The digest of the index beside an image.
pub(super) fn index_of(registry: &FakeRegistry, repository: &str) -> Digest {
    let (digest, _) = index(registry, repository);
    digest
}

fn index(registry: &FakeRegistry, repository: &str) -> (Digest, Value) {
    let subject = digest_of(registry, repository, "1");
    let listed = referrers(registry, repository, &subject);
    let is_index = |it: &&Value| it["artifactType"] == "application/vnd.lazuli.index.v1";
    let digest = listed.iter().find(is_index).unwrap()["digest"].as_str().unwrap().to_owned();
    let raw = registry.manifest(repository, &digest).unwrap();
    (digest.parse().unwrap(), serde_json::from_slice(&raw).unwrap())
}

/// The referrers of a manifest.
pub(super) fn referrers(registry: &FakeRegistry, repository: &str, subject: &Digest) -> Vec<Value> {
    let mut stream = TcpStream::connect(registry.host()).unwrap();
    let target = format!("/v2/{repository}/referrers/{subject}");
    let host = registry.host();
    write!(stream, "GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n").unwrap();
    // The registry keeps the connection.
    let mut answer = BufReader::new(stream);
    let mut size = 0;
    loop {
        let mut line = String::new();
        answer.read_line(&mut line).unwrap();
        match line.trim_end().to_ascii_lowercase().split_once(": ") {
            Some(("content-length", value)) => size = value.parse().unwrap(),
            None if line == "\r\n" => break,
            _ => {}
        }
    }
    let mut body = vec![0; size];
    answer.read_exact(&mut body).unwrap();
    let list: Value = serde_json::from_slice(&body).unwrap();
    list["manifests"].as_array().unwrap().clone()
}

/// The content of a statement about the index of an image with these layers.
fn stated(registry: &FakeRegistry, repository: &str, layers: &[Layer]) -> Value {
    let manifest = digest_of(registry, repository, "1").to_string();
    let (_, index) = index(registry, repository);
    let indexes = index["layers"].as_array().unwrap();
    let layers = layers.iter().map(|layer| {
        let digest = lazuli_image::Algorithm::Sha256.digest(&layer.stored().unwrap()).to_string();
        let of = |it: &&Value| it["annotations"]["containerd.io/snapshot/nydus-ref"] == *digest;
        let index = indexes.iter().find(of).unwrap()["digest"].clone();
        json!({ "layer": digest, "diffId": layer.diff_id().to_string(), "index": index })
    });
    json!({
        "source": { "name": repository, "digest": manifest, "manifest": manifest },
        "converter": { "version": "0" },
        "layers": layers.collect::<Vec<_>>(),
    })
}

/// It has no index: the first node fetches every layer once, and starts from its cache.
fn the_first_node_pulls_whole_and_the_second_starts_lazily(containerd: Containerd) {
    let publish = "first = \"pull\"\npublish = true\nkey = \"KEY\"";
    let Some(first) = Scene::new(containerd, publish) else { return };
    let layers = layers();
    let image = push(&first.registry, "app", &layers);
    first.registry.reset_stats();
    first.rig.pull(&image).unwrap();
    let sizes = layers.each_ref().map(|layer| layer.stored().unwrap().len() as u64);
    assert_eq!(layers.each_ref().map(|layer| first.fetched(layer)), sizes);
    let images = first.rig.lazuli.root().join("images");
    let made = || fs::read_dir(&images).unwrap().map(|it| it.unwrap().file_name());
    let made = || made().filter(|name| name.len() == 64).collect::<Vec<_>>();
    wait("metadata before there is a container", || !made().is_empty());
    let ahead = made();
    assert_eq!(first.run(&image, &WHO), "me\n");
    assert_eq!(made(), ahead, "another image was mounted");
    assert_eq!(first.run(&image, &["sh", "-c", "cat /file* | wc -c"]), format!("{}\n", 4 << 20));
    assert_eq!(layers.each_ref().map(|layer| first.fetched(layer)), sizes, "fetched again");
    assert_eq!(first.rig.mounts().len(), 1);
    let subject = digest_of(&first.registry, "app", "1");
    let listed = |digest: &Digest| referrers(&first.registry, "app", digest);
    wait("an index", || !listed(&subject).is_empty());
    wait("a statement", || !listed(&index_of(&first.registry, "app")).is_empty());
    // After another pull it is lazy: its content is proven.
    first.rig.remove_images(&[&image]);
    first.rig.nothing_left();
    first.registry.reset_stats();
    first.rig.pull(&image).unwrap();
    assert_eq!(layers.each_ref().map(|layer| first.fetched(layer)), [0; 3]);
    assert_eq!(first.run(&image, &WHO), "me\n");
    let Some(second) = first.succeeded_by(containerd, "first = \"pull\"") else { return };
    second.registry.reset_stats();
    second.rig.pull(&image).unwrap();
    wait("data before there is a container", || second.fetched(&layers[0]) > 0);
    assert_eq!(second.run(&image, &WHO), "me\n");
    let fetched = second.fetched(&layers[1]);
    assert!(fetched < sizes[1], "{fetched} of {}", sizes[1]);
}

/// With what a start most likely reads, from the node's cache or from containerd's content store.
fn nodes_publish_what_the_indexer_makes(containerd: Containerd) {
    let Some(redis) = corpus("redis") else { return };
    for first in ["first = \"pull\"", "first = \"leave\"\ncontent_store = \"CONTENT\""] {
        let Some(scene) = Scene::new(containerd, &format!("{first}\npublish = true")) else {
            return;
        };
        let Scene { rig, registry, .. } = &scene;
        let images = ["app", "other"].map(|name| format!("{}/{name}:1", registry.host()));
        for image in &images {
            rig.lazuli.ok(["copy", &format!("oci:{}:latest", redis.display()), image]);
        }
        rig.lazuli.ok(["index", &images[1]]);
        let (_, expected) = index(registry, "other");
        let guessed: u64 = guessed(&expected).values().sum();
        assert!(guessed > 1 << 20, "{guessed} bytes are guessed");
        rig.pull(&images[0]).unwrap();
        let subject = digest_of(registry, "app", "1");
        wait("an index", || !referrers(registry, "app", &subject).is_empty());
        assert_eq!(index(registry, "app").1, expected, "{first}");
        rig.remove_images(&[&images[0]]);
    }
}

/// Even by a worker that did not report it present.
fn a_pulled_image_starts_without_its_registry(containerd: Containerd) {
    let Some(scene) = Scene::new(containerd, "first = \"pull\"") else { return };
    let image = push(&scene.registry, "app", &layers());
    scene.rig.pull(&image).unwrap();
    scene.registry.go_away();
    scene.rig.kill_worker();
    assert_eq!(scene.run(&image, &WHO), "me\n");
    assert_eq!(scene.run(&image, &["sh", "-c", "cat /file* | wc -c"]), format!("{}\n", 4 << 20));
    scene.registry.come_back();
}

/// zstd, a tar with another digest than the configuration's, and a sparse file: no index shows any
/// of them, but the layers below are shown.
fn a_layer_that_cannot_be_pulled_is_left_to_containerd(containerd: Containerd) {
    let Some(scene) = Scene::new(containerd, "first = \"pull\"") else { return };
    let Scene { rig, registry, .. } = &scene;
    let base = Layer::new(busybox(), Compression::Gzip);
    let zstd = Layer::new(who("zstd").tar, Compression::Zstd);
    let image = push(registry, "zstd", &[base.clone(), zstd]);
    rig.pull(&image).unwrap();
    assert_eq!(scene.run(&image, &WHO), "zstd\n");
    assert_eq!(rig.mounts().len(), 1, "the layer below is mounted");
    // An image whose configuration claims another's layer neither gets nor replaces it.
    let victim = [base.clone(), who("victim")];
    let evil = Layer::new(who("evil").tar, Compression::Gzip);
    let stored = evil.stored().unwrap();
    let blob = registry.put_blob("evil", &stored).to_string();
    let lower = base.stored().unwrap();
    let below = registry.put_blob("evil", &lower).to_string();
    let claimed: Vec<_> = victim.iter().map(|layer| layer.diff_id().to_string()).collect();
    let config = json!({
        "architecture": "amd64", "os": "linux", "config": {},
        "rootfs": { "type": "layers", "diff_ids": claimed },
    });
    let described = [(below, lower.len()), (blob, stored.len())].map(
        |(digest, size)| json!({ "mediaType": base.media_type(), "digest": digest, "size": size }),
    );
    let evil = put_manifest(registry, "evil", "1", &config, &described);
    let error = rig.pull(&evil).unwrap_err().to_string();
    assert!(error.contains("wrong diff id"), "{error}");
    let victim = push(registry, "victim", &victim);
    rig.pull(&victim).unwrap();
    assert_eq!(scene.run(&victim, &WHO), "victim\n");
}

/// A trusted key states that a layer's tar is another image's: the statement counts until all of
/// the layer is present. Two tenants' images share layers above one of their own: containerd
/// requests the same chain of layers one at a time.
fn a_registry_that_hangs_holds_up_no_pull_of_another(containerd: Containerd) {
    let Some(scene) = Scene::new(containerd, "first = \"pull\"") else { return };
    let Scene { rig, registry, .. } = &scene;
    let hanging = FakeRegistry::start().unwrap();
    rig.plain_http(&hanging.host());
    let [base, big, me] = layers();
    let first = push(&hanging, "app", &[me, base.clone(), big.clone()]);
    let layers = [who("you"), base, big];
    let second = push(registry, "app", &layers);
    for layer in &layers[1..] {
        let digest = lazuli_image::Algorithm::Sha256.digest(&layer.stored().unwrap()).to_string();
        hanging.fault("GET", &digest, usize::MAX, Fault::Drip(Duration::from_millis(100)));
    }
    let (ended, had_ended, pulled) = std::thread::scope(|scope| {
        let held = scope.spawn(|| rig.pull(&first));
        let both = || layers[1..].iter().all(|layer| fetched(&hanging, layer) > 0);
        let asked = catch_unwind(|| wait("requests for what both have", both));
        let pull = scope.spawn(|| rig.pull(&second));
        let ended = catch_unwind(AssertUnwindSafe(|| {
            asked.unwrap();
            wait("the second pull", || pull.is_finished());
        }));
        let had_ended = held.is_finished();
        hanging.go_away();
        // It fails, or has its layers from the other one by now.
        let _ = held.join();
        (ended, had_ended, pull.join())
    });
    ended.unwrap();
    pulled.unwrap().unwrap();
    assert!(!had_ended, "the registry does not hang");
    assert_eq!(scene.run(&second, &WHO), "you\n");
    for layer in &layers {
        assert_eq!(scene.fetched(layer), layer.stored().unwrap().len() as u64);
    }
}

fn a_stated_layer_that_turns_out_wrong_is_not_served(containerd: Containerd) {
    wrongly_stated(containerd, "fanotify");
}

/// A device is handed the cache's file when that is complete, and would read zeros where it is cut.
fn a_stated_layer_that_turns_out_wrong_is_not_served_from_loop_devices(containerd: Containerd) {
    if require(Feature::Loop) {
        wrongly_stated(containerd, "loop");
    }
}

fn wrongly_stated(containerd: Containerd, driver: &str) {
    let registry = FakeRegistry::start().unwrap();
    let Some(scene) = Scene::driven(containerd, "first = \"leave\"", registry, driver) else {
        return;
    };
    let Scene { rig, registry, signer } = &scene;
    let (victim, evil) = (who("victim"), who("evil"));
    let base = Layer::new(busybox(), Compression::Gzip);
    let described = [&base, &evil].map(|layer| {
        let stored = layer.stored().unwrap();
        let digest = registry.put_blob("evil", &stored).to_string();
        json!({ "mediaType": layer.media_type(), "digest": digest, "size": stored.len() })
    });
    let config = |layers: [&Layer; 2]| {
        let diff_ids = layers.map(|layer| layer.diff_id().to_string());
        json!({
            "architecture": "amd64", "os": "linux", "config": {},
            "rootfs": { "type": "layers", "diff_ids": diff_ids },
        })
    };
    // Its index is made under a true configuration, and moved to a false one.
    let image = put_manifest(registry, "evil", "1", &config([&base, &evil]), &described);
    rig.lazuli.ok(["index", &image]);
    let (_, mut moved) = index(registry, "evil");
    put_manifest(registry, "evil", "1", &config([&base, &victim]), &described);
    let manifest = registry.manifest("evil", "1").unwrap();
    let digest = digest_of(registry, "evil", "1");
    let lying: Value = serde_json::from_slice(&manifest).unwrap();
    moved["config"] = lying["config"].clone();
    moved["subject"]["digest"] = digest.to_string().into();
    moved["subject"]["size"] = manifest.len().into();
    registry.put_manifest("evil", "index", MANIFEST, moved.to_string().as_bytes());
    let mut predicate = stated(registry, "evil", &[base, evil]);
    predicate["layers"][1]["diffId"] = victim.diff_id().to_string().into();
    let name = format!("{}/evil", registry.host());
    let stated = ("urn:lazuli:index:v1", predicate);
    signer.state(registry, "evil", (Some(&name), &index_of(registry, "evil")), stated);
    rig.pull(&image).unwrap();
    let pod = rig.cri.start(&rig.own("reads"), &image, &["sleep", "1000"]).unwrap();
    // All bytes of the layer.
    assert_eq!(rig.cri.exec(&pod.container, &WHO).unwrap().stdout, b"evil\n");
    wait("an index that is found to be wrong", || {
        let wrong = fs::read_dir(rig.lazuli.root().join("indexes/wrong")).unwrap();
        wrong.count() > 0
    });
    let errs = || {
        let output = rig.cri.exec(&pod.container, &WHO).unwrap();
        assert!(output.status != 0 || output.stdout == b"evil\n", "{:?}", output.stdout);
        output.status != 0
    };
    wait("errors", errs);
    let worker = rig.lazuli.worker();
    rig.lazuli.kill(worker);
    for _ in 0..20 {
        assert!(errs(), "the next worker serves it again");
    }
    rig.cri.stop(&pod.sandbox).unwrap();
    rig.cri.remove(&pod.sandbox).unwrap();
    let again = rig.cri.run(&rig.own("again"), &image, &WHO);
    assert!(again.is_err() || again.unwrap().status != 0, "it starts again");
}
