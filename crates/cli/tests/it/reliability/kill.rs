//! `kill -9` of the worker, of the keeper, while readers run.

use super::{
    alone,
    processes::kill,
    report,
    round::{Round, under_load},
    soak,
};
use crate::drivers::able;

/// Kills the worker and waits until another one answers.
fn kill_worker(round: &Round) {
    let before = round.pids();
    kill(before.worker);
    let after = round.wait_for(|pids| pids.worker != before.worker);
    assert_eq!(before.keeper, after.keeper, "the keeper has nothing to do with it");
}

/// Kills the worker `count` times, or `soaking` times.
fn readers_wait_for_the_next_worker(driver: &str, count: usize, soaking: usize) {
    if !able(driver) {
        return;
    }
    let _alone = alone();
    let figures = under_load(driver, if soak() { soaking } else { count }, kill_worker);
    report(&format!("kill-worker-{driver}"), &figures);
}

#[test]
fn readers_wait_for_the_next_worker_with_fanotify() {
    readers_wait_for_the_next_worker("fanotify", 20, 1000);
}

#[test]
fn readers_wait_for_the_next_worker_with_loop() {
    readers_wait_for_the_next_worker("loop", 5, 200);
}

#[test]
#[ignore = "needs a device mapper, see `make test-kernels`"]
fn readers_wait_for_the_next_worker_with_ext4() {
    readers_wait_for_the_next_worker("ext4", 5, 200);
}

#[test]
fn readers_wait_for_the_next_worker_with_fuse() {
    readers_wait_for_the_next_worker("fuse", 5, 200);
}

#[test]
fn readers_notice_no_death_of_the_keeper() {
    if !able("fanotify") {
        return;
    }
    let _alone = alone();
    let figures = under_load("fanotify", if soak() { 100 } else { 5 }, |round| {
        let before = round.pids();
        kill(before.keeper);
        round.wait_for(|pids| pids.keeper != before.keeper && pids.keeper != 0);
    });
    report("kill-keeper-fanotify", &figures);
}
