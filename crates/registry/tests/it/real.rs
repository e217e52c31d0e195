//! Real neighbours: Debian's docker-registry, and skopeo.

use std::{
    fs,
    net::{SocketAddr, TcpListener, TcpStream},
    path::Path,
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicU16, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use lazuli_image::oci::media_type;
use lazuli_registry::{DockerArchive, ImageName, RegistryError, open};
use lazuli_testkit::{
    kernel::{Feature, require},
    oci::{Compression, Image, Layer},
    tls::Certificate,
};
use tokio::io::AsyncReadExt as _;

use crate::{conformance, referrers, support::options};

/// A docker-registry of our own; ends with the test.
pub(crate) struct Server {
    process: Child,
    pub(crate) host: String,
    root: Arc<tempfile::TempDir>,
}

/// Below those that the kernel gives to connections and listeners, of which tests have many: it
/// stays free until the registry listens.
fn free_port() -> SocketAddr {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let base = (std::process::id() % 1000) as u16 * 10;
    let candidates = (0..1000).map(|_| 20_000 + (base + NEXT.fetch_add(1, Relaxed)) % 10_000);
    let mut addresses = candidates.map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
    addresses.find(|address| TcpListener::bind(address).is_ok()).unwrap()
}

impl Server {
    pub(crate) fn start() -> Self {
        Self::over(Arc::new(tempfile::tempdir().unwrap()), "")
    }

    /// A second server with TLS, over the same images.
    pub(crate) fn with_tls(&self, shown: &Certificate) -> Self {
        let [certificate, key] = ["certificate.pem", "key.pem"].map(|n| self.root.path().join(n));
        fs::write(&certificate, &shown.certificate).unwrap();
        fs::write(&key, &shown.key).unwrap();
        let (certificate, key) = (certificate.display(), key.display());
        let tls = format!(", tls: {{certificate: '{certificate}', key: '{key}'}}");
        Self::over(self.root.clone(), &tls)
    }

    fn over(root: Arc<tempfile::TempDir>, tls: &str) -> Self {
        let host = free_port().to_string();
        let config = root.path().join("config.yml");
        let text = format!(
            "version: 0.1\nlog: {{level: error}}\nhttp: {{addr: '{host}'{tls}}}\nstorage: {{filesystem: {{rootdirectory: '{}'}}}}\n",
            root.path().display()
        );
        fs::write(&config, text).unwrap();
        let process = Command::new("docker-registry")
            .arg("serve")
            .arg(&config)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let server = Server { process, host, root };
        let start = Instant::now();
        while TcpStream::connect(&server.host).is_err() {
            assert!(start.elapsed() < Duration::from_secs(20), "docker-registry does not start");
            std::thread::sleep(Duration::from_millis(20));
        }
        server
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn skopeo(arguments: &[&str]) {
    let output = Command::new("skopeo")
        .args(["--insecure-policy", "copy", "-q"])
        .args(arguments)
        .output()
        .unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}

fn image(directory: &Path) -> lazuli_image::Digest {
    let tar = |name: &str| {
        let mut builder = tar::Builder::new(Vec::new());
        let mut header = tar::Header::new_gnu();
        header.set_size(name.len() as u64);
        header.set_mode(0o644);
        builder.append_data(&mut header, name, name.as_bytes()).unwrap();
        builder.into_inner().unwrap()
    };
    let layers = ["one", "two"].map(|name| Layer::new(tar(name), Compression::Gzip));
    Image::new(layers).write_layout(directory, "1").unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn docker_registry_keeps_the_contract() {
    if !require(Feature::Program("docker-registry")) {
        return;
    }
    let server = Server::start();
    let name = |tag: &str| format!("{}/some/app:{tag}", server.host).parse::<ImageName>().unwrap();
    conformance::check(|tag| open(&name(tag), &options()).unwrap()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn docker_registry_keeps_referrers_under_a_tag() {
    if !require(Feature::Program("docker-registry")) {
        return;
    }
    let server = Server::start();
    let name = format!("{}/some/app:1", server.host).parse::<ImageName>().unwrap();
    let repository = open(&name, &options()).unwrap();
    referrers::check(&*repository).await;
    let subject = repository.manifest(None).await.unwrap().descriptor();
    let list = format!("{}/some/app:{}", server.host, subject.digest.to_string().replace(':', "-"));
    let listed = || open(&list.parse().unwrap(), &options()).unwrap();
    // The tag is a list of artifacts, which name no platform.
    assert!(matches!(listed().manifest(None).await, Err(RegistryError::NoPlatform { .. })));
    let found = repository.referrers(&subject.digest, Some(referrers::TYPE)).await.unwrap();
    let note = referrers::note("new");
    let (old, kind) = (&found[0].digest, referrers::TYPE);
    let new = repository.push_referrer(&subject, kind, &note, Some(old)).await.unwrap();
    let after = repository.referrers(&subject.digest, Some(kind)).await.unwrap();
    let digests: Vec<_> = after.iter().map(|entry| entry.digest).collect();
    assert_eq!(digests, [found[1].digest, new]);
}

/// Copies an image from one place to another with this crate.
async fn copy(from: &str, to: &str) {
    let (from, to) =
        (open(&from.parse().unwrap(), &options()), open(&to.parse().unwrap(), &options()));
    let (from, to) = (from.unwrap(), to.unwrap());
    let manifest = from.manifest(None).await.unwrap();
    for blob in manifest.parsed.layers.iter().chain([&manifest.parsed.config]) {
        let mut content = Vec::new();
        let mut reader = from.blob(&blob.digest, blob.size).await.unwrap();
        reader.read_to_end(&mut content).await.unwrap();
        let content = lazuli_registry::BlobContent::Bytes(content.into());
        to.push_blob(&blob.digest, blob.size, content, None, &|_| {}).await.unwrap();
    }
    to.push_manifest(manifest.raw, &manifest.media_type).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn skopeo_reads_what_we_write_and_we_read_what_it_writes() {
    if !["skopeo", "docker-registry"].map(Feature::Program).into_iter().all(require) {
        return;
    }
    let server = Server::start();
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name).display().to_string();
    let digest = image(&directory.path().join("made"));

    // Ours to a layout and to a registry, theirs from both.
    let (layout, registry) = (format!("oci:{}:x", at("ours")), format!("{}/ours:1", server.host));
    copy(&format!("oci:{}:1", at("made")), &layout).await;
    copy(&layout, &registry).await;
    skopeo(&["--preserve-digests", &layout, &format!("oci:{}:y", at("theirs"))]);
    let remote = format!("docker://{registry}");
    skopeo(&[
        "--preserve-digests",
        "--src-tls-verify=false",
        &remote,
        &format!("oci:{}:z", at("theirs")),
    ]);

    // Theirs to a layout, a registry and an archive, ours from each.
    let theirs = format!("docker://{}/theirs:1", server.host);
    skopeo(&["--preserve-digests", "--dest-tls-verify=false", &layout, &theirs]);
    let names = [format!("oci:{}:y", at("theirs")), format!("oci:{}:z", at("theirs")), theirs];
    for name in names {
        let repository = open(&name.parse().unwrap(), &options()).unwrap();
        assert_eq!(repository.manifest(None).await.unwrap().digest, digest, "{name}");
    }
    let by_digest = format!("{}/theirs@{digest}", server.host);
    let found =
        open(&by_digest.parse().unwrap(), &options()).unwrap().manifest(None).await.unwrap();
    assert_eq!(found.media_type, media_type::MANIFEST);

    skopeo(&[&layout, &format!("docker-archive:{}:app:1", at("a.tar"))]);
    let archive = DockerArchive::open(Path::new(&at("a.tar")), Some("app:1")).unwrap();
    assert_eq!(archive.layers().len(), 2);
    for layer in archive.layers() {
        std::io::copy(&mut layer.reader(), &mut std::io::sink()).unwrap();
    }
}
