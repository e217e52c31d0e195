//! Readers' results when the daemon of their node fails. Every test is a row of the table in
//! docs/measurements/p2p.md. With `LAZULI_RESULTS=DIR` the rows are written to
//! `DIR/p2p-faults.json`.

use std::{panic::Location, thread, time::Instant};

use lazuli_testkit::dragonfly::Fault;
use serde_json::{Value, json};

use super::scene::{FETCH, FILES, Image, Node, QUIET};
use crate::{
    drivers::able,
    prefetch::wait,
    reliability::{report_row, round_seconds},
};

/// Seconds that a busy machine may add: fewer than lie between detecting a hanging daemon and
/// waiting for it.
const SLACK: f64 = 1.0;

/// Seconds within which a daemon is asked again that is well. It rests for up to a second and a
/// half after a failure, and for up to three after another.
const RESTS: f64 = 5.0;

/// When something happens to the daemon.
#[derive(Clone, Copy, PartialEq, Eq)]
enum When {
    /// Before the image is mounted.
    AtStart,
    /// Between two reads.
    Later,
    /// It holds the requested data.
    InFlight,
}

/// A fault of a node's daemon, with its expected effects.
struct Case {
    /// As the table calls it.
    name: &'static str,
    fault: Fault,
    when: When,
    /// Seconds that the reader waits, at least and at most.
    waits: (f64, f64),
    /// Whether the data comes from the registry instead.
    is_replaced: bool,
}

impl Case {
    /// A fault that costs next to nothing.
    fn cheap(name: &'static str, fault: Fault, when: When) -> Self {
        Case { name, fault, when, waits: (0.0, 1.0), is_replaced: true }
    }

    /// Makes it happen while a reader reads, ends it, and looks at everything.
    #[track_caller]
    fn check(self) {
        let (name, line) = (self.name, Location::caller().line());
        if !able("fanotify") {
            return;
        }
        let image = Image::new();
        let node = image.node(&format!("{FETCH}{QUIET}"), false);
        if self.when == When::AtStart {
            node.daemon.set(self.fault);
        }
        image.mount(&node);
        if self.when != When::AtStart {
            node.read(0);
            assert!(node.daemon.stats().served > 0, "{name}: it is not asked");
            let is_later = self.when == When::Later;
            // Until then it has the request and does nothing.
            node.daemon.set(if is_later { self.fault } else { Fault::Stuck });
        }
        let before = (node.daemon.stats().requests, directly(&image, &node));
        let after = thread::scope(|scope| {
            let reader = scope.spawn(|| timed(&node, 1));
            if self.when == When::InFlight {
                wait("the reader's request", || node.daemon.stats().requests > before.0);
                node.daemon.set(self.fault);
            }
            reader.join().unwrap()
        });
        let next = timed(&node, 2);
        let directly = directly(&image, &node) - before.1;
        node.daemon.heal();
        let again = node.returns(3..FILES / 2);
        let row = row(name, after, Some(next), directly, Some(again));
        let problem = format!("{row:#}");
        assert!((self.waits.0..=self.waits.1 + SLACK).contains(&after), "{problem}");
        // A daemon that has failed is not waited for a second time.
        assert!(next <= 1.0 + SLACK, "{problem}");
        assert_eq!(directly > 0, self.is_replaced, "{problem}");
        assert!(again <= RESTS + SLACK, "{problem}");
        assert_eq!(image.registry.violations(), [""; 0], "{problem}");
        report_row("p2p-faults", line, row);
    }
}

/// Reads a file, checks its bytes, and returns the duration in seconds.
fn timed(node: &Node, number: usize) -> f64 {
    let started = Instant::now();
    node.read(number);
    started.elapsed().as_secs_f64()
}

/// Bytes of blobs that the registry sent to the node itself.
fn directly(image: &Image, node: &Node) -> u64 {
    let log = image.registry.log();
    let data = log.iter().filter(|logged| logged.target.contains("/blobs/"));
    let bytes: u64 = data.filter_map(|logged| logged.bytes()).map(|it| it.end - it.start).sum();
    bytes - node.daemon.stats().from_origin
}

fn row(name: &str, after: f64, next: Option<f64>, directly: u64, again: Option<f64>) -> Value {
    json!({
        "fault": name,
        "reader": "right bytes",
        "after_seconds": round_seconds(after),
        "next_after_seconds": next.map(round_seconds),
        "bytes_from_registry": directly,
        "daemon_again_seconds": again.map(round_seconds),
    })
}

#[test]
fn a_mount_without_dfdaemon_uses_the_registry() {
    Case::cheap("daemon gone before the mount", Fault::Gone, When::AtStart).check();
}

#[test]
fn a_killed_dfdaemon_is_replaced_in_flight() {
    Case::cheap("daemon killed while it has the request", Fault::Gone, When::InFlight).check();
}

#[test]
fn a_mount_with_a_hanging_dfdaemon_uses_the_registry() {
    let case = Case::cheap("daemon hangs before the mount", Fault::Hung, When::AtStart);
    Case { waits: (0.3, 1.5), ..case }.check();
}

#[test]
fn a_hanging_dfdaemon_is_replaced_in_flight() {
    let case = Case::cheap("daemon hangs while it has the request", Fault::Hung, When::InFlight);
    Case { waits: (0.3, 1.5), ..case }.check();
}

#[test]
fn the_registry_replaces_a_peer_that_never_delivers() {
    let case = Case::cheap("daemon waits for a piece that never comes", Fault::Stuck, When::Later);
    Case { waits: (2.9, 4.5), ..case }.check();
}

#[test]
fn the_registry_replaces_a_dfdaemon_with_a_full_disk() {
    Case::cheap("disk of the daemon full", Fault::DiskFull, When::Later).check();
}

#[test]
fn the_registry_replaces_a_dfdaemon_with_wrong_bytes() {
    Case::cheap("daemon delivers wrong bytes", Fault::WrongBytes, When::Later).check();
}

#[test]
fn dfdaemon_delivers_without_scheduler() {
    let case = Case::cheap("scheduler gone", Fault::Alone, When::Later);
    Case { is_replaced: false, ..case }.check();
}

/// Not a fault, but nothing comes through the daemon, and it sees no credentials.
#[test]
fn dfdaemon_gets_no_credentials() {
    let line = line!();
    if !able("fanotify") {
        return;
    }
    let image = Image::new();
    image.require_login();
    let [untrusted, trusted] = [false, true].map(|credentials| {
        let node = image.node(&format!("{FETCH}{QUIET}"), credentials);
        image.mount(&node);
        node
    });
    let before = directly(&image, &untrusted);
    let (after, next) = (timed(&untrusted, 1), timed(&untrusted, 2));
    let directly_read = directly(&image, &untrusted) - before;
    let row = row(
        "registry wants a login, `credentials = false`",
        after,
        Some(next),
        directly_read,
        None,
    );
    assert!(after <= 1.0 + SLACK && next <= 1.0 + SLACK, "{row:#}");
    assert!(directly_read > 0, "{row:#}");
    let log = untrusted.daemon.log();
    assert!(log.iter().all(|logged| !logged.is_authorized()), "{log:#?}");
    assert_eq!(untrusted.daemon.stats().served, 0, "{row:#}");
    trusted.read(1);
    assert!(trusted.daemon.stats().served > 0);
    report_row("p2p-faults", line, row);
}

/// Neither the daemon nor the registry delivers: a reader has its answer when the operator's
/// deadline is over.
#[test]
fn a_read_without_any_server_fails_at_the_deadline() {
    if !able("fanotify") {
        return;
    }
    let image = Image::new();
    let fetch = FETCH.replace("= 20", "= 2");
    let node = image.node(&format!("{fetch}{QUIET}"), false);
    image.mount(&node);
    node.read(0);
    for (number, fault) in [Fault::Hung, Fault::Stuck].into_iter().enumerate() {
        node.daemon.set(fault);
        image.registry.go_away();
        let started = Instant::now();
        let error = node.try_read(10 + number).unwrap_err();
        let waited = started.elapsed().as_secs_f64();
        assert_eq!(error.raw_os_error(), Some(5), "{fault:?}: {error}");
        assert!((1.9..=3.0 + SLACK).contains(&waited), "{fault:?}: {waited}");
        image.registry.come_back();
        node.daemon.heal();
        wait("right bytes", || node.try_read(10 + number).is_ok());
    }
}
