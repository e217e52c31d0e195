//! A new binary takes over from the running one while readers run.

use super::{
    alone, report,
    round::{Round, under_load},
    soak,
};
use crate::drivers::able;

fn take_over(round: &Round) {
    let before = round.pids();
    round.lazuli.ok(["daemon", "--takeover"]);
    let after = round.pids();
    assert!(
        after.worker != before.worker && after.keeper != before.keeper,
        "{before:?} became {after:?}"
    );
}

#[test]
fn readers_notice_no_takeover_with_fanotify() {
    if !able("fanotify") {
        return;
    }
    let _alone = alone();
    let figures = under_load("fanotify", if soak() { 100 } else { 5 }, take_over);
    report("takeover-fanotify", &figures);
}

#[test]
fn readers_notice_no_takeover_with_loop() {
    if !able("loop") {
        return;
    }
    let _alone = alone();
    let figures = under_load("loop", if soak() { 100 } else { 5 }, take_over);
    report("takeover-loop", &figures);
}

#[test]
fn readers_notice_no_takeover_with_fuse() {
    if !able("fuse") {
        return;
    }
    let _alone = alone();
    let figures = under_load("fuse", if soak() { 100 } else { 5 }, take_over);
    report("takeover-fuse", &figures);
}
