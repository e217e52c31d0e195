//! A registry with a certificate of a private authority.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use lazuli_testkit::{
    kernel::{Feature, require},
    odd,
};

use crate::{drivers::able, lazuli::Lazuli, registry::Registry};

fn openssl(directory: &Path, arguments: &str) {
    let arguments = arguments.split_ascii_whitespace();
    let output = Command::new("openssl").args(arguments).current_dir(directory).output();
    let output = output.expect("openssl, which `make test` installs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// A certificate for `localhost`, its key, and the authority that signed it.
fn certificate(directory: &Path) -> [PathBuf; 3] {
    let key = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes";
    openssl(
        directory,
        &format!("req -x509 {key} -keyout ca.key -out ca.pem -subj /CN=ours -days 2"),
    );
    openssl(directory, &format!("req {key} -keyout key.pem -out request.pem -subj /CN=localhost"));
    std::fs::write(directory.join("names"), "subjectAltName = DNS:localhost\n").unwrap();
    let sign = "x509 -req -in request.pem -CA ca.pem -CAkey ca.key -CAcreateserial -extfile names";
    openssl(directory, &format!("{sign} -out certificate.pem -days 2"));
    ["certificate.pem", "key.pem", "ca.pem"].map(|name| directory.join(name))
}

/// The registry itself is unreachable from the start: everything comes from the mirror, over TLS.
#[test]
fn a_private_authority_is_trusted_when_the_system_does() {
    if !able("fuse") || !require(Feature::Program("openssl")) {
        return;
    }
    let [lazuli, stranger] = [Lazuli::new(), Lazuli::new()];
    let source = lazuli.directory("source");
    std::fs::write(source.join("file"), odd::random(1, 100_000)).unwrap();
    let registry = Registry::start();
    let image = registry.image("app:1");
    lazuli.ok(["convert", "dir:source", &image]);
    let [certificate, key, authority] = certificate(&lazuli.directory("tls"));
    let mirror = registry.with_tls(&certificate, &key);
    let host = image.split('/').next().unwrap_or_default();
    let url = format!("https://localhost:{}", mirror.port());
    let config = format!("[[registry]]\nhost = \"{host}\"\nmirrors = [\"{url}\"]\n");
    for lazuli in [&lazuli, &stranger] {
        lazuli.configure(&config);
        lazuli.directory("mnt");
    }
    drop(registry);

    let mut mount = lazuli.command(["mount", &image, "mnt"]);
    let output = mount.env("SSL_CERT_FILE", &authority).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let content = std::fs::read(lazuli.path("mnt/file")).unwrap();
    assert!(content == odd::random(1, 100_000));

    let error = stranger.fails(["mount", &image, "mnt"]);
    assert!(error.contains(&format!("localhost:{}", mirror.port())), "{error}");
    assert!(error.contains("certificate") && error.contains("UnknownIssuer"), "{error}");
    assert!(error.contains("refused"), "what the registry itself said: {error}");
}

/// A minimal Debian has no package ca-certificates.
#[test]
fn a_system_without_authorities_needs_none_for_plain_http() {
    if !able("fuse") || !require(Feature::Program("openssl")) {
        return;
    }
    let lazuli = Lazuli::new();
    std::fs::write(lazuli.directory("source").join("file"), "content").unwrap();
    let nowhere = lazuli.directory("nowhere");
    let without = |words: [&str; 3]| {
        let mut command = lazuli.command(words);
        command.env("SSL_CERT_FILE", nowhere.join("none")).env("SSL_CERT_DIR", &nowhere);
        let output = command.output().unwrap();
        (output.status.success(), String::from_utf8(output.stderr).unwrap())
    };
    let registry = Registry::start();
    let image = registry.image("app:1");
    let (done, error) = without(["convert", "dir:source", &image]);
    assert!(done, "{error}");

    let [certificate, key, _] = certificate(&lazuli.directory("tls"));
    let mirror = registry.with_tls(&certificate, &key);
    let host = image.split('/').next().unwrap_or_default();
    let url = format!("https://localhost:{}", mirror.port());
    lazuli.configure(&format!("[[registry]]\nhost = \"{host}\"\nmirrors = [\"{url}\"]\n"));
    lazuli.directory("mnt");
    drop(registry);
    let (done, error) = without(["mount", &image, "mnt"]);
    assert!(!done && error.contains(&url[8..]) && error.contains("ca-certificates"), "{error}");
}
