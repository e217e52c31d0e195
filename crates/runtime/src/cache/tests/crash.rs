//! Crashes, simulated on the files: unsynced data is lost in part, or has arrived.

use std::{collections::BTreeSet, fs};

use super::*;

/// A step between two crashes.
#[derive(Clone, Debug)]
enum Step {
    /// Bring these chunks in (as fractions of all).
    Ensure(f64, f64),
    Flush,
}

/// The part that goes down.
#[derive(Clone, Copy, Debug)]
enum Crash {
    /// The process: everything that it wrote stays.
    Process,
    /// The kernel. The chunks whose bits are set lose the bytes written since the last flush; the
    /// map of this boot may still be on the disk.
    Power(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let ensure = (0_f64..1.0, 0_f64..1.0).prop_map(|(from, to)| Step::Ensure(from, to));
    prop::collection::vec(prop_oneof![3 => ensure, 1 => Just(Step::Flush)], 1..8)
}

fn crashes() -> impl Strategy<Value = Crash> {
    prop_oneof![Just(Crash::Process), any::<u64>().prop_map(Crash::Power)]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    /// No chunk counts as ready whose bytes are not in the cache.
    #[test]
    fn ready_is_true_after_every_crash(
        lives in prop::collection::vec((steps(), crashes()), 1..5),
        chunks in 1_usize..64,
    ) {
        let sample = Sample::new(&vec![5000; chunks]);
        let dir = tempfile::tempdir().unwrap();
        let mut boot = 0;
        let mut flushed: BTreeSet<usize> = BTreeSet::new();
        for (steps, crash) in lives {
            let (path, ready) = live(dir.path(), &boot.to_string(), &sample, async |node| {
                assert!(ready(node).is_superset(&flushed), "what was flushed survives");
                for step in steps {
                    match step {
                        Step::Ensure(from, to) => {
                            let at = |part: f64| (part * chunks as f64) as usize;
                            node.ensure(at(from.min(to))..at(from.max(to)) + 1).await.unwrap();
                        }
                        Step::Flush => {
                            flushed = ready(node);
                            node.blob.flush().unwrap();
                        }
                    }
                }
                let ready = ready(node);
                if ready.len() == chunks {
                    // A full blob is flushed without being told to.
                    node.blob.completed().await;
                    flushed = ready.clone();
                }
                (node.blob.path(), ready)
            });
            if let Crash::Power(lost) = crash {
                boot += 1;
                let file = fs::File::options().write(true).open(path).unwrap();
                for at in ready.difference(&flushed).filter(|at| lost & (1 << *at) != 0) {
                    file.write_all_at(&[0; 5000], sample.blob.chunks[*at].decoded.0).unwrap();
                }
            }
        }
        live(dir.path(), &boot.to_string(), &sample, async |node| {
            ready(node);
            node.ensure(0..chunks).await.unwrap();
        });
    }
}

/// The chunks in the maps, each compared with its expected bytes. (Most are suspect until they have
/// been read back; here the maps must be right by themselves.)
fn ready(node: &Node) -> BTreeSet<usize> {
    let chunk = |at: usize| node.sample.chunks(at..at + 1);
    let is_ready = |at: &usize| node.blob.has(*at);
    let ready: BTreeSet<usize> = (0..node.sample.blob.chunks.len()).filter(is_ready).collect();
    for at in &ready {
        assert!(node.sample.is_right(&node.blob, &chunk(*at)), "chunk {at} is ready and wrong");
    }
    ready
}

#[test]
fn a_map_of_another_boot_counts_for_nothing() {
    let sample = Sample::new(&[5000; 10]);
    let dir = tempfile::tempdir().unwrap();
    let lives = [("a", false, 0), ("a", false, 5), ("b", true, 0), ("c", false, 5)];
    for (boot, flush, expected) in lives {
        live(dir.path(), boot, &sample, async |node| {
            let stats = node.blob.stats();
            assert_eq!((stats.chunks_ready, stats.chunks_suspect), (0, expected), "boot {boot}");
            node.ensure(0..5).await.unwrap();
            if flush {
                node.blob.flush().unwrap();
            }
        });
    }
}
