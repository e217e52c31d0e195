//! `kill -9` of keeper and worker together.

use lazuli_testkit::reading::{Access, Mode, now};
use serde_json::{Value, json};

use super::{
    alone,
    processes::kill,
    readers::{Readers, Seen},
    report,
    round::{Blow, Round, figures, load, pause},
    soak,
};
use crate::drivers::able;

/// No process holds the group any more, so the kernel lets waiting readers through: what they see
/// until the next daemon starts is counted, and later reads must be right.
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
            let back = now();
            blows.push(Blow { at, back });
            pause(blows.len());
            let seen = readers.stop();
            // A reader that lived through it reads right bytes again, also where wrong ones were
            // mapped.
            let late = seen.wrong.iter().filter(|(access, ..)| access.began > back);
            assert_eq!(late.collect::<Vec<_>>(), Vec::<&(Access, u64, u64)>::new());
            during.add(seen);
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
    // Readers were restarted after each blow, so none of them waited for it.
    figures["longest_read_ms"] = Value::Null;
    figures["longest_execve_ms"] = Value::Null;
    figures["in_the_window"] = json!({
        "accesses": during.accesses,
        "wrong_accesses": during.wrong.len(),
        "wrong_bytes": during.wrong_bytes(),
        "zero_bytes": during.wrong.iter().map(|(_, _, zeros)| zeros).sum::<u64>(),
        "errors": during.errors.len(),
    });
    report("kill-both-fanotify", &figures);
}

/// With loop devices, no reader is let through: reads in between get errors, and the same readers,
/// with the files that they have open, get right bytes after a daemon has started.
fn after_both_died_the_same_mounts_go_on(driver: &str) {
    if !able(driver) {
        return;
    }
    let _alone = alone();
    let count = if soak() { 20 } else { 3 };
    let (mut blows, mut all, mut failed, mut rounds) = (Vec::new(), Seen::default(), 0, 0);
    while blows.len() < count {
        let round = Round::new(driver);
        rounds += 1;
        while blows.len() < count && (blows.is_empty() || !round.is_warm()) {
            // A page fault that fails ends its program.
            let tasks = load(&round.mountpoint, blows.len() as u64 * 100).into_iter();
            let readers = Readers::start(tasks.filter(|task| task.mode == Mode::Read));
            pause(blows.len());
            let before = round.pids();
            let at = now();
            [before.keeper, before.worker].into_iter().for_each(kill);
            round.revive();
            round.wait_for(|pids| pids.worker != before.worker);
            let back = now();
            blows.push(Blow { at, back });
            pause(blows.len());
            let mut seen = readers.stop();
            let early = |access: &Option<Access>| access.as_ref().is_some_and(|a| a.began <= back);
            let errors = std::mem::take(&mut seen.errors);
            let (meanwhile, late): (Vec<_>, Vec<_>) =
                errors.into_iter().partition(|(access, _)| early(access));
            failed += meanwhile.len();
            seen.errors = late;
            seen.assert_clean();
            all.add(seen);
        }
        let everything = round.read_everything();
        everything.assert_clean();
        all.bytes += everything.bytes;
    }
    let mut figures = figures(driver, rounds, &blows, &all);
    figures["errors_in_the_window"] = failed.into();
    report(&format!("kill-both-{driver}"), &figures);
}

#[test]
fn after_both_died_the_same_mounts_go_on_with_loop() {
    after_both_died_the_same_mounts_go_on("loop");
}

#[test]
#[ignore = "needs a device mapper, see `make test-kernels`"]
fn after_both_died_the_same_mounts_go_on_with_ext4() {
    after_both_died_the_same_mounts_go_on("ext4");
}
