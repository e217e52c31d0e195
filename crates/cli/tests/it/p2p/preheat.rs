//! Images that Dragonfly brings before their first start.

use lazuli_testkit::registry::Fault;

use super::scene::{FETCH, FILES, Image, QUIET};
use crate::{drivers::able, prefetch::wait};

/// As at Docker Hub: Dragonfly is shown the token that was got for the manifest.
#[test]
fn preheat_brings_all_of_an_image_to_dragonfly() {
    let image = Image::new();
    let node = image.node(&format!("{FETCH}{QUIET}"), false);
    image.require_token(&node);
    let said = node.lazuli.ok(["preheat", &image.name]);
    assert!(said.contains("are with Dragonfly"), "{said}");
    let stats = node.daemon.stats();
    assert!(stats.from_origin >= image.size(), "{stats:?}");
    // A token that is not good any more.
    image.registry.reset_stats();
    image.registry.fault("GET", "/blobs/", 1, Fault::Status(401));
    let other = image.node(&format!("{FETCH}{QUIET}"), false);
    image.require_token(&other);
    other.lazuli.ok(["preheat", &image.name]);
    let stats = other.daemon.stats();
    assert!(stats.from_peers >= image.size(), "{stats:?}");
    assert!(image.registry.stats().bytes < image.size() / 10);
    assert_eq!(image.registry.violations(), [""; 0]);
}

#[test]
fn preheat_hot_fetches_the_chunks_of_starts() {
    if !able("fanotify") {
        return;
    }
    let image = Image::new();
    let node = image.node(&format!("{FETCH}[prefetch]\nrest_bytes_per_second = 0\n"), false);
    image.require_token(&node);
    let error = node.lazuli.fails(["preheat", "--hot", &image.name]);
    assert!(error.contains("was recorded"), "{error}");
    image.mount(&node);
    [3, 30].into_iter().for_each(|number| node.read(number));
    node.lazuli.ok(["umount", node.mountpoint().to_str().unwrap()]);
    let traces = node.lazuli.root().join("traces");
    wait("a trace", || traces.read_dir().is_ok_and(|mut found| found.next().is_some()));
    node.daemon.reset_stats();
    node.lazuli.ok(["preheat", "--hot", &image.name]);
    let (served, file) = (node.daemon.stats().served, image.size() / FILES as u64);
    assert!((2 * file..6 * file).contains(&served), "{served}");
}

#[test]
fn preheat_is_refused_without_dragonfly_or_registry() {
    let image = Image::new();
    let node = image.node(QUIET, false);
    let error = node.lazuli.fails(["preheat", "oci:source:x"]);
    assert!(error.contains("is not in a registry"), "{error}");
    node.lazuli.configure_all(QUIET);
    let error = node.lazuli.fails(["preheat", &image.name]);
    assert!(error.contains("no [p2p] table"), "{error}");
}
