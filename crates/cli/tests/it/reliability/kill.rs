//! `kill -9` of the worker, of the keeper, and of both, while readers run.

use lazuli_testkit::reading::now;
use serde_json::json;

use super::{
    able, alone,
    processes::kill,
    readers::Seen,
    report,
    round::{Blow, Round, figures, pause, under_load},
    soak,
};

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
fn nobody_notices_the_keepers_death() {
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

/// Nobody holds the group any more, so the kernel lets waiting readers through: what they see until the next
/// daemon is there is counted, what later ones see has to be right.
#[test]
fn after_both_died_nothing_wrong_is_left() {
    if !able("fanotify") {
        return;
    }
    let _alone = alone();
    let count = if soak() { 100 } else { 5 };
    let (mut blows, mut during, mut after, mut rounds) =
        (Vec::new(), Seen::default(), Seen::default(), 0);
    while blows.len() < count {
        let round = Round::new("fanotify");
        rounds += 1;
        while blows.len() < count && (blows.is_empty() || !round.is_warm()) {
            let readers = round.readers(blows.len() as u64 * 100);
            pause(blows.len());
            let before = round.pids();
            let at = now();
            let order = if blows.len() % 2 == 0 {
                [before.keeper, before.worker]
            } else {
                [before.worker, before.keeper]
            };
            order.into_iter().filter(|pid| *pid != 0).for_each(kill);
            round.revive();
            round.wait_for(|pids| pids.worker != before.worker);
            blows.push(Blow { at, back: now() });
            during.add(readers.stop());
            let readers = round.readers(blows.len() as u64 * 100 + 50);
            pause(blows.len());
            let seen = readers.stop();
            seen.assert_clean();
            after.add(seen);
        }
        let all = round.read_everything();
        all.assert_clean();
        after.bytes += all.bytes;
    }
    let mut figures = figures("fanotify", rounds, &blows, &after);
    let first = |when: &dyn Fn(u64) -> bool| {
        let wrong = during.wrong.iter().filter(|(access, ..)| when(access.began));
        wrong.map(|(_, bytes, _)| bytes).sum::<u64>()
    };
    let inside =
        |began: u64| blows.iter().any(|blow| began < blow.back && began + 1_000_000 > blow.at);
    figures["in_the_window"] = json!({
        "accesses": during.accesses,
        "wrong_accesses": during.wrong.len(),
        "wrong_bytes": during.wrong_bytes(),
        "zero_bytes": during.wrong.iter().map(|(_, _, zeros)| zeros).sum::<u64>(),
        "wrong_bytes_of_later_reads": first(&|began| !inside(began)),
        "errors": during.errors.len(),
    });
    report("kill-both-fanotify", &figures);
}
