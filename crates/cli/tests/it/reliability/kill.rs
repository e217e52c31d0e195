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

#[test]
fn readers_wait_for_the_next_worker_with_fanotify() {
    if !able("fanotify") {
        return;
    }
    let _alone = alone();
    let figures = under_load("fanotify", if soak() { 1000 } else { 20 }, kill_worker);
    report("kill-worker-fanotify", &figures);
}

#[test]
fn readers_wait_for_the_next_worker_with_fuse() {
    if !able("fuse") {
        return;
    }
    let _alone = alone();
    let figures = under_load("fuse", if soak() { 200 } else { 5 }, kill_worker);
    report("kill-worker-fuse", &figures);
}

#[test]
fn readers_wait_for_the_next_worker_with_loop() {
    if !able("loop") {
        return;
    }
    let _alone = alone();
    let figures = under_load("loop", if soak() { 200 } else { 5 }, kill_worker);
    report("kill-worker-loop", &figures);
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
