//! A registry, a mirror in front of it, and a client.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::Duration,
};

use lazuli_image::{Algorithm, Digest, oci::media_type};
use lazuli_mirror::{Identity, LazyNames, Mirror, Node, Settings};
use lazuli_registry::{
    Bundle, Copy, ImageName, Layout, Login, Manifest, Options, Reference, Selector,
};
use lazuli_testkit::registry::FakeRegistry;
use reqwest::{Certificate, Client, Response};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::{net::TcpListener, task::JoinHandle};

/// The repository of all images.
pub(crate) const APP: &str = "team/app";

pub(crate) struct Scene {
    pub(crate) registry: FakeRegistry,
    pub(crate) mirror: Arc<Mirror>,
    pub(crate) address: SocketAddr,
    pub(crate) client: Client,
    pub(crate) node: Arc<Recorder>,
    pub(crate) directory: Arc<TempDir>,
    serving: JoinHandle<()>,
}

/// Records what the mirror reports to the node.
#[derive(Debug, Default)]
pub(crate) struct Recorder(pub(crate) Mutex<Vec<(String, Option<Login>)>>);

impl Node for Recorder {
    fn expect(&self, image: Reference, manifest: Manifest, login: Option<Login>) {
        assert_eq!(image.selector(), Selector::Digest(manifest.digest));
        self.0.lock().unwrap().push((image.to_string(), login));
    }
}

impl Scene {
    pub(crate) async fn new() -> Self {
        Self::with(&[]).await
    }

    /// A scene whose tags of these names are answered with the lazy form.
    pub(crate) async fn with(lazy: &[&str]) -> Self {
        let directory = Arc::new(tempfile::tempdir().unwrap());
        Self::over(FakeRegistry::start().unwrap(), directory, lazy).await
    }

    async fn over(registry: FakeRegistry, directory: Arc<TempDir>, lazy: &[&str]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let lazy: Vec<_> = lazy.iter().map(|&name| name.to_owned()).collect();
        let settings = Settings {
            directory: directory.path().join("mirror"),
            address,
            registry: Options {
                credential_files: Vec::new(),
                bundle: Some(Bundle::at(directory.path().join("bundle"))),
                ..Options::default()
            },
            lazy: LazyNames::parse(&lazy).unwrap(),
            stale: Duration::from_secs(3600),
        };
        let node = Arc::new(Recorder::default());
        let mirror = Mirror::open(settings, node.clone()).unwrap();
        let identity = Identity::open(&directory.path().join("mirror")).unwrap();
        let client = client(&identity, Some(&std::fs::read(identity.client()).unwrap()));
        let serving = tokio::spawn(mirror.clone().serve(listener, std::future::pending()));
        Scene { registry, mirror, address, client, node, directory, serving }
    }

    /// The scene after a restart of the mirror: answers in memory are gone.
    pub(crate) async fn restarted(self) -> Self {
        self.serving.abort();
        Self::over(self.registry.clone(), self.directory.clone(), &[]).await
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("https://{}/v2/{APP}/{path}?ns={}", self.address, self.registry.host())
    }

    pub(crate) async fn get(&self, path: &str) -> Response {
        self.client.get(self.url(path)).send().await.unwrap()
    }

    pub(crate) async fn head(&self, path: &str) -> Response {
        self.client.head(self.url(path)).send().await.unwrap()
    }

    pub(crate) async fn range(&self, path: &str, range: &str) -> Response {
        self.client.get(self.url(path)).header("range", range).send().await.unwrap()
    }

    /// A request with a user's login, as containerd sends it after a challenge: with a token.
    pub(crate) async fn get_as(&self, user: &str, password: &str, path: &str) -> Response {
        let token = self.token(user, password).await;
        self.client.get(self.url(path)).bearer_auth(token).send().await.unwrap()
    }

    /// A token for a login.
    pub(crate) async fn token(&self, user: &str, password: &str) -> String {
        let form = format!(
            "grant_type=password&service={}&scope=repository:{APP}:pull&username={user}&password={password}",
            self.registry.host()
        );
        self.token_for(form).await
    }

    pub(crate) async fn token_for(&self, form: String) -> String {
        let request = self.client.post(format!("https://{}/token", self.address)).body(form);
        let request = request.header("content-type", "application/x-www-form-urlencoded");
        let answer = request.send().await.unwrap();
        assert_eq!(answer.status(), 200);
        let answer: Value = serde_json::from_slice(&answer.bytes().await.unwrap()).unwrap();
        answer["access_token"].as_str().unwrap().to_owned()
    }

    /// Puts an ordinary image under `tag`: an index of one manifest with one layer. Returns the
    /// digests of index, manifest and configuration.
    pub(crate) fn put_image(&self, tag: &str, layer: &[u8]) -> [Digest; 3] {
        let config =
            br#"{"architecture":"amd64","os":"linux","rootfs":{"type":"layers","diff_ids":[]}}"#;
        let manifest = self.manifest(config, &[(layer, json!({}))]);
        let manifest =
            self.put_manifest(&format!("{tag}-manifest"), media_type::MANIFEST, &manifest);
        let platform = lazuli_registry::Platform::host();
        let entry = json!({"mediaType": media_type::MANIFEST, "digest": manifest.0, "size": manifest.1,
            "platform": platform});
        let index =
            json!({"schemaVersion": 2, "mediaType": media_type::INDEX, "manifests": [entry]});
        let (index, _) = self.put_manifest(tag, media_type::INDEX, &index);
        [index, manifest.0, Algorithm::Sha256.digest(config)]
    }

    /// Puts an index with an ordinary image and a lazy one. Returns the digests of index, ordinary
    /// and lazy manifest.
    pub(crate) fn put_both(&self, tag: &str) -> [Digest; 3] {
        let config =
            br#"{"architecture":"amd64","os":"linux","rootfs":{"type":"layers","diff_ids":[]}}"#;
        let ordinary = self.manifest(config, &[(b"layer", json!({}))]);
        let bootstrap = json!({"containerd.io/snapshot/nydus-bootstrap": "true",
            "containerd.io/snapshot/nydus-fs-version": "6"});
        let lazy = self.manifest(config, &[(b"bootstrap", bootstrap)]);
        let [ordinary, lazy] = [("ordinary", ordinary), ("lazy", lazy)]
            .map(|(tag, manifest)| self.put_manifest(tag, media_type::MANIFEST, &manifest));
        let platform = lazuli_registry::Platform::host();
        let entry = |(digest, size): (Digest, usize), platform| {
            json!({"mediaType": media_type::MANIFEST, "digest": digest, "size": size,
                "platform": platform})
        };
        let index = json!({"schemaVersion": 2, "mediaType": media_type::INDEX, "manifests": [
            entry(ordinary, platform.clone()), entry(lazy, platform.lazy())]});
        let (index, _) = self.put_manifest(tag, media_type::INDEX, &index);
        [index, ordinary.0, lazy.0]
    }

    /// Puts the image under `tag` into the node's bundle.
    pub(crate) async fn bundle(&self, tag: &str) {
        let image: Reference = format!("{}/{APP}:{tag}", self.registry.host()).parse().unwrap();
        let to = Bundle::at(self.directory.path().join("bundle")).entry(&image);
        let from = lazuli_registry::open(&ImageName::Registry(image), &Options::default()).unwrap();
        let copy = Copy::plan(from, None).await.unwrap();
        copy.run(&Layout::open(to), None, &|_| {}).await.unwrap();
    }

    fn manifest(&self, config: &[u8], layers: &[(&[u8], Value)]) -> Value {
        let describe = |kind: &str, content: &[u8], annotations: &Value| {
            let digest = self.registry.put_blob(APP, content);
            json!({"mediaType": kind, "digest": digest, "size": content.len(), "annotations": annotations})
        };
        let layers: Vec<_> = layers
            .iter()
            .map(|(content, annotations)| describe(media_type::LAYER_GZIP, content, annotations))
            .collect();
        let config = describe(media_type::CONFIG, config, &json!({}));
        json!({"schemaVersion": 2, "mediaType": media_type::MANIFEST, "config": config, "layers": layers})
    }

    fn put_manifest(&self, tag: &str, kind: &str, manifest: &Value) -> (Digest, usize) {
        let raw = serde_json::to_vec(manifest).unwrap();
        (self.registry.put_manifest(APP, tag, kind, &raw), raw.len())
    }

    /// The requests that the registry received, in order.
    pub(crate) fn asked(&self) -> Vec<String> {
        let log = self.registry.log();
        log.iter().map(|request| format!("{} {}", request.method, request.target)).collect()
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        self.serving.abort();
        let violations = self.registry.violations();
        assert!(violations.is_empty() || std::thread::panicking(), "{violations:?}");
    }
}

/// A client that trusts the mirror's authority alone, and shows a certificate if it has one.
pub(crate) fn client(identity: &Identity, shown: Option<&[u8]>) -> Client {
    let ca = Certificate::from_pem(&std::fs::read(identity.ca()).unwrap()).unwrap();
    let builder = Client::builder().tls_certs_only([ca]).no_proxy();
    let builder = match shown {
        Some(pem) => builder.identity(reqwest::Identity::from_pem(pem).unwrap()),
        None => builder,
    };
    builder.build().unwrap()
}

/// Bytes without a pattern that a wrong offset could hide behind.
pub(crate) fn noise(length: usize) -> Vec<u8> {
    let mut state = 1_u32;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state as u8
    };
    (0..length).map(|_| next()).collect()
}

pub(crate) fn header<'a>(answer: &'a Response, name: &str) -> &'a str {
    answer.headers().get(name).map_or("", |value| value.to_str().unwrap())
}
