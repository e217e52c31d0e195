//! Images signed by identities, from a whole Sigstore instance to the mount.

use std::fs;

use lazuli_testkit::sigstore::{Identity, Sigstore};
use serde_json::json;

use super::{
    Scene,
    signer::{SIGNED, payload, put_bundle, put_tag, statement},
};

const RELEASE: Identity<'_> = Identity {
    issuer: "https://token.example",
    subject: "https://git.example/app/.github/workflows/release.yml@refs/tags/v1",
};

/// The only rule: signatures by any tag of the release workflow, under this instance.
fn require_release(scene: &Scene, sigstore: &Sigstore) {
    let root = scene.lazuli.path("root.json");
    fs::write(&root, sigstore.trusted_root()).unwrap();
    let (subject, issuer) = (RELEASE.subject.replace("v1", "*"), RELEASE.issuer);
    scene.policy(&format!(
        "[default.keyless]\nissuer = '{issuer}'\nsubject = '{subject}'\ntrusted_root = {root:?}\n"
    ));
}

#[test]
fn an_image_runs_by_the_bundle_of_the_identity_and_by_no_other() {
    let Some(scene) = Scene::new() else { return };
    let (sigstore, foreign) = (Sigstore::default(), Sigstore::default());
    require_release(&scene, &sigstore);
    let (image, name) = (scene.image(), scene.repository());
    assert!(scene.refused(&image).contains("there is no signature"));

    let signed = statement((None, &scene.digest), (SIGNED, json!({})));
    let branch = RELEASE.subject.replace("tags", "heads");
    let refer = |bundle: &str| put_bundle(&scene.registry, "app", &scene.digest, bundle);
    for (reason, bundle) in [
        ("refs/heads/v1", sigstore.bundle(Identity { subject: &branch, ..RELEASE }, &signed)),
        ("issuer mismatch", sigstore.bundle(Identity { issuer: &name, ..RELEASE }, &signed)),
        ("No log key", foreign.bundle(RELEASE, &signed)),
    ] {
        refer(&bundle);
        let refusal = scene.refused(&image);
        assert!(refusal.contains(reason), "{refusal}");
    }
    // The statement of an attestation is no permission.
    let kind = "https://slsa.dev/provenance/v1";
    let attested = statement((None, &scene.digest), (kind, json!({})));
    refer(&sigstore.bundle(RELEASE, &attested));
    scene.refused(&image);
    // A valid bundle whose log entry was moved to another time.
    let good = sigstore.bundle(RELEASE, &signed);
    let moved =
        good.replace("\"integratedTime\":\"1735732800\"", "\"integratedTime\":\"1735732801\"");
    assert_ne!(moved, good);
    refer(&moved);
    scene.refused(&image);
    assert_eq!(scene.kept(), [] as [std::path::PathBuf; 0], "something of it was kept");

    refer(&good);
    let mountpoint = scene.mount("mnt");
    scene.lazuli.ok(["umount", &mountpoint]);
    // The instance is exchanged: its signatures no longer count.
    require_release(&scene, &Sigstore::default());
    scene.lazuli.ok(["copy", &image, &format!("{name}:2")]);
    scene.refused(&format!("{name}:2"));
}

#[test]
fn an_image_runs_by_the_payload_of_the_identity_and_under_its_name_only() {
    let Some(scene) = Scene::new() else { return };
    let sigstore = Sigstore::default();
    require_release(&scene, &sigstore);
    let image = scene.image();
    let tag = |reference: &str, identity: Identity<'_>| {
        let payload = payload(reference, &scene.digest);
        let annotations = sigstore.annotations(identity, &payload);
        put_tag(&scene.registry, "app", &scene.digest, payload.as_bytes(), &annotations);
    };
    let branch = RELEASE.subject.replace("tags", "heads");
    tag(&scene.repository(), Identity { subject: &branch, ..RELEASE });
    let refusal = scene.refused(&image);
    assert!(refusal.contains(&branch), "{refusal}");
    tag("r.example/other", RELEASE);
    assert!(scene.refused(&image).contains("as \"r.example/other\""));
    tag(&scene.repository(), RELEASE);
    let mountpoint = scene.mount("mnt");
    scene.lazuli.ok(["umount", &mountpoint]);
}
