//! Data shared between nodes, and the registry's remaining load.

use std::{
    collections::BTreeMap,
    thread,
    time::{Duration, Instant},
};

use lazuli_testkit::{
    dragonfly::{Fault, Stats},
    registry,
};
use serde_json::Value;

use super::scene::{FETCH, FILES, Image, Node, QUIET};
use crate::{
    drivers::able,
    prefetch::{LEARN, forget, mounting, teach_reading, wait},
};

fn read_all(node: &Node) {
    (0..FILES).for_each(|number| node.read(number));
}

/// Nodes without anything that fetches by itself, which have mounted the image.
fn nodes<const N: usize>(image: &Image) -> [Node; N] {
    [(); N].map(|()| {
        let node = image.node(&format!("{FETCH}{QUIET}"), false);
        image.mount(&node);
        node
    })
}

/// No more came from the registry than a tenth beside the data.
#[track_caller]
fn served_once(image: &Image) {
    let bytes = image.registry.stats().bytes;
    let most = image.size() + image.size() / 10;
    assert!((image.size()..=most).contains(&bytes), "{bytes} of {}", image.size());
    assert_eq!(image.registry.violations(), [""; 0]);
}

#[test]
fn the_second_node_has_everything_from_the_first() {
    if !able("fanotify") {
        return;
    }
    let image = Image::new();
    let [first, second] = nodes(&image);
    read_all(&first);
    served_once(&image);
    let asked = image.registry.stats().requests;
    read_all(&second);
    served_once(&image);
    let Stats { served, asked_origin, from_peers, .. } = second.daemon.stats();
    assert!(served >= image.size() && from_peers >= image.size(), "{served}, {from_peers}");
    // How big each blob is.
    assert_eq!((asked_origin, image.registry.stats().requests), (2, asked + 2));
}

#[test]
fn nodes_that_start_together_have_everything_from_each_other() {
    if !able("fanotify") {
        return;
    }
    let image = Image::new();
    let nodes: [Node; 2] = nodes(&image);
    thread::scope(|scope| nodes.iter().for_each(|node| drop(scope.spawn(|| read_all(node)))));
    served_once(&image);
    let from_peers: u64 = nodes.iter().map(|node| node.daemon.stats().from_peers).sum();
    assert!(from_peers >= image.size() * 9 / 10, "{from_peers}");
}

#[test]
fn wrong_bytes_of_a_peer_are_found() {
    if !able("fanotify") {
        return;
    }
    let image = Image::new();
    let [corrupting, node] = nodes(&image);
    corrupting.read(1);
    corrupting.daemon.set(Fault::WrongBytes);
    image.registry.reset_stats();
    node.read(1);
    assert!(node.daemon.stats().from_peers > 0);
    // The node has no other name for it than that of its own daemon.
    let log = node.lazuli.log();
    let named = format!("dragonfly at {}", node.daemon.proxy());
    let said = |line: &&str| line.contains("wrong bytes") && line.contains(&named);
    assert!(log.lines().any(|line| said(&line)), "{log}");
    let again = image.registry.log();
    let asked_origin = node.daemon.stats().asked_origin as usize;
    assert_eq!(again.len(), asked_origin + 1, "{again:#?}");
    // It has much that is right.
    assert!(node.returns(2..FILES / 2) < 10.0);
}

#[test]
fn the_rest_of_an_image_is_announced_once_for_each_blob() {
    if !able("fanotify") {
        return;
    }
    let image = Image::new();
    let rest = "[prefetch]\nahead = \"nothing\"\nrest_bytes_per_second = 100000000\n";
    let node = image.node(&format!("{FETCH}{rest}"), false);
    image.mount(&node);
    wait("everything", || node.chunks_ready() == FILES as u64);
    (0..FILES).for_each(|number| node.read(number));
    let mut announced = BTreeMap::new();
    for logged in node.daemon.log() {
        if logged.headers.get("x-dragonfly-prefetch").is_some_and(|value| value == "true") {
            *announced.entry(logged.target).or_insert(0) += 1;
        }
    }
    assert_eq!(announced.values().collect::<Vec<_>>(), [&1, &1], "{announced:#?}");
    served_once(&image);
}

#[test]
fn hot_chunks_through_dragonfly_do_not_wait_for_the_metadata() {
    if !able("fanotify") {
        return;
    }
    let image = Image::new();
    let node = image.node(LEARN, false);
    let read = || (0..4).for_each(|number| node.read(number));
    teach_reading(&node.lazuli, &image.name, read);
    forget(&node.lazuli);
    let manifest = image.registry.manifest("app", "1").unwrap();
    let manifest: Value = serde_json::from_slice(&manifest).unwrap();
    let [hot, bootstrap] =
        [0, 2].map(|layer| manifest["layers"][layer]["digest"].as_str().unwrap());
    let late = registry::Fault::Latency(Duration::from_secs(4));
    image.registry.fault("GET", bootstrap, 1, late);
    image.registry.reset_stats();
    let begun = Instant::now();
    let mut mount = mounting(&node.lazuli, &image.name);
    // It is so little that the registry is asked for it, past the daemon.
    wait("what is hot", || image.registry.log().iter().any(|it| it.target.contains(hot)));
    assert!(begun.elapsed() < Duration::from_secs(3), "after {:?}", begun.elapsed());
    assert!(mount.wait().unwrap().success());
    assert!(begun.elapsed() > Duration::from_secs(4), "the bootstrap was not late");
    read();
}

#[test]
fn small_blobs_are_not_fetched_from_peers() {
    if !able("fanotify") {
        return;
    }
    let image = Image::of_files(1000);
    let [node] = nodes(&image);
    read_all(&node);
    assert_eq!(node.daemon.log(), []);
}

/// Ranges of blobs that the registry was asked for.
fn asked(image: &Image) -> Vec<u64> {
    let log = image.registry.log();
    let data = log.iter().filter(|logged| logged.target.contains("/blobs/"));
    data.filter_map(|logged| logged.bytes()).map(|it| it.end - it.start).collect()
}

#[test]
fn a_reader_asks_other_nodes_for_what_one_of_them_has() {
    if !able("fanotify") {
        return;
    }
    let image = Image::new();
    let [first, second] = [(); 2].map(|()| {
        let node = image.node_with_socket(&format!("{FETCH}{QUIET}"));
        image.mount(&node);
        node
    });
    let [peer] = nodes(&image);
    // No node has it. A machine that is too busy to ask ends up at the daemon.
    first.read(0);
    image.registry.reset_stats();
    first.daemon.reset_stats();
    first.read(1);
    let file = image.size() / FILES as u64;
    assert_eq!((asked(&image), first.daemon.log()), (vec![file], Vec::new()));
    // A node that does not ask has it fetched for all, in whole pieces.
    peer.read(2);
    image.registry.reset_stats();
    second.read(2);
    let Stats { served, from_peers, .. } = second.daemon.stats();
    assert!(served == file && from_peers >= file, "{served}, {from_peers}");
    // The size of the blob, which each daemon needs.
    assert!(asked(&image).iter().all(|bytes| *bytes == 1), "{:?}", asked(&image));
}

#[test]
fn bytes_come_through_the_socket_when_nothing_else_works() {
    if !able("fanotify") {
        return;
    }
    let image = Image::new();
    let node = image.node_with_socket(&format!("{FETCH}{QUIET}"));
    image.mount(&node);
    let [peer] = nodes(&image);
    read_all(&peer);
    image.registry.reset_stats();
    node.daemon.set(Fault::ProxyGone);
    read_all(&node);
    assert!(node.daemon.stats().from_peers >= image.size(), "{:?}", node.daemon.stats());
    assert!(asked(&image).iter().all(|bytes| *bytes == 1), "{:?}", asked(&image));
    assert_eq!(node.lazuli.path("links").read_dir().unwrap().count(), 0);
}
