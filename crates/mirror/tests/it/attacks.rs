//! Processes of this machine that are not the mirror's clients, and servers that are not the
//! mirror.

use lazuli_mirror::Identity;
use lazuli_testkit::tls;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

use crate::scene::{Scene, client};

#[tokio::test]
async fn a_client_without_a_certificate_of_the_node_is_told_nothing() {
    let scene = Scene::new().await;
    scene.put_image("1", b"layer");
    let identity = Identity::open(&scene.directory.path().join("mirror")).unwrap();
    let foreign = tls::Authority::new("foreign").client("lazuli");
    let foreign = foreign.certificate + &foreign.key;
    // The mirror's own certificate is not a client's.
    let server = std::fs::read(identity.ca().with_file_name("server.pem")).unwrap();
    for shown in [None, Some(foreign.as_bytes()), Some(&server[..])] {
        let asked = client(&identity, shown).get(scene.url("manifests/1")).send().await;
        assert!(asked.is_err(), "{asked:?}");
    }
    assert_eq!(scene.asked(), Vec::<String>::new());
    assert_eq!(scene.get("manifests/1").await.status(), 200);
}

#[tokio::test]
async fn plain_http_is_refused() {
    let scene = Scene::new().await;
    let mut stream = TcpStream::connect(scene.address).await.unwrap();
    stream.write_all(b"GET /v2/ HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer).await;
    assert!(!answer.windows(4).any(|part| part == b"HTTP"), "{answer:?}");
}

/// A process that binds the mirror's port while it is free has another node's certificate, or its
/// own.
#[tokio::test]
async fn a_server_at_the_mirrors_port_gets_no_login() {
    let scene = Scene::new().await;
    let own = Identity::open(&scene.directory.path().join("mirror")).unwrap();
    let shown = std::fs::read(own.client()).unwrap();
    let foreign = tls::Authority::new("the mirror of this node");
    let behind = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let fake = foreign.server("127.0.0.1");
    let fake = tls::in_front_of(behind.local_addr().unwrap(), &fake, None).unwrap();
    let request = client(&own, Some(&shown)).get(format!("https://{fake}/v2/"));
    assert!(request.basic_auth("ann", Some("secret")).send().await.is_err());
    behind.set_nonblocking(true).unwrap();
    assert!(behind.accept().is_err(), "the login reached the process");
}
