//! Two nodes and a registry, each with a network namespace and an address of its own: one node's
//! lessons help the other.

use std::net::IpAddr;

use lazuli_testkit::{
    kernel::{Feature, require},
    network::{Network, Node},
    registry::{FakeRegistry, Logged, runs},
};
use serde_json::Value;

use crate::{
    lazuli::Lazuli,
    prefetch::{LEARN, fill, read, wait},
};

/// Files of the image; each is one chunk, and they lie one behind the other.
const FILES: usize = 100;

/// Decoded bytes of a file, which do not compress: all that is read fits into the first window of
/// 256 KiB.
const SIZE: usize = 30_000;

/// The reads of the start, in this order: three runs of neighbours, farther apart than a request
/// may bridge.
const READ: [usize; 8] = [71, 70, 10, 40, 72, 11, 42, 41];

const RUNS: usize = 3;

fn node(node: Node, config: &str) -> Lazuli {
    let lazuli = Lazuli::new().on(node);
    lazuli.configure_all(config);
    lazuli.directory("mnt");
    lazuli
}

fn mount(lazuli: &Lazuli, image: &str) {
    lazuli.ok(["mount", "--plain-http", image, lazuli.path("mnt").to_str().unwrap()]);
}

fn read_all(lazuli: &Lazuli) {
    READ.into_iter().for_each(|number| read(lazuli, number, SIZE));
}

/// `trace show --json`.
fn trace(lazuli: &Lazuli, image: &str) -> Value {
    let shown = lazuli.ok(["trace", "show", "--plain-http", "--json", image]);
    serde_json::from_str(&shown).unwrap()
}

/// Positions in the log of the requests whose target contains `part`.
fn about(log: &[Logged], part: &str) -> Vec<usize> {
    (0..log.len()).filter(|at| log[*at].target.contains(part)).collect()
}

/// The blob with the files' chunks: the biggest layer.
fn data_blob(registry: &FakeRegistry) -> String {
    let manifest: Value = serde_json::from_slice(&registry.manifest("app", "1").unwrap()).unwrap();
    let layers = manifest["layers"].as_array().unwrap();
    let biggest = layers.iter().max_by_key(|layer| layer["size"].as_u64()).unwrap();
    biggest["digest"].as_str().unwrap().to_owned()
}

#[test]
fn the_first_node_teaches_the_second() {
    teach(true);
}

#[test]
fn the_first_node_teaches_the_second_beside_a_registry_that_lists_no_referrers() {
    teach(false);
}

/// One node starts an image and publishes its trace, and another one starts it; the registry has
/// the API for referrers, or not.
fn teach(api: bool) {
    let able = require(Feature::Root)
        && require(Feature::Fanotify)
        && require(Feature::ErofsFileBacked)
        && require(Feature::Program("ip"));
    if !able {
        return;
    }
    let mut network = Network::enter().unwrap();
    let registry = FakeRegistry::start_at(network.address()).unwrap();
    if !api {
        registry.without_referrers();
    }
    let image = format!("{}/app:1", registry.host());
    let (one, two) = (network.join().unwrap(), network.join().unwrap());
    let (first_address, second_address) = (one.address(), two.address());

    let first = node(one, &format!("{LEARN}publish = true\n"));
    fill(&first.directory("source"), FILES, SIZE);
    first.ok(["convert", "--plain-http", "dir:source", &image]);
    registry.reset_stats();
    mount(&first, &image);
    read_all(&first);
    first.ok(["umount", first.path("mnt").to_str().unwrap()]);
    wait("publication", || first.log().contains("published its trace"));
    let published = registry.log();
    comes_from(&published, first_address);
    assert!(published.iter().any(|it| it.method == "PUT" && it.target.contains("/manifests/")));
    let learned = trace(&first, &image);

    registry.reset_stats();
    let second = node(two, LEARN);
    mount(&second, &image);
    let ready = || second.mount_status(&second.path("mnt"))["chunks_ready"].as_u64();
    wait("what the other node learned", || ready() == Some(READ.len() as u64));
    // Nothing has been read yet, and the node has the trace.
    assert_eq!(trace(&second, &image), learned);
    let log = registry.log();
    comes_from(&log, second_address);
    let (questions, data) = (about(&log, "/referrers/"), about(&log, &data_blob(&registry)));
    // Without the API the tag that stands for it is asked for.
    let answer = if api { questions.clone() } else { about(&log, "/manifests/sha256-") };
    assert!(questions.len() == 1 && answer.len() == 1, "{log:#?}");
    assert!(data.iter().all(|data| answer[0] < *data), "{log:#?}");
    let data: Vec<_> = data.into_iter().map(|at| log[at].clone()).collect();
    let runs = runs(&data);
    assert_eq!(runs.len(), RUNS, "{log:#?}");
    let bytes: u64 = runs.iter().map(|(_, run)| run.end - run.start).sum();
    assert_eq!(bytes, (READ.len() * SIZE) as u64, "{log:#?}");

    let before = registry.stats().requests;
    read_all(&second);
    assert_eq!(registry.stats().requests, before, "no reader had to wait");
    second.ok(["umount", second.path("mnt").to_str().unwrap()]);
    assert_eq!(registry.violations(), [""; 0]);
}

#[track_caller]
fn comes_from(log: &[Logged], address: IpAddr) {
    assert!(!log.is_empty() && log.iter().all(|request| request.peer == address), "{log:#?}");
}
