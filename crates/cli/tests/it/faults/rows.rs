//! The faults, in the table's order: passing ones, those that end a read, slow ones, lies, outages,
//! mirrors.

use std::{os::unix::process::ExitStatusExt as _, process::Command, thread, time::Duration};

use lazuli_testkit::registry::Fault;

use super::{
    Case,
    scene::{Scene, Seen, content},
};
use crate::{drivers::able, reliability::soak};

/// Path of the data: the storage that the registry redirects to.
const DATA: &str = "/app/sha256:";
/// Until the fault is cleared.
const ALWAYS: usize = usize::MAX;
/// As long as any test.
const FOR_EVER: Duration = Duration::from_secs(3600);

fn arm(times: usize, fault: Fault) -> impl FnOnce(&Scene) {
    move |scene| scene.registry.fault("GET", DATA, times, fault)
}

/// Arms the first mirror with a fault.
fn arm_mirror(fault: Fault) -> impl FnOnce(&Scene) {
    move |scene| scene.mirrors[0].fault("GET", DATA, ALWAYS, fault)
}

fn clear(scene: &Scene) {
    scene.servers().for_each(|server| server.clear_faults());
}

#[test]
fn a_read_without_fault_takes_one_request() {
    Case::hidden("none", 1.0, 1).check(|_| {}, clear);
}

#[test]
fn a_reset_answer_is_requested_again() {
    // The remembered redirect is given up: registry, storage.
    Case::hidden("connection reset in mid-answer", 1.5, 3)
        .check(arm(1, Fault::ResetAfter(70_000)), clear);
}

#[test]
fn a_truncated_answer_is_requested_again() {
    Case::hidden("body truncated", 1.5, 3).check(arm(1, Fault::TruncateAfter(70_000)), clear);
}

#[test]
fn three_503_are_retried() {
    Case { requests: 7..=7, ..Case::hidden("503, three times", 3.0, 7) }
        .check(arm(3, Fault::Status(503)), clear);
}

#[test]
fn retry_after_of_429_is_waited_for() {
    let case = Case::hidden("429 with Retry-After: 2", 3.5, 3);
    Case { after: 2.0..=3.5, ..case }.check(arm(1, Fault::Busy(429, 2)), clear);
}

#[test]
fn retry_after_of_503_is_waited_for() {
    let case = Case::hidden("503 with Retry-After: 2", 3.5, 3);
    Case { after: 2.0..=3.5, ..case }.check(arm(1, Fault::Busy(503, 2)), clear);
}

#[test]
fn retry_after_beyond_the_deadline_is_an_error_at_once() {
    let case = Case::noticed("429 with Retry-After: 5, deadline 2 s", 1);
    Case { deadline: 2, recovers: 2.0..=6.5, ..case }.check(arm(1, Fault::Busy(429, 5)), clear);
}

#[test]
fn an_expired_token_is_renewed() {
    // The storage asks for a new redirect, the registry for a new token.
    Case::hidden("401: the token expired", 1.0, 5).check(
        |scene| {
            scene.registry.expire_tokens();
            scene.registry.expire_redirects();
        },
        clear,
    );
}

#[test]
fn an_expired_redirect_is_renewed() {
    Case::hidden("the redirect expired", 1.0, 3)
        .check(|scene| scene.registry.expire_redirects(), clear);
}

#[test]
fn a_404_is_a_final_error() {
    // The storage's 404 may mean that the redirect is old; the registry's is believed.
    // The kernel asks up to six times for one read.
    Case { requests: 2..=7, ..Case::noticed("404", 2) }
        .check(|scene| scene.registry.fault("GET", "sha256:", ALWAYS, Fault::Status(404)), clear);
}

#[test]
fn a_200_instead_of_206_is_retried() {
    // The kernel asks again by itself.
    Case::hidden("200 instead of 206, once", 1.0, 3).check(arm(1, Fault::IgnoreRange), clear);
}

#[test]
fn a_registry_without_ranges_is_an_error() {
    Case { requests: 1..=12, ..Case::noticed("200 instead of 206, always", 1) }
        .check(arm(ALWAYS, Fault::IgnoreRange), clear);
}

#[test]
fn a_wrong_content_range_is_retried() {
    Case::hidden("wrong Content-Range, once", 1.0, 3)
        .check(arm(1, Fault::WrongContentRange), clear);
}

#[test]
fn a_request_that_hangs_is_repeated() {
    let case = Case::hidden("one request hangs for ever", 6.5, 2);
    Case { after: 4.9..=6.5, ..case }.check(arm(1, Fault::Hang(FOR_EVER)), clear);
}

#[test]
fn hanging_requests_end_at_the_deadline() {
    let case = Case::noticed("every request hangs for ever, deadline 3 s", 1);
    Case { deadline: 3, after: 2.9..=4.0, recovers: 0.0..=1.5, ..case }
        .check(arm(ALWAYS, Fault::Hang(FOR_EVER)), clear);
}

#[test]
fn a_slow_answer_is_requested_again() {
    let case = Case::hidden("one answer drips, 100 bytes/s", 6.5, 2);
    let drip = Fault::Drip(Duration::from_millis(10));
    Case { after: 4.9..=6.5, ..case }.check(arm(1, drip), clear);
}

#[test]
fn slow_answers_end_at_the_deadline() {
    let case = Case::noticed("every answer drips, deadline 3 s", 1);
    let drip = Fault::Drip(Duration::from_millis(10));
    Case { deadline: 3, after: 2.9..=4.0, recovers: 0.0..=1.5, ..case }
        .check(arm(ALWAYS, drip), clear);
}

#[test]
fn wrong_bytes_are_fetched_again() {
    Case::hidden("wrong bytes, once", 1.0, 2).check(arm(1, Fault::WrongBytes), clear);
}

#[test]
fn wrong_bytes_from_every_source_are_an_error() {
    Case { requests: 2..=12, ..Case::noticed("wrong bytes, always", 2) }
        .check(arm(ALWAYS, Fault::WrongBytes), clear);
}

/// A valid frame with the stored and the decoded size of a chunk, but other content: padded with a
/// frame that decoders skip.
fn forged(scene: &Scene) -> Vec<u8> {
    let (_, blob) = scene.blob();
    // The three chunks follow each other, each a zstd frame.
    let magic = zstd::zstd_safe::MAGICNUMBER.to_le_bytes();
    let starts: Vec<_> = (0..blob.len() - 4).filter(|at| blob[*at..*at + 4] == magic).collect();
    let size = (starts[2] - starts[1]) as u32;
    let mut forged = zstd::bulk::compress(&content(99), 19).unwrap();
    forged = match forged.len() as u32 + 8 <= size {
        true => forged,
        false => zstd::bulk::compress(&vec![99; content(99).len()], 19).unwrap(),
    };
    let rest = size - forged.len() as u32 - 8;
    forged.extend(0x184d_2a50_u32.to_le_bytes());
    forged.extend(rest.to_le_bytes());
    forged.resize(size as usize, 0);
    forged
}

#[test]
fn a_forged_chunk_is_fetched_again() {
    Case::hidden("forged chunk: valid data of other content, once", 1.0, 2)
        .check(|scene| arm(1, Fault::Instead(forged(scene)))(scene), clear);
}

#[test]
fn a_forged_chunk_from_every_source_is_an_error() {
    Case { requests: 2..=12, ..Case::noticed("forged chunk, always", 2) }.check(
        |scene| arm(ALWAYS, Fault::Instead(forged(scene)))(scene),
        |scene| {
            // It was decoded, and found out by its digest.
            assert!(scene.lazuli.log().contains("digest is"), "{}", scene.lazuli.log());
            clear(scene);
        },
    );
}

#[test]
fn a_read_outlasts_an_absent_registry() {
    let case = Case::hidden("registry and storage gone for 4 s", 9.0, 2);
    Case { lasts: Some(4.0), after: 4.0..=9.0, recovers: 0.0..=5.0, requests: 2..=3, ..case }
        .check(|scene| scene.registry.go_away(), |scene| scene.registry.come_back());
}

#[test]
fn an_absent_registry_is_an_error_at_the_deadline() {
    let case = Case::noticed("registry and storage gone, deadline 2 s", 0);
    Case { deadline: 2, after: 1.9..=3.0, requests: 0..=1, recovers: 0.0..=1.5, ..case }
        .check(|scene| scene.registry.go_away(), |scene| scene.registry.come_back());
}

/// Ten minutes, with a deadline of fifteen.
#[test]
fn a_read_outlasts_ten_minutes_without_registry() {
    if !soak() {
        return;
    }
    let case = Case::hidden("registry and storage gone 10 min, deadline 15 min", 606.0, 2);
    Case {
        deadline: 900,
        lasts: Some(600.0),
        after: 600.0..=606.0,
        recovers: 0.0..=5.0,
        requests: 2..=3,
        ..case
    }
    .check(|scene| scene.registry.go_away(), |scene| scene.registry.come_back());
}

/// The fault is the first mirror's, the registry is healthy.
fn mirrored(fault: &'static str, within: f64, requests: u64) -> Case {
    Case { mirrors: 1, ..Case::hidden(fault, within, requests) }
}

#[test]
fn the_registry_replaces_an_absent_mirror() {
    // The registry has not been asked for data yet: 401, token, redirect, data.
    mirrored("mirror gone, registry well", 1.0, 4)
        .check(|scene| scene.mirrors[0].go_away(), |scene| scene.mirrors[0].come_back());
}

#[test]
fn the_registry_replaces_a_hanging_mirror() {
    let case = mirrored("mirror hangs, registry well", 2.0, 5);
    Case { after: 0.9..=2.0, requests: 5..=7, ..case }.check(
        arm_mirror(Fault::Hang(FOR_EVER)),
        |scene| {
            // It is not asked the second time.
            let before = scene.mirrors[0].stats().requests;
            assert_eq!(scene.read("third"), Seen::Right);
            assert_eq!(scene.mirrors[0].stats().requests, before);
            clear(scene);
        },
    );
}

#[test]
fn the_registry_replaces_a_slow_mirror() {
    let case = mirrored("mirror drips, registry well", 2.0, 5);
    let drip = Fault::Drip(Duration::from_millis(10));
    Case { after: 0.9..=2.0, requests: 5..=7, ..case }.check(arm_mirror(drip), clear);
}

#[test]
fn the_registry_replaces_a_mirror_with_wrong_bytes() {
    mirrored("mirror delivers wrong bytes, registry well", 1.0, 5)
        .check(arm_mirror(Fault::WrongBytes), clear);
}

#[test]
fn the_registry_replaces_a_mirror_with_a_forged_chunk() {
    mirrored("mirror delivers a forged chunk, registry well", 1.0, 5)
        .check(|scene| arm_mirror(Fault::Instead(forged(scene)))(scene), clear);
}

#[test]
fn the_registry_replaces_a_mirror_without_the_blob() {
    mirrored("mirror says 404, registry well", 1.0, 6)
        .check(|scene| scene.mirrors[0].fault("GET", "sha256:", ALWAYS, Fault::Status(404)), clear);
}

#[test]
fn the_registry_replaces_a_throttled_mirror() {
    mirrored("mirror says 429 with Retry-After: 60, registry well", 1.0, 5)
        .check(arm_mirror(Fault::Busy(429, 60)), clear);
}

#[test]
fn a_read_outlasts_a_reset_by_mirror_and_registry() {
    let case = mirrored("mirror and registry reset the first answer", 2.0, 8);
    Case { requests: 6..=9, ..case }.check(
        |scene| {
            for server in scene.servers() {
                server.fault("GET", DATA, 1, Fault::ResetAfter(70_000));
            }
        },
        clear,
    );
}

/// Manifest, configuration and bootstrap come from the registry if its mirror fails for any of
/// them.
#[test]
fn mounts_go_around_a_mirror() {
    if !able("fanotify") {
        return;
    }
    let faults = [
        ("/manifests/", Fault::Status(500)),
        (DATA, Fault::Status(404)),
        (DATA, Fault::WrongBytes),
        (DATA, Fault::TruncateAfter(10)),
    ];
    for (path, fault) in faults {
        let scene = Scene::prepare(20, 1);
        scene.mirrors[0].fault("GET", path, ALWAYS, fault);
        scene.mount();
        assert_eq!(scene.read("first"), Seen::Right);
        assert!(scene.mirrors[0].stats().requests > 0 && scene.registry.stats().requests > 0);
    }
}

/// A program that has mapped a file waits as a reader does, and gets a signal where that gets EIO.
#[test]
fn a_mapping_gets_a_signal() {
    if !able("fanotify") {
        return;
    }
    let scene = Scene::new(2, 0);
    let map = |name: &str| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "faults::mapping_reader", "--ignored"]);
        command.env("LAZULI_TEST_MAP", scene.path(name)).output().unwrap()
    };
    scene.registry.fault("GET", DATA, ALWAYS, Fault::WrongBytes);
    assert_eq!(map("second").status.signal(), Some(7), "SIGBUS");
    clear(&scene);
    scene.registry.go_away();
    let output = thread::scope(|scope| {
        let reader = scope.spawn(|| map("second"));
        thread::sleep(Duration::from_millis(700));
        scene.registry.come_back();
        reader.join().unwrap()
    });
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
