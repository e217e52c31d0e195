//! Images of RAFS v5, which upstream made before 2.2.

use std::{fs, path::Path};

use lazuli_testkit::{
    kernel::{Feature, require},
    listing,
    oci::Compression,
    odd,
};
use serde_json::Value;

use crate::{lazuli::Lazuli, reliability::forge::Forge};

/// Converts an odd tree to `oci:v5:latest`, and leaves `oci:v6:latest` with the same data.
fn image(lazuli: &Lazuli) {
    let source = lazuli.path("source");
    odd::image().compressed_with(Compression::Gzip).write_layout(&source, "odd").unwrap();
    for layout in ["v6", "v5"] {
        lazuli.ok(["convert", "oci:source:odd", &format!("oci:{layout}:latest")]);
    }
    Forge::new(lazuli.path("v5")).make_v5();
}

fn mount(lazuli: &Lazuli, version: &str, driver: &str) -> std::path::PathBuf {
    let mountpoint = lazuli.directory(&format!("{version}-{driver}"));
    let image = format!("oci:{version}:latest");
    lazuli.ok(["mount", &image, mountpoint.to_str().unwrap(), "--driver", driver]);
    mountpoint
}

#[test]
fn both_drivers_show_what_v6_shows() {
    if !require(Feature::Root) || !require(Feature::Fanotify) || !require(Feature::Fuse) {
        return;
    }
    let lazuli = Lazuli::new();
    image(&lazuli);
    let expected = mount(&lazuli, "v6", "fuse");
    for driver in ["fanotify", "fuse"] {
        let mountpoint = mount(&lazuli, "v5", driver);
        let status = lazuli.mount_status(&mountpoint);
        assert_eq!(status["driver"], driver, "{status:#}");
        if driver == "fanotify" {
            assert_eq!(status["chunks_ready"], 0, "{status:#}");
        }
        listing::assert_equal(expected.clone(), mountpoint);
    }
}

#[test]
fn a_v5_image_is_inspected_checked_and_fetched_but_not_optimized() {
    let lazuli = Lazuli::new();
    image(&lazuli);
    let inspected = |image: &str| -> Value {
        serde_json::from_str(&lazuli.ok(["inspect", image, "--json"])).unwrap()
    };
    let (old, new) = (inspected("oci:v5:latest"), inspected("oci:v6:latest"));
    assert_eq!((&old["rafs_version"], &new["rafs_version"]), (&5.into(), &6.into()));
    assert_eq!(old["names"], new["names"]);
    assert!(lazuli.ok(["inspect", "oci:v5:latest"]).contains("RAFS v5"));
    let checked = lazuli.ok(["check", "oci:v5:latest", "--against", "oci:source:odd"]);
    assert!(checked.contains("RAFS v5") && checked.contains("shows the same tree"), "{checked}");
    lazuli.ok(["prefetch", "oci:v5:latest", "--wait"]);
    let error = lazuli.fails(["optimize", "oci:v5:latest", "oci:v5:hot"]);
    assert!(error.contains("is RAFS v5, which has no place for a hot blob"), "{error}");
}

/// Chunks are compared with the digests in the bootstrap, as those of v6 are.
#[test]
fn damaged_data_is_never_shown() {
    if !require(Feature::Root) || !require(Feature::Fuse) {
        return;
    }
    let lazuli = Lazuli::new();
    lazuli.configure("[fetch]\ndeadline_seconds = 1\n");
    fs::write(lazuli.directory("source").join("file"), odd::random(1, 50_000)).unwrap();
    lazuli.ok(["convert", "dir:source", "oci:v5:latest"]);
    let forge = Forge::new(lazuli.path("v5"));
    forge.make_v5();
    let manifest: Value = serde_json::from_slice(&forge.manifest().1).unwrap();
    forge.replace(manifest["layers"][0]["digest"].as_str().unwrap(), |blob| blob[20_000] ^= 1);
    assert!(lazuli.fails(["check", "oci:v5:latest"]).contains("digest"));
    let file = mount(&lazuli, "v5", "fuse").join("file");
    let read = |path: &Path| fs::read(path).map(|content| content.len());
    assert_eq!(read(&file).unwrap_err().raw_os_error(), Some(5));
}
