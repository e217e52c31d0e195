//! Changes of the data file by other programs are found before any reader gets them.

use std::{fs::File, time::SystemTime};

use super::*;

const CHUNK: usize = 5000;

/// Changes bytes like a program that ignores the cache.
fn scribble(path: &Path, at: u64) {
    let file = File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[!byte[0]], at).unwrap();
}

/// The same by a program that hides it.
fn scribble_and_turn_back_time(path: &Path, at: u64) {
    let before = fs::metadata(path).unwrap();
    scribble(path, at);
    let file = File::options().write(true).open(path).unwrap();
    file.set_modified(before.modified().unwrap_or(SystemTime::now())).unwrap();
}

fn settle(node: &Node) {
    node.blob.flush().unwrap();
}

#[test]
fn sealed_chunks_need_no_check_at_the_next_start() {
    let dir = tempfile::tempdir().unwrap();
    let sample = Sample::new(&[CHUNK; 100]);
    live(dir.path(), "a", &sample, async |node| {
        node.ensure(0..50).await.unwrap();
        settle(node);
    });
    for _ in 0..2 {
        live(dir.path(), "a", &sample, async |node| {
            let stats = node.blob.stats();
            assert_eq!((stats.chunks_ready, stats.chunks_suspect), (50, 0));
            node.ensure(0..50).await.unwrap();
            assert_eq!(node.blob.stats().chunks_checked, 0);
            node.cache.flush();
        });
    }
}

#[test]
fn after_a_kill_everything_is_read_back_and_nothing_is_fetched() {
    let dir = tempfile::tempdir().unwrap();
    let sample = Sample::new(&[CHUNK; 100]);
    live(dir.path(), "a", &sample, async |node| {
        node.ensure(0..30).await.unwrap();
        settle(node);
        node.ensure(30..50).await.unwrap();
    });
    // Twice: suspect chunks stay known when the next process is killed too.
    for _ in 0..2 {
        live(dir.path(), "a", &sample, async |node| {
            let stats = node.blob.stats();
            assert_eq!((stats.chunks_ready, stats.chunks_suspect), (0, 50));
            assert!(!node.blob.is_ready(&sample.chunks(3..4)));
            node.ensure(3..4).await.unwrap();
            assert_eq!(node.blob.stats().chunks_checked, 1, "just what was asked for");
        });
    }
    live(dir.path(), "a", &sample, async |node| {
        node.ensure(0..50).await.unwrap();
        assert_eq!(node.source.reads(), 0);
        assert_eq!(node.blob.stats().chunks_suspect, 0);
        settle(node);
    });
    live(dir.path(), "a", &sample, async |node| {
        assert_eq!(node.blob.stats().chunks_ready, 50, "sealed again");
    });
}

#[test]
fn many_readers_of_a_suspect_chunk_check_it_once() {
    let dir = tempfile::tempdir().unwrap();
    let sample = Sample::new(&[1 << 20; 3]);
    live(dir.path(), "a", &sample, async |node| node.ensure(0..2).await.unwrap());
    live(dir.path(), "a", &sample, async |node| {
        let reads = (0..100).map(|_| node.ensure(0..2));
        join_all(reads).await.into_iter().collect::<Result<Vec<_>, _>>().unwrap();
        assert_eq!((node.blob.stats().chunks_checked, node.source.reads()), (2, 0));
    });
}

#[test]
fn change_between_two_processes_is_found_and_refetched() {
    type Change = fn(&Path, u64);
    let changes: [(&str, Change); 2] =
        [("changed", scribble), ("with an old mtime", scribble_and_turn_back_time)];
    // Chunk, place in the file: first byte, last byte, and the zeros behind it.
    let places = [(4, 4 * 8192), (4, 4 * 8192 + CHUNK as u64 - 1), (4, 4 * 8192 + CHUNK as u64)];
    for (what, change) in changes {
        for (chunk, place) in places {
            for flushed in [true, false] {
                let dir = tempfile::tempdir().unwrap();
                let sample = Sample::new(&[CHUNK; 20]);
                let path = live(dir.path(), "a", &sample, async |node| {
                    node.ensure(0..20).await.unwrap();
                    if flushed {
                        node.blob.completed().await;
                    }
                    node.blob.path()
                });
                change(&path, place);
                live(dir.path(), "a", &sample, async |node| {
                    assert!(!node.blob.is_complete(), "{what}");
                    assert_eq!(node.blob.stats().chunks_suspect, 20);
                    node.ensure(0..20).await.unwrap();
                    assert_eq!(node.blob.stats().chunks_wrong, 1, "{what} at {place}");
                    let chunk = &sample.blob.chunks[chunk];
                    let ranges = node.source.ranges();
                    assert_eq!(ranges, [chunk.stored..chunk.stored_end()], "{what} at {place}");
                    assert!(sample.is_right(&node.blob, &sample.all()), "{what} at {place}");
                    node.blob.completed().await;
                });
            }
        }
    }
}

#[test]
fn background_check_finds_damage_before_completion() {
    let dir = tempfile::tempdir().unwrap();
    let sample = Sample::new(&[CHUNK; 20]);
    let path = live(dir.path(), "a", &sample, async |node| {
        node.ensure(0..20).await.unwrap();
        node.blob.completed().await;
        node.blob.path()
    });
    scribble(&path, 7 * 8192);
    live(dir.path(), "a", &sample, async |node| {
        while node.blob.stats().chunks_checked < 20 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let stats = node.blob.stats();
        assert_eq!((stats.chunks_ready, stats.chunks_wrong, node.source.reads()), (19, 1, 0));
        assert!(!node.blob.is_complete());
        node.ensure(0..20).await.unwrap();
        node.blob.completed().await;
    });
}

#[tokio::test]
async fn change_by_another_process_is_found_at_the_next_write() {
    let node = Node::new(&[CHUNK; 20], 0);
    node.ensure(0..10).await.unwrap();
    scribble(&node.blob.path(), 5 * 8192);
    assert_eq!(node.source.reads(), 1);
    node.ensure(15..16).await.unwrap();
    assert_eq!(node.blob.stats().chunks_suspect, 10);
    node.ensure(0..10).await.unwrap();
    assert_eq!((node.blob.stats().chunks_wrong, node.source.reads()), (1, 3));
}

#[test]
fn changed_file_is_never_sealed() {
    let dir = tempfile::tempdir().unwrap();
    let sample = Sample::new(&[CHUNK; 20]);
    live(dir.path(), "a", &sample, async |node| {
        node.ensure(0..10).await.unwrap();
        scribble(&node.blob.path(), 5 * 8192);
        settle(node);
    });
    live(dir.path(), "a", &sample, async |node| {
        assert_eq!(node.blob.stats().chunks_ready, 0);
        node.ensure(0..10).await.unwrap();
    });
}

/// A step of a process.
#[derive(Clone, Debug)]
enum Step {
    Ensure(usize, usize),
    Evict(usize, usize),
    Flush,
}

fn step() -> impl Strategy<Value = Step> {
    let chunks = || (0_usize..30, 1_usize..10);
    prop_oneof![
        4 => chunks().prop_map(|(first, count)| Step::Ensure(first, first + count)),
        2 => chunks().prop_map(|(first, count)| Step::Evict(first, first + count)),
        1 => Just(Step::Flush),
    ]
}

/// A change of the file between two processes.
#[derive(Clone, Debug)]
enum Between {
    Nothing,
    Scribble(f64),
    OtherBoot,
}

fn between() -> impl Strategy<Value = Between> {
    let scribble = (0_f64..1.0).prop_map(Between::Scribble);
    prop_oneof![Just(Between::Nothing), scribble, Just(Between::OtherBoot)]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 30, ..ProptestConfig::default() })]

    /// However processes end, whatever they evict and whatever is written in between: a range that
    /// `ensure` has reported is right.
    #[test]
    fn a_reader_never_sees_bytes_of_another_writer(
        lives in prop::collection::vec((prop::collection::vec(step(), 0..8), between()), 1..6),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let sample = Sample::new(&[CHUNK; 40]);
        let mut boot = 0;
        for (steps, between) in lives {
            let settings = Settings { grace: Duration::ZERO, ..settings(0) };
            let boot_id = boot.to_string();
            let path = live_with(settings, dir.path(), &boot_id, &sample, async |node| {
                node.blob.rearm(Hold::UntilReleased).unwrap();
                for step in steps {
                    match step {
                        Step::Ensure(first, end) => node.ensure(first..end).await.unwrap(),
                        Step::Evict(first, end) => {
                            let chunks: Vec<_> = (first..end).collect();
                            node.blob.evict(&chunks).unwrap();
                        }
                        Step::Flush => settle(node),
                    }
                }
                node.blob.path()
            });
            match between {
                Between::Nothing => {}
                Between::Scribble(at) => scribble(&path, (at * sample.file.len() as f64) as u64),
                Between::OtherBoot => boot += 1,
            }
        }
        live(dir.path(), &boot.to_string(), &sample, async |node| node.ensure(0..40).await.unwrap());
    }
}

/// The wrong chunks of a whole blob.
async fn scrub(blob: &Arc<CachedBlob>) -> Vec<u32> {
    let (mut wrong, mut next) = (Vec::new(), Some(0));
    while let Some(from) = next {
        let step = blob.scrub(from).await;
        wrong.extend(step.wrong.iter().map(|chunk| chunk.number));
        next = step.next;
    }
    wrong
}

#[test]
fn scrub_finds_damage_in_unread_chunks() {
    let dir = tempfile::tempdir().unwrap();
    let sample = Sample::new(&[1 << 20; 70]);
    let path = live(dir.path(), "a", &sample, async |node| {
        node.ensure(0..70).await.unwrap();
        node.blob.completed().await;
        assert!(scrub(&node.blob).await.is_empty());
        assert!(node.blob.is_complete());
        // Behind the back of a process that has no reason to look.
        scribble(&node.blob.path(), 41 << 20);
        assert_eq!(scrub(&node.blob).await, [41]);
        assert!(!node.blob.is_complete());
        assert!(scrub(&node.blob).await.is_empty(), "once");
        node.ensure(0..70).await.unwrap();
        assert!(scrub(&node.blob).await.is_empty());
        node.blob.completed().await;
        node.blob.path()
    });
    scribble(&path, 3 << 20);
    live(dir.path(), "a", &sample, async |node| {
        assert_eq!(scrub(&node.blob).await, [3]);
        assert_eq!(node.source.reads(), 0);
        node.ensure(0..70).await.unwrap();
        assert_eq!(node.source.reads(), 1);
        node.blob.completed().await;
    });
}
