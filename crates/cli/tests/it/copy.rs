//! Copies of an image and everything that belongs to it, from one registry to another.

use std::fs;

use lazuli_image::Digest;
use lazuli_testkit::{
    kernel::{Feature, require},
    odd,
    registry::{FakeRegistry, Fault},
};
use serde_json::{Value, json};

use crate::{
    lazuli::Lazuli,
    prefetch::{LEARN, fill, read, wait},
};

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const INDEX: &str = "application/vnd.oci.image.index.v1+json";

#[test]
fn a_trace_goes_along() {
    trace(true);
}

#[test]
fn a_trace_goes_along_to_a_registry_that_lists_no_referrers() {
    trace(false);
}

/// A node learns from one registry, and another one starts the copy in another; that has the API
/// for referrers, or not.
fn trace(api: bool) {
    let able =
        require(Feature::Root) && require(Feature::Fanotify) && require(Feature::ErofsFileBacked);
    if !able {
        return;
    }
    let (from, to) = (FakeRegistry::start().unwrap(), FakeRegistry::start().unwrap());
    if !api {
        to.without_referrers();
    }
    let image = format!("{}/app:1", from.host());
    let teacher = Lazuli::new();
    teacher.configure_all(&format!("{LEARN}publish = true\n"));
    fill(&teacher.directory("source"), 40, 200_000);
    teacher.ok(["convert", "dir:source", &image]);
    let mountpoint = teacher.directory("mnt");
    teacher.ok(["mount", &image, mountpoint.to_str().unwrap()]);
    read(&teacher, 31, 200_000);
    read(&teacher, 3, 200_000);
    teacher.ok(["umount", mountpoint.to_str().unwrap()]);
    wait("publication", || teacher.log().contains("published its trace"));

    let copy = format!("{}/team/app:2", to.host());
    let said = teacher.ok(["copy", &image, &copy]);
    assert!(said.contains("1 artifacts"), "{said}");
    assert_eq!(to.manifest("team/app", "2"), from.manifest("app", "1"));
    to.reset_stats();
    let said = teacher.ok(["copy", &image, &copy]);
    assert!(said.contains("sent      0 B in 0"), "{said}");
    let log = to.log();
    assert!(log.iter().all(|it| matches!(it.method.as_str(), "GET" | "HEAD")), "{log:#?}");

    let node = Lazuli::new();
    node.configure_all(LEARN);
    let shown = |lazuli: &Lazuli, image: &str| -> Value {
        serde_json::from_str(&lazuli.ok(["trace", "show", image, "--json"])).unwrap()
    };
    assert_eq!(shown(&node, &copy)["touches"], shown(&teacher, &image)["touches"]);
    let mountpoint = node.directory("mnt");
    node.ok(["mount", &copy, mountpoint.to_str().unwrap()]);
    let ready = || node.mount_status(&mountpoint)["chunks_ready"].as_u64();
    wait("what was learned elsewhere", || ready() >= Some(2));
    read(&node, 31, 200_000);
    node.ok(["umount", mountpoint.to_str().unwrap()]);
    assert_eq!((from.violations(), to.violations()), (vec![], vec![]));
}

/// Puts an artifact that refers to `subject`.
pub(crate) fn refer(
    registry: &FakeRegistry,
    subject: &Digest,
    kind: &str,
    content: &[u8],
) -> Digest {
    let layer = registry.put_blob("app", content);
    let empty = registry.put_blob("app", b"{}");
    let raw = json!({
        "schemaVersion": 2, "mediaType": MANIFEST, "artifactType": kind,
        "config": { "mediaType": "application/vnd.oci.empty.v1+json", "digest": empty, "size": 2 },
        "layers": [{ "mediaType": "text/plain", "digest": layer, "size": content.len() }],
        "subject": { "mediaType": MANIFEST, "digest": subject, "size": 1 },
        "annotations": { "note": kind },
    });
    registry.put_manifest(
        "app",
        &format!("put-{kind}").replace('/', "-"),
        MANIFEST,
        raw.to_string().as_bytes(),
    )
}

/// An index of two images that share a layer of 20 MiB; one has a signed list of parts. Returns all
/// manifests.
fn everything(registry: &FakeRegistry) -> Vec<Digest> {
    let mut all = Vec::new();
    let shared = odd::random(1, 20 << 20);
    let layer = registry.put_blob("app", &shared);
    for architecture in ["amd64", "s390x"] {
        let config = json!({ "os": "linux", "architecture": architecture }).to_string();
        let digest = registry.put_blob("app", config.as_bytes());
        // Odd spaces: bytes are copied, not their meaning.
        let raw = format!(
            r#"{{ "schemaVersion":2,  "mediaType":"{MANIFEST}",
                "config":{{"mediaType":"application/vnd.oci.image.config.v1+json",
                    "digest":"{digest}","size":{}}},
                "layers":[{{"mediaType":"application/vnd.oci.image.layer.v1.tar",
                    "digest":"{layer}","size":{}}}]}}"#,
            config.len(),
            shared.len()
        );
        all.push(registry.put_manifest("app", architecture, MANIFEST, raw.as_bytes()));
    }
    let entry = |digest: &Digest, architecture: &str| {
        let size = registry.manifest("app", architecture).unwrap().len();
        let platform = json!({ "os": "linux", "architecture": architecture });
        json!({ "mediaType": MANIFEST, "digest": digest, "size": size, "platform": platform })
    };
    let entries = [entry(&all[0], "amd64"), entry(&all[1], "s390x")];
    let raw = json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": entries });
    let index = registry.put_manifest("app", "1", INDEX, raw.to_string().as_bytes());
    let parts = refer(registry, &all[0], "text/parts", b"a list of parts");
    let signature = refer(registry, &parts, "text/signature", b"a signature");
    all.extend([index, parts, signature]);
    all
}

#[test]
fn every_platform_and_every_referrer_is_copied() {
    let lazuli = Lazuli::new();
    let (from, to, old) = (
        FakeRegistry::start().unwrap(),
        FakeRegistry::start().unwrap(),
        FakeRegistry::start().unwrap(),
    );
    old.without_referrers();
    let all = everything(&from);
    let image = format!("{}/app:1", from.host());
    let same = |registry: &FakeRegistry, repository: &str| {
        for digest in &all {
            let copied = registry.manifest(repository, &digest.to_string());
            assert_eq!(copied, from.manifest("app", &digest.to_string()), "{digest}");
        }
        assert_eq!(registry.manifest(repository, "2"), from.manifest("app", "1"));
        assert_eq!(registry.violations(), [""; 0]);
        assert_eq!(registry.open_uploads(), 0);
    };
    // To another registry; on to a directory; from there to one without the referrers API, and from
    // that one back.
    let [first, second] = [&to, &old].map(|registry| format!("{}/copied/app:2", registry.host()));
    for pair in [[&*image, &*first], [&first, "oci:layout:2"], ["oci:layout:2", &second]] {
        let said = lazuli.ok(["copy", pair[0], pair[1]]);
        assert!(said.contains("2 artifacts"), "{said}");
        let again = lazuli.ok(["copy", pair[0], pair[1]]);
        assert!(again.contains("sent      0 B in 0"), "{again}");
    }
    same(&to, "copied/app");
    same(&old, "copied/app");
    lazuli.ok(["copy", &second, &format!("{}/back:2", from.host())]);
    same(&from, "back");
    // The list of referrers does not disturb a copy.
    lazuli.ok(["copy", "oci:layout", "oci:other:2"]);

    // Within a registry nothing travels but manifests.
    to.reset_stats();
    let said = lazuli.ok(["copy", &first, &format!("{}/near:2", to.host())]);
    assert!(said.contains("mounted   20.00 MiB in"), "{said}");
    assert!(
        to.log().iter().all(
            |it| it.method != "PATCH" && !(it.method == "GET" && it.target.contains("/blobs/"))
        )
    );
    same(&to, "near");
}

/// cosign 2 names a signature after the digest that it signs; nothing in it refers to the image.
#[test]
fn signatures_under_tags_go_along() {
    let lazuli = Lazuli::new();
    let (from, to) = (FakeRegistry::start().unwrap(), FakeRegistry::start().unwrap());
    let all = everything(&from);
    let [amd64, index] = [&all[0], &all[2]].map(|it| it.to_string().replace(':', "-"));
    let tags = [format!("{index}.sig"), format!("{amd64}.sig"), format!("{amd64}.att")];
    for tag in &tags {
        let payload = format!("payload of {tag}");
        let layer = from.put_blob("app", payload.as_bytes());
        let config = from.put_blob("app", b"{}");
        let raw = json!({
            "schemaVersion": 2, "mediaType": MANIFEST,
            "config": { "mediaType": "application/vnd.oci.image.config.v1+json", "digest": config, "size": 2 },
            "layers": [{
                "mediaType": "application/vnd.dev.cosign.simplesigning.v1+json",
                "digest": layer, "size": payload.len(),
                "annotations": { "dev.cosignproject.cosign/signature": "MEUC" },
            }],
        });
        from.put_manifest("app", tag, MANIFEST, raw.to_string().as_bytes());
    }
    let image = format!("{}/app:1", from.host());
    let second = format!("{}/copied:2", to.host());
    for pair in [[&*image, "oci:layout:2"], ["oci:layout:2", &second]] {
        let said = lazuli.ok(["copy", pair[0], pair[1]]);
        assert!(said.contains("5 artifacts"), "{said}");
    }
    for tag in &tags {
        assert_eq!(to.manifest("copied", tag), from.manifest("app", tag), "{tag}");
    }
    // A layout's only image is still found without its name.
    lazuli.ok(["copy", "oci:layout", "oci:other:2"]);
    // An unknown answer must not lead to a copy without its signature.
    from.fault("GET", &tags[0], 1000, Fault::Status(500));
    let error = lazuli.fails(["copy", &image, &format!("{}/third:2", to.host())]);
    assert!(error.contains(&tags[0]), "{error}");
    assert_eq!(to.manifest("third", "2"), None);
}

#[test]
fn wrong_blobs_are_not_copied() {
    let lazuli = Lazuli::new();
    let (from, to) = (FakeRegistry::start().unwrap(), FakeRegistry::start().unwrap());
    let all = everything(&from);
    let manifest: Value = serde_json::from_slice(&from.manifest("app", "amd64").unwrap()).unwrap();
    let layer = manifest["layers"][0]["digest"].as_str().unwrap();
    let image = format!("{}/app:1", from.host());
    let copies = [format!("{}/app:2", to.host()), "oci:layout:2".to_owned()];
    for copy in &copies {
        from.fault("GET", layer, 1000, Fault::WrongBytes);
        let error = lazuli.fails(["copy", &image, copy]);
        assert!(error.contains(layer) && error.contains("corrupt"), "{error}");
        from.clear_faults();
        let shown = fs::read_to_string(lazuli.path("layout/index.json")).unwrap_or_default();
        assert_eq!((to.manifest("app", "2"), shown.as_str(), to.open_uploads()), (None, "", 0));
    }
    // The connection breaks in the middle of a piece, on either side.
    from.fault("GET", layer, 1, Fault::TruncateAfter(12 << 20));
    to.fault("PATCH", "/blobs/uploads/", 1, Fault::ResetAfter(3 << 20));
    lazuli.ok(["copy", &image, &copies[0]]);
    assert_eq!(to.manifest("app", "2"), from.manifest("app", "1"));
    assert_eq!(to.blob("app", &layer.parse().unwrap()), from.blob("app", &layer.parse().unwrap()));

    // A list with a false entry, and one that names a missing manifest.
    from.without_referrers();
    let [amd64, parts] = [&all[0], &all[3]];
    let entry = |digest: &str| json!({ "mediaType": MANIFEST, "digest": digest, "size": 1 });
    let gone = format!("sha256:{}", "0".repeat(64));
    let list = [entry(&gone), entry(&all[1].to_string())];
    let list = json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": list }).to_string();
    let tag = amd64.to_string().replace(':', "-");
    from.put_manifest("app", &tag, INDEX, list.as_bytes());
    let said = lazuli.ok(["copy", &image, &format!("{}/third:2", to.host())]);
    assert!(!said.contains("artifacts"), "{said}");
    assert_eq!(to.manifest("third", &parts.to_string()), None);
    // An unknown media type aborts the copy: it would be incomplete.
    let odd = format!(
        r#"{{"schemaVersion":2,"mediaType":"{INDEX}","manifests":[{{"mediaType":"{MANIFEST}","digest":"sha512:00","size":1}}]}}"#
    );
    from.put_manifest("app", "odd", INDEX, odd.as_bytes());
    let error = lazuli.fails(["copy", &format!("{}/app:odd", from.host()), &copies[0]]);
    assert!(error.contains("sha512:00"), "{error}");
}
