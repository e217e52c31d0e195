//! containerd's verifier protocol, from both of its ends.

use std::{
    fs::{self, Permissions},
    io::Write as _,
    os::unix::fs::PermissionsExt as _,
    process::{Output, Stdio},
};

use serde_json::json;

use super::{
    Scene,
    signer::{MANIFEST, Signer},
};

const DESCRIPTOR: &str = "application/vnd.oci.descriptor.v1+json";

/// Asks as containerd does.
fn ask(scene: &Scene, name: &str, digest: &str, kind: &str, input: &str) -> Output {
    let arguments = ["verify-image", "-name", name, "-digest", digest, "-stdin-media-type", kind];
    let mut command = scene.lazuli.command(arguments);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

#[test]
fn containerd_is_told_what_the_policy_says_of_ordinary_images() {
    let Some(scene) = Scene::new() else { return };
    let digest = scene.digest.to_string();
    let input = json!({ "mediaType": MANIFEST, "digest": digest, "size": 10 }).to_string();
    let verify = |name: &str, kind: &str, input: &str| {
        let output = ask(&scene, name, &digest, kind, input);
        (output.status.code(), String::from_utf8(output.stdout).unwrap())
    };
    let (code, reason) = verify(&scene.image(), DESCRIPTOR, &input);
    assert!(code == Some(1) && reason.contains("there is no signature"), "{code:?} {reason}");
    scene.signer.refer(&scene.registry, "app", &scene.digest);
    let (code, reason) = verify(&scene.image(), DESCRIPTOR, &input);
    assert!(code == Some(0) && reason.starts_with("sha256:"), "{code:?} {reason}");
    let other = input.replace(&digest, &format!("sha256:{}", "1".repeat(64)));
    for (kind, input, expected) in [
        ("text/plain", &*input, "expected application/vnd.oci.descriptor"),
        (DESCRIPTOR, &*other, "has the descriptor of sha256:1111"),
        (DESCRIPTOR, "garbage", "no descriptor"),
    ] {
        let (code, reason) = verify(&scene.image(), kind, input);
        assert!(code == Some(1) && reason.contains(expected), "{code:?} {reason}");
    }
    scene.lazuli.configure("");
    let (code, reason) = verify(&scene.image(), DESCRIPTOR, &input);
    assert!(code == Some(1) && reason.contains("there is no policy"), "{code:?} {reason}");
}

#[test]
fn a_program_decides_where_the_policy_says_so() {
    let Some(scene) = Scene::new() else { return };
    let (program, said) = (scene.lazuli.path("program"), scene.lazuli.path("said"));
    let script = |end: &str| {
        let script = format!("#!/bin/sh\necho \"$@\" >{0:?}\ncat >>{0:?}\n{end}\n", said);
        fs::write(&program, script).unwrap();
        fs::set_permissions(&program, Permissions::from_mode(0o755)).unwrap();
    };
    scene.policy(&format!("default = {{ exec = {program:?}, timeout_seconds = 2 }}\n"));
    assert!(scene.refused(&scene.image()).contains("No such file"));
    script("echo because; exit 1");
    let refused = scene.refused(&scene.image());
    assert!(refused.contains("refuses it") && refused.contains("because"), "{refused}");
    script("exec sleep 60");
    assert!(scene.refused(&scene.image()).contains("did not answer within 2 s"));
    script("exit 0");
    let mountpoint = scene.mountpoint("mnt");
    scene.lazuli.ok(["mount", &scene.image(), &mountpoint]);
    let said = fs::read_to_string(&said).unwrap();
    let (arguments, descriptor) = said.split_once('\n').unwrap();
    let (image, digest) = (scene.image(), scene.digest);
    let expected = format!("-name {image} -digest {digest} -stdin-media-type {DESCRIPTOR}");
    assert_eq!(arguments, expected);
    let descriptor: serde_json::Value = serde_json::from_str(descriptor).unwrap();
    assert_eq!(descriptor["digest"], digest.to_string());
    assert_eq!(descriptor["mediaType"], MANIFEST);
    // It may change its mind, and is asked each time.
    script("exit 1");
    scene.refused(&scene.image());
    scene.lazuli.ok(["umount", &mountpoint]);
}

#[test]
fn an_index_that_is_signed_covers_its_images() {
    let Some(scene) = Scene::new() else { return };
    let Scene { lazuli, registry, .. } = &scene;
    let platform = lazuli_registry::Platform::host();
    let raw = registry.manifest("app", "1").unwrap();
    let index = json!({
        "schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [{
            "mediaType": MANIFEST, "digest": scene.digest, "size": raw.len(), "platform": platform,
        }],
    });
    let media_type = "application/vnd.oci.image.index.v1+json";
    let digest = registry.put_manifest("app", "all", media_type, index.to_string().as_bytes());
    let image = format!("{}:all", scene.repository());
    let evil = Signer::new(&lazuli.directory(""), "evil");
    evil.tag(registry, "app", &digest, &scene.repository());
    scene.refused(&image);
    scene.signer.tag(registry, "app", &digest, &scene.repository());
    let mountpoint = scene.mountpoint("mnt");
    for name in [image, format!("{}@{digest}", scene.repository())] {
        lazuli.ok(["mount", &name, &mountpoint]);
        lazuli.ok(["umount", &mountpoint]);
    }
    // The manifest alone is not signed, under a name that leads to no index.
    scene.refused(&format!("{}:1", scene.repository()));
}
