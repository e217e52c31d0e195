//! `kill -9` of keeper and worker together.

use lazuli_testkit::reading::{Access, now};
use serde_json::{Value, json};

use super::{
    able, alone,
    processes::kill,
    readers::Seen,
    report,
    round::{Blow, Round, figures, pause},
    soak,
};

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
            let back = now();
            blows.push(Blow { at, back });
            pause(blows.len());
            let seen = readers.stop();
            // Who lived through it reads right bytes again as well, also where wrong ones were mapped.
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
    // Readers were started anew after each blow, so none of them waited for it.
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
