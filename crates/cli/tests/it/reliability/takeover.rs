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

fn readers_notice_no_takeover(driver: &str) {
    if !able(driver) {
        return;
    }
    let _alone = alone();
    let figures = under_load(driver, if soak() { 100 } else { 5 }, take_over);
    report(&format!("takeover-{driver}"), &figures);
}

#[test]
fn readers_notice_no_takeover_with_fanotify() {
    readers_notice_no_takeover("fanotify");
}

#[test]
fn readers_notice_no_takeover_with_loop() {
    readers_notice_no_takeover("loop");
}

#[test]
#[ignore = "needs a device mapper, see `make test-kernels`"]
fn readers_notice_no_takeover_with_ext4() {
    readers_notice_no_takeover("ext4");
}

#[test]
fn readers_notice_no_takeover_with_fuse() {
    readers_notice_no_takeover("fuse");
}
