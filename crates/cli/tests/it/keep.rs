//! An ordinary image and its lazy one under the same tag.

use std::process::Command;

use lazuli_testkit::{
    kernel::{Feature, require},
    oci::{Compression, Image, Layer},
    odd,
};
use serde_json::Value;

use crate::{lazuli::Lazuli, mount::tar_of, registry::Registry};

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

fn skopeo(arguments: &[&str]) -> Vec<u8> {
    let output = Command::new("skopeo").args(arguments).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

#[test]
fn one_tag_is_both_images() {
    if !require(Feature::Program("skopeo")) {
        return;
    }
    let lazuli = Lazuli::new();
    let registry = Registry::start();
    let tars = [tar_of("base", &odd::random(1, 3_000_000)), tar_of("app", &odd::random(2, 5000))];
    let image = Image::new(tars.map(|tar| Layer::new(tar, Compression::Gzip)));
    image.write_layout(&lazuli.path("source"), "x").unwrap();
    let both = registry.image("app:both");
    lazuli.ok(["convert", "oci:source:x", &both, "--keep-oci"]);

    let name = format!("docker://{both}");
    let raw = |name: &str| skopeo(&["inspect", "--tls-verify=false", "--raw", name]);
    let index = json(&String::from_utf8(raw(&name)).unwrap());
    let [ordinary, lazy] = &index["manifests"].as_array().unwrap()[..] else { panic!("{index:#}") };
    assert_eq!(ordinary["platform"].get("os.features"), None);
    assert_eq!(lazy["platform"]["os.features"][0], "nydus.remoteimage.v1");

    // Lazuli takes the lazy one, others the ordinary one as it was.
    let inspected = json(&lazuli.ok(["inspect", &both, "--json"]));
    assert_eq!(inspected["manifest_digest"], lazy["digest"]);
    lazuli.ok(["check", &both, "--against", "oci:source:x"]);
    let copied = format!("oci:{}:x", lazuli.path("copied").display());
    skopeo(&["copy", "--quiet", "--src-tls-verify=false", &name, &copied]);
    let source = raw(&format!("oci:{}:x", lazuli.path("source").display()));
    assert_eq!(raw(&copied), source);

    // The ordinary image is converted again, and nothing is stored twice.
    let again = lazuli.ok(["convert", &both, &registry.image("app:both"), "--keep-oci"]);
    assert!(again.contains("uploaded 0 B"), "{again}");
    assert_eq!(json(&lazuli.ok(["inspect", &both, "--json"]))["manifest_digest"], lazy["digest"]);

    // In a layout directory, too, and from one place to the other.
    lazuli.ok(["convert", "oci:source:x", "oci:layout:both", "--keep-oci"]);
    lazuli.ok(["check", "oci:layout:both", "--against", "oci:layout:both"]);
    lazuli.ok(["copy", "oci:layout:both", &registry.image("other:both")]);
    lazuli.ok(["check", &registry.image("other:both"), "--against", "oci:source:x"]);
    let error = lazuli.fails(["optimize", &both]);
    assert!(error.contains("say TARGET"), "{error}");
    let error = lazuli.fails(["convert", "dir:source", &both, "--keep-oci"]);
    assert!(error.contains("--keep-oci keeps an image of a registry"), "{error}");
}
