//! The real cosign verifies our signatures, and we verify those that it makes.

use std::{ffi::OsString, process::Command};

use lazuli_testkit::{
    kernel::{Feature, require},
    registry::FakeRegistry,
    sigstore::{Identity, Sigstore},
};
use serde_json::json;

use super::{Keys, evidence, evidence::Evidence, in_registry, source};
use crate::{lazuli::Lazuli, policy::signer, registry::Registry};

/// cosign, if `LAZULI_COSIGN` names it. Its build takes minutes, so it is never required.
fn cosign() -> Option<OsString> {
    let found = std::env::var_os("LAZULI_COSIGN");
    if found.is_none() {
        eprintln!("skipped: LAZULI_COSIGN does not name cosign: `scripts/cosign` builds it");
    }
    found
}

struct Cosign<'a>(OsString, &'a Lazuli);

impl Cosign<'_> {
    fn run(&self, arguments: &[&str]) -> (bool, String) {
        let mut cosign = Command::new(&self.0);
        cosign.args(arguments).current_dir(self.1.path("")).env("HOME", self.1.path(""));
        let output = cosign.env("COSIGN_PASSWORD", "secret").output().unwrap();
        let text = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8_lossy(&text).into_owned())
    }

    fn ok(&self, arguments: &[&str]) -> String {
        let (done, said) = self.run(arguments);
        assert!(done, "cosign {arguments:?}: {said}");
        said
    }

    /// Verifies a signature in one of two forms; `hash` is the algorithm of the key's signatures.
    fn verify(&self, image: &str, key: &str, hash: &str, bundle: &str) -> (bool, String) {
        let format = format!("--new-bundle-format={bundle}");
        let hash = format!("--signature-digest-algorithm={hash}");
        self.run(&["verify", "--key", key, "--insecure-ignore-tlog=true", &hash, &format, image])
    }
}

#[test]
fn cosign_verifies_our_signatures_and_statements() {
    let Some(program) = cosign() else { return };
    let lazuli = Lazuli::new();
    let cosign = Cosign(program, &lazuli);
    let (registry, old) = (FakeRegistry::start().unwrap(), FakeRegistry::start().unwrap());
    old.without_referrers();
    let (ordinary, _) = in_registry(&lazuli, &registry);
    let curve = |curve: &str| {
        ["-algorithm".into(), "EC".into(), "-pkeyopt".into(), format!("ec_paramgen_curve:{curve}")]
    };
    let rsa = ["-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048"].map(String::from);
    let stranger = Keys::p256(&lazuli, "stranger");
    let kinds = [
        ("p256", "sha256", curve("P-256")),
        ("p384", "sha384", curve("P-384")),
        ("rsa", "sha256", rsa),
    ];
    for (kind, hash, arguments) in kinds {
        let keys = Keys::make(&lazuli, kind, &arguments.each_ref().map(String::as_str));
        for registry in [&registry, &old] {
            let image = format!("{}/lazy:{kind}", registry.host());
            lazuli.ok(["convert", &ordinary, &image, "--keep-oci", "--sign", &keys.private]);
            for format in ["true", "false"] {
                let (verified, said) = cosign.verify(&image, &keys.public, hash, format);
                assert!(verified, "{kind} {format}: {said}");
                let (verified, said) = cosign.verify(&image, &stranger.public, hash, format);
                assert!(!verified, "{kind} {format}: {said}");
            }
            let lazy = Evidence::of(&lazuli.path(""), &image, None).manifests[1];
            let lazy = format!("{}/lazy@{lazy}", registry.host());
            let said = cosign.ok(&[
                "verify-attestation",
                "--key",
                &keys.public,
                "--insecure-ignore-tlog=true",
                &format!("--signature-digest-algorithm={hash}"),
                "--type",
                lazuli_policy::statement::CONVERTED,
                &lazy,
            ]);
            assert!(said.contains("The signatures were verified"), "{said}");
        }
    }
}

#[test]
fn we_sign_with_cosigns_key_and_verify_what_cosign_signs() {
    let Some(program) = cosign() else { return };
    let lazuli = Lazuli::new();
    let cosign = Cosign(program, &lazuli);
    // cosign sends uploads without Content-Range, which the fake registry refuses.
    if !require(Feature::Program("docker-registry")) {
        return;
    }
    let registry = Registry::start();
    source(&lazuli);
    let ordinary = registry.image("app:1");
    lazuli.ok(["copy", "oci:source:x", &ordinary]);
    let digest = Evidence::of(&lazuli.path(""), &ordinary, None).digest;
    let repository = |name: &str| registry.image(name);
    cosign.ok(&["generate-key-pair"]);
    let keys = Keys { private: "cosign.key".into(), public: "cosign.pub".into() };
    let pinned = format!("{}@{digest}", repository("app"));
    for format in ["true", "false"] {
        let format = format!("--new-bundle-format={format}");
        cosign.ok(&[
            "sign",
            "--yes",
            "--key",
            "cosign.key",
            "--use-signing-config=false",
            "--tlog-upload=false",
            &format,
            &pinned,
        ]);
    }
    let found = evidence(&lazuli, &ordinary, &keys);
    assert_eq!(found.payloads, [repository("app")]);
    assert_eq!(found.signed, ["".to_owned()]);

    let lazy = repository("lazy:1");
    let convert = lazuli
        .command(["convert", &ordinary, &lazy, "--sign", "cosign.key"])
        .env("COSIGN_PASSWORD", "secret")
        .output()
        .unwrap();
    assert!(convert.status.success(), "{}", String::from_utf8_lossy(&convert.stderr));
    for format in ["true", "false"] {
        let (verified, said) = cosign.verify(&lazy, "cosign.pub", "sha256", format);
        assert!(verified, "{format}: {said}");
    }
    // A signature that cosign adds to ours.
    let others = Keys::p256(&lazuli, "others");
    cosign.ok(&[
        "import-key-pair",
        "--key",
        &others.private,
        "--output-key-prefix",
        "imported",
        "--yes",
    ]);
    let digest = Evidence::of(&lazuli.path(""), &lazy, None).digest;
    cosign.ok(&[
        "sign",
        "--yes",
        "--key",
        "imported.key",
        "--use-signing-config=false",
        "--tlog-upload=false",
        "--new-bundle-format=false",
        &format!("{}@{digest}", repository("lazy")),
    ]);
    for keys in [&keys, &others] {
        assert_eq!(evidence(&lazuli, &lazy, keys).payloads, [repository("lazy")]);
    }
}

/// The outside reader of the instance with which the tests sign.
#[test]
fn cosign_verifies_signatures_by_identities_of_the_test_instance() {
    let Some(program) = cosign() else { return };
    let lazuli = Lazuli::new();
    let cosign = Cosign(program, &lazuli);
    let registry = FakeRegistry::start().unwrap();
    let (image, digest) = in_registry(&lazuli, &registry);
    let sigstore = Sigstore::default();
    std::fs::write(lazuli.path("root.json"), sigstore.trusted_root()).unwrap();
    let identity = Identity { issuer: "https://token.example", subject: "https://git.example/app" };
    let payload = signer::payload(image.trim_end_matches(":1"), &digest);
    let annotations = sigstore.annotations(identity, &payload);
    signer::put_tag(&registry, "app", &digest, payload.as_bytes(), &annotations);
    let statement = signer::statement((None, &digest), (signer::SIGNED, json!({})));
    signer::put_bundle(&registry, "app", &digest, &sigstore.bundle(identity, &statement));
    let verify = |subject: &str, bundle: &str| {
        let subject = format!("--certificate-identity={subject}");
        let issuer = format!("--certificate-oidc-issuer={}", identity.issuer);
        let format = format!("--new-bundle-format={bundle}");
        cosign.run(&["verify", "--trusted-root=root.json", &subject, &issuer, &format, &image])
    };
    for format in ["true", "false"] {
        let (verified, said) = verify(identity.subject, format);
        assert!(verified, "{format}: {said}");
        let (verified, said) = verify("https://git.example/other", format);
        assert!(!verified, "{format}: {said}");
    }
}
