//! Registries as containerd's directory describes them, with real TLS.

use std::{fs, path::PathBuf, sync::Arc};

use lazuli_image::oci::media_type;
use lazuli_registry::{Hosts, ImageName, Options, RegistryError, Repository, Route};
use lazuli_testkit::{
    registry::{FakeRegistry, Fault, Login},
    tls::{self, Authority, Certificate},
};

use crate::support::{manifest, noise, options, push, read, sha256};

/// A registry behind TLS, and a configuration directory for it.
struct Rig {
    _server: FakeRegistry,
    /// The TLS port.
    port: u16,
    directory: tempfile::TempDir,
    blob: Vec<u8>,
}

impl Rig {
    fn new(shown: &Certificate, clients: Option<&Authority>) -> Self {
        let server = FakeRegistry::start().unwrap();
        let blob = noise(100_000, 9);
        server.put_blob("app", &blob);
        server.put_blob("app", b"{}");
        server.put_manifest("app", "1", media_type::MANIFEST, &manifest(b"{}", &[&blob]));
        let port = tls::in_front_of(server.host().parse().unwrap(), shown, clients).unwrap().port();
        Rig { _server: server, port, directory: tempfile::tempdir().unwrap(), blob }
    }

    fn registry(&self) -> String {
        format!("localhost:{}", self.port)
    }

    fn file(&self, name: &str, text: &str) -> PathBuf {
        let path = self.directory.path().join(self.registry()).join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        path
    }

    fn options(&self) -> Options {
        Options { hosts: Hosts::new(self.directory.path().to_str().unwrap()), ..options() }
    }

    fn name(&self) -> ImageName {
        format!("{}/app:1", self.registry()).parse().unwrap()
    }

    fn open(&self) -> Arc<dyn Repository> {
        lazuli_registry::open(&self.name(), &self.options()).unwrap()
    }

    async fn works(&self) {
        let image = self.open();
        image.manifest(None).await.unwrap();
        let part = read(&*image, &self.blob, 7..9000).await;
        assert!(part.unwrap() == self.blob[7..9000]);
    }

    async fn fails(&self) -> RegistryError {
        match lazuli_registry::open(&self.name(), &self.options()) {
            Ok(image) => image.manifest(None).await.unwrap_err(),
            Err(error) => error,
        }
    }
}

#[tokio::test]
async fn a_private_authority_is_trusted_where_it_is_named() {
    let [ours, other] = ["ours", "other"].map(Authority::new);
    let rig = Rig::new(&ours.server("localhost"), None);
    rig.file("ca.pem", &ours.certificate());
    rig.file("other.pem", &other.certificate());
    let server = format!("server = \"https://{}\"\n", rig.registry());
    for toml in ["ca = 'ca.pem'", "ca = ['other.pem', 'ca.pem']", "skip_verify = true"] {
        rig.file("hosts.toml", &format!("{server}{toml}\n"));
        rig.works().await;
        rig.file("hosts.toml", &format!("{toml}\n"));
        rig.works().await;
    }
    for toml in ["", "ca = 'other.pem'"] {
        rig.file("hosts.toml", &format!("{server}{toml}\n"));
        let error = rig.fails().await;
        assert!(matches!(error, RegistryError::Untrusted { .. }), "{error:?}");
        let text = error.to_string();
        assert!(text.contains(&rig.registry()) && text.contains("UnknownIssuer"), "{text}");
        assert!(text.contains("`ca` in its hosts.toml"), "{text}");
    }
    // Another name than that in the certificate.
    let elsewhere = format!("server = \"https://127.0.0.1:{}\"\nca = 'ca.pem'\n", rig.port);
    rig.file("hosts.toml", &elsewhere);
    let text = rig.fails().await.to_string();
    assert!(text.contains("certificate not valid for name \"127.0.0.1\""), "{text}");
    // As docker has it.
    fs::remove_file(rig.file("hosts.toml", "")).unwrap();
    fs::remove_file(rig.file("other.pem", "")).unwrap();
    rig.file("ca.crt", &ours.certificate());
    rig.works().await;
}

#[tokio::test]
async fn a_certificate_that_is_its_own_authority_is_trusted() {
    let shown = tls::self_signed("localhost");
    let rig = Rig::new(&shown, None);
    rig.file("ca.crt", &shown.certificate);
    rig.works().await;
    let stranger = tls::self_signed("localhost");
    rig.file("ca.crt", &stranger.certificate);
    assert!(matches!(rig.fails().await, RegistryError::Untrusted { .. }));
    let named = tls::self_signed("elsewhere.example");
    let rig = Rig::new(&named, None);
    rig.file("ca.crt", &named.certificate);
    let text = rig.fails().await.to_string();
    assert!(text.contains("certificate not valid for name"), "{text}");
}

#[tokio::test]
async fn a_client_certificate_is_sent_where_the_server_requests_one() {
    let [servers, clients, others] = ["servers", "clients", "others"].map(Authority::new);
    let rig = Rig::new(&servers.server("localhost"), Some(&clients));
    let [me, stranger] = [clients.client("me"), others.client("stranger")];
    rig.file("ca.pem", &servers.certificate());
    for (name, client) in [("me", &me), ("stranger", &stranger)] {
        rig.file(&format!("{name}.crt"), &client.certificate);
        rig.file(&format!("{name}.key"), &client.key);
        rig.file(&format!("{name}.pem"), &format!("{}{}", client.certificate, client.key));
    }
    for client in [
        "'me.pem'",
        "['stranger.pem', 'me.pem']",
        "[['stranger.crt', 'stranger.key'], ['me.crt', 'me.key']]",
        "[['me.pem', '']]",
    ] {
        rig.file("hosts.toml", &format!("ca = 'ca.pem'\nclient = {client}\n"));
        rig.works().await;
    }
    for client in ["", "client = 'stranger.pem'"] {
        rig.file("hosts.toml", &format!("ca = 'ca.pem'\n{client}\n"));
        let error = rig.fails().await;
        assert!(matches!(error, RegistryError::Untrusted { .. }), "{error:?}");
    }
    rig.file("hosts.toml", "client = [['me.crt', 'stranger.key']]\n");
    let text = rig.fails().await.to_string();
    assert!(text.contains("stranger.key: the private key is another certificate's"), "{text}");
    // As docker has it.
    for (name, text) in
        [("hosts.toml", ""), ("ca.crt", &*servers.certificate()), ("client.cert", &*me.certificate)]
    {
        rig.file(name, text);
    }
    for name in ["me.crt", "stranger.crt"] {
        fs::remove_file(rig.file(name, "")).unwrap();
    }
    rig.file("client.key", &me.key);
    rig.works().await;
}

#[tokio::test]
async fn files_are_read_whenever_an_image_is_opened() {
    let authority = Authority::new("ours");
    let rig = Rig::new(&authority.server("localhost"), None);
    let options = rig.options();
    rig.file("hosts.toml", "ca = [\n");
    let broken = Route::to(&rig.name(), &options);
    let error = broken.clone().open(&rig.name(), &options).unwrap_err();
    assert!(matches!(error, RegistryError::Hosts(_)), "{error:?}");
    assert!(error.to_string().contains("hosts.toml: line 1: unclosed array"), "{error}");
    assert!(error.is_transient(), "the file may be half written");
    rig.file("hosts.toml", "ca = 'ca.pem'\n");
    rig.file("ca.pem", &authority.certificate());
    let right = Route::to(&rig.name(), &options);
    assert_ne!(broken, right);
    assert_eq!(right, Route::to(&rig.name(), &options));
    right.open(&rig.name(), &options).unwrap().manifest(None).await.unwrap();
    // Changes of other files that `hosts.toml` names count too.
    let before = Route::to(&rig.name(), &options);
    rig.file("ca.pem", &Authority::new("new").certificate());
    assert_ne!(before, Route::to(&rig.name(), &options));
}

/// A registry and two servers that have the same, without TLS.
struct Plain {
    registry: FakeRegistry,
    mirrors: [FakeRegistry; 2],
    directory: tempfile::TempDir,
    raw: Vec<u8>,
}

impl Plain {
    fn new() -> Self {
        let raw = manifest(b"{}", &[b"layer"]);
        let start = || {
            let server = FakeRegistry::start().unwrap();
            server.put_blob("app", b"layer");
            server.put_blob("app", b"{}");
            server.put_manifest("app", "1", media_type::MANIFEST, &raw);
            server
        };
        let [registry, one, two] = [(); 3].map(|()| start());
        Plain { registry, mirrors: [one, two], directory: tempfile::tempdir().unwrap(), raw }
    }

    /// Opens the image `selector` with the hosts.toml `text`; `$0` and `$1` are the mirrors'
    /// addresses.
    fn open(&self, selector: &str, text: &str) -> Arc<dyn Repository> {
        let directory = self.directory.path().join(self.registry.host());
        fs::create_dir_all(&directory).unwrap();
        let text = text.replace("$0", &self.mirrors[0].host());
        let text = text.replace("$1", &self.mirrors[1].host());
        fs::write(directory.join("hosts.toml"), text).unwrap();
        let hosts = Hosts::new(self.directory.path().to_str().unwrap());
        let name = format!("{}/app{selector}", self.registry.host()).parse().unwrap();
        lazuli_registry::open(&name, &Options { hosts, ..options() }).unwrap()
    }

    /// Number of requests: mirrors, registry.
    fn requests(&self) -> [u64; 3] {
        [&self.mirrors[0], &self.mirrors[1], &self.registry].map(|server| server.stats().requests)
    }
}

const TWO: &str = "[host.\"http://$0\"]\ncapabilities = ['pull']\n[host.\"http://$1\"]\ncapabilities = ['pull', 'resolve']\n";

#[tokio::test]
async fn hosts_are_asked_within_their_capabilities() {
    let plain = Plain::new();
    // A mirror without `resolve` is not asked for tags, but for everything with a digest.
    let image = plain.open(":1", TWO);
    assert_eq!(image.manifest(None).await.unwrap().raw, plain.raw);
    assert_eq!(plain.requests(), [0, 1, 0]);
    assert!(plain.mirrors[1].log()[0].target.contains("?ns="), "{:?}", plain.mirrors[1].log());
    let layer = read(&*image, b"layer", 1..3).await.unwrap();
    assert_eq!(&layer[..], b"ay");
    assert_eq!(plain.requests(), [1, 1, 0]);
    let digest = plain.open(&format!("@{}", sha256(&plain.raw)), TWO);
    digest.manifest(None).await.unwrap();
    assert_eq!(plain.requests(), [2, 1, 0]);
    // A blob exists if any server has it.
    plain.mirrors[0].fault("HEAD", "", 1, Fault::Status(404));
    assert!(digest.has_blob(&sha256(b"layer")).await.unwrap());
    assert_eq!(plain.requests(), [3, 2, 0]);
    assert!(!digest.has_blob(&sha256(b"nothing")).await.unwrap());
    // Pushes go to the registry itself, unless it is not to be pushed to.
    push(&*image, b"new").await.unwrap();
    let before = plain.requests();
    assert_eq!((before[0], before[1]), (4, 3));
    let text = "capabilities = ['pull', 'resolve']\n[host.\"http://$0\"]\n[host.\"http://$1\"]\n";
    push(&*plain.open(":1", text), b"newer").await.unwrap();
    let after = plain.requests();
    assert!(after[0] > before[0] && after[1..] == before[1..], "{before:?} {after:?}");
    let text = "capabilities = ['pull']\n[host.\"http://$0\"]\ncapabilities = ['pull']\n";
    let pull_only = plain.open(":1", text);
    let errors = [
        push(&*pull_only, b"x").await.unwrap_err().to_string(),
        pull_only.manifest(None).await.unwrap_err().to_string(),
    ];
    assert!(errors[0].contains("no host may push"), "{}", errors[0]);
    assert!(errors[1].contains("no host may resolve"), "{}", errors[1]);
    assert_eq!(pull_only.places().len(), 2);
}

#[tokio::test]
async fn headers_and_paths_are_the_hosts_own() {
    let plain = Plain::new();
    plain.mirrors[0].require(Login::Basic("me".into(), "secret".into()));
    let text = "[host.\"http://$0/prefix\"]\n[host.\"http://$0/prefix\".header]\nx = ['1', '2']\n\
         [host.\"http://$0\"]\n[host.\"http://$0\".header]\nauthorization = 'Basic bWU6c2VjcmV0'\n";
    let image = plain.open(":1", text);
    image.manifest(None).await.unwrap();
    let log = plain.mirrors[0].log();
    assert!(log[0].target.starts_with("/prefix/v2/app/manifests/1?ns="), "{log:?}");
    let last = log.last().unwrap();
    assert!(last.authorized && last.target.starts_with("/v2/app/"), "{log:?}");
    assert_eq!(plain.requests()[1..], [0, 0]);
    let text = format!("{image:?}");
    assert!(!text.contains("bWU6"), "{text}");
}
