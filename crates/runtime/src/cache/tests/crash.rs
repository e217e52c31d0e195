//! Crashes, simulated on the files: what was not synced is lost in part, what was not synced may also have
//! arrived.

use std::{collections::BTreeSet, fs};

use super::*;

/// What a test does between two crashes.
#[derive(Clone, Debug)]
enum Step {
    /// Bring these chunks in (as fractions of all).
    Ensure(f64, f64),
    Flush,
}

/// What goes down.
#[derive(Clone, Copy, Debug)]
enum Crash {
    /// The process: everything that it wrote stays.
    Process,
    /// The kernel. Of the bytes written since the last flush, those chunks are lost whose bit is set here; the map of
    /// this boot may be on the disk all the same.
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

    /// Nothing that was said to be ready turns out not to be.
    #[test]
    fn ready_is_true_after_every_crash(
        lives in prop::collection::vec((steps(), crashes()), 1..5),
        chunks in 1_usize..64,
    ) {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.block_on(async {
            let sample = Sample::new(&vec![5000; chunks]);
            let dir = tempfile::tempdir().unwrap();
            let mut boot = 0;
            let mut flushed: BTreeSet<usize> = BTreeSet::new();
            for (steps, crash) in lives {
                let cache = Cache::open_in_boot(dir.path(), settings(0), boot.to_string()).unwrap();
                let blob = cache.blob(&sample.blob, sample.source([])).unwrap();
                let ready = check(&sample, &blob);
                assert!(ready.is_superset(&flushed), "what was flushed survives");
                let before = ready.len();
                for step in steps {
                    match step {
                        Step::Ensure(from, to) => {
                            let at = |part: f64| (part * chunks as f64) as usize;
                            let (from, to) = (at(from.min(to)), at(from.max(to)) + 1);
                            blob.ensure(sample.chunks(from..to)).await.unwrap();
                        }
                        Step::Flush => {
                            blob.flush().unwrap();
                            flushed = check(&sample, &blob);
                        }
                    }
                }
                let ready = check(&sample, &blob);
                assert!(ready.len() >= before);
                let path = blob.path();
                let weak = Arc::downgrade(&blob);
                // A full blob is flushed by itself, which would be a use of the files after the crash.
                let complete = ready.len() == chunks;
                if complete {
                    blob.completed().await;
                    flushed = ready.clone();
                }
                drop((blob, cache));
                while weak.strong_count() > 0 && complete {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                if let Crash::Power(lost) = crash {
                    boot += 1;
                    let file = fs::File::options().write(true).open(path).unwrap();
                    for at in ready.difference(&flushed).filter(|at| lost & (1 << *at) != 0) {
                        let start = sample.blob.chunks[*at].decoded.0;
                        file.write_all_at(&[0; 5000], start).unwrap();
                    }
                }
            }
            let cache = Cache::open_in_boot(dir.path(), settings(0), boot.to_string()).unwrap();
            let blob = cache.blob(&sample.blob, sample.source([])).unwrap();
            check(&sample, &blob);
            blob.ensure(sample.all()).await.unwrap();
            assert!(sample.is_right(&blob, &sample.all()));
        });
    }
}

/// The chunks that are said to be ready, each compared with what it must be.
fn check(sample: &Sample, blob: &CachedBlob) -> BTreeSet<usize> {
    let is_ready = |at: &usize| blob.is_ready(&sample.chunks(*at..*at + 1));
    let ready: BTreeSet<usize> = (0..sample.blob.chunks.len()).filter(is_ready).collect();
    for at in &ready {
        assert!(sample.is_right(blob, &sample.chunks(*at..*at + 1)), "chunk {at} is ready and wrong");
    }
    ready
}

#[tokio::test]
async fn a_map_of_another_boot_counts_for_nothing() {
    let sample = Sample::new(&[5000; 10]);
    let dir = tempfile::tempdir().unwrap();
    for (boot, flush, expected) in [("a", false, 0), ("a", false, 5), ("b", true, 0), ("c", true, 5)] {
        let cache = Cache::open_in_boot(dir.path(), settings(0), boot.to_owned()).unwrap();
        let blob = cache.blob(&sample.blob, sample.source([])).unwrap();
        assert_eq!(blob.stats().chunks_ready, expected, "boot {boot}");
        blob.ensure(sample.chunks(0..5)).await.unwrap();
        if flush {
            blob.flush().unwrap();
        }
    }
}
