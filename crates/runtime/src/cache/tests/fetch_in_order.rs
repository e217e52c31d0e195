//! Prefetching by a given order.

use std::sync::atomic::{AtomicU64, Ordering};

use super::*;
use crate::{
    prefetch::fetch_in_order::{self, Gaps, Gauge, Pace, Purpose},
    source::request::Meter as _,
};

/// Fetches chunks of the only blob in this order.
async fn fetch(node: &Node, order: impl IntoIterator<Item = usize>) -> Result<(), ReadError> {
    let blobs: Arc<[Arc<CachedBlob>]> = Arc::new([node.blob.clone()]);
    let order = order.into_iter().map(|chunk| (0, chunk)).collect();
    fetch_in_order::fetch(
        &Arc::downgrade(&blobs),
        order,
        None,
        &Pace::default(),
        Purpose::Order(&node.cache),
    )
    .await
}

#[tokio::test]
async fn first_chunks_are_requested_first() {
    let node = Node::new(&[64 << 10; 96], 0);
    node.ensure(90..91).await.unwrap();
    // Chunk 90 is present. 80 to 84 have 256 KiB and fill the first window; the second has two
    // runs.
    let order = [83, 90, 80, 82, 84, 81, 5, 4, 40, 41, 42, 6, 7];
    fetch(&node, order).await.unwrap();
    let stored = |range: Range<usize>| {
        let chunks = &node.sample.blob.chunks[range];
        chunks[0].stored..chunks[chunks.len() - 1].stored_end()
    };
    let expected = [stored(90..91), stored(80..85), stored(4..8), stored(40..43)];
    let mut asked: Vec<Range<Stored>> = Vec::new();
    for part in node.source.ranges() {
        match asked.last_mut() {
            Some(last) if last.end == part.start => last.end = part.end,
            _ => asked.push(part),
        }
    }
    // Requests of one window are sent at the same time.
    asked[2..].sort_by_key(|range| range.start);
    assert_eq!(asked, expected);
    assert!((80..85).chain(4..8).all(|at| node.blob.has(at)));
    assert_eq!(node.blob.stats().misses, 1, "no other read missed");
}

#[tokio::test]
async fn everything_arrives_in_groups() {
    let node = Node::new(&[256 << 10; 80], 0);
    fetch(&node, 0..80).await.unwrap();
    assert!(node.blob.missing().is_empty());
    let stats = node.blob.stats();
    assert_eq!(stats.bytes_fetched, node.sample.blob.stored_size, "nothing comes twice");
    let (here, all) = node.blob.filled();
    assert_eq!((here, all), (node.sample.blob.stored_size, node.sample.blob.stored_size));
}

/// Gaps up to a bound are filled, within the bytes that are left; what is present is not fetched
/// again.
#[tokio::test]
async fn what_lies_between_likely_chunks_comes_along() {
    let node = Node::new(&[64 << 10; 40], 0);
    node.ensure(11..12).await.unwrap();
    let stored = |at: usize| u64::from(node.sample.blob.chunks[at].stored_size);
    let blobs: Arc<[Arc<CachedBlob>]> = Arc::new([node.blob.clone()]);
    let left = AtomicU64::new(stored(12) + stored(31));
    let gaps = Gaps { most: 4 * stored(0), left: Some(&left) };
    let order = [10, 13, 20, 30, 34].map(|chunk| (0, chunk));
    let purpose = Purpose::Guess(&node.cache, gaps);
    let (blobs, pace) = (Arc::downgrade(&blobs), Pace::default());
    fetch_in_order::fetch_by(&blobs, order, u64::MAX, None, &mut Gauge::new(&pace), purpose)
        .await
        .unwrap();
    let here: Vec<_> = (0..40).filter(|at| node.blob.has(*at)).collect();
    assert_eq!(here, [10, 11, 12, 13, 20, 30, 31, 34]);
    assert_eq!(left.load(Ordering::Relaxed), 0);
}

/// They would look as if they had come all at once.
#[tokio::test]
async fn bytes_that_were_requested_early_say_nothing_of_the_link() {
    let node = Node::new(&[64 << 10; 4], 0);
    let speed = || node.cache.link_speed().bytes_in(Duration::from_secs(1));
    let (held, arrived) = (|| node.blob.was_held(1 << 20), || node.blob.arrived(1 << 20));
    held();
    std::thread::sleep(Duration::from_millis(110));
    held();
    assert_eq!(speed(), 0);
    arrived();
    std::thread::sleep(Duration::from_millis(110));
    arrived();
    assert!(speed() > 0);
}

#[tokio::test]
async fn little_is_under_way_while_readers_wait() {
    let chunk = 64 << 10;
    let node = Node::new(&vec![chunk; 160], 0);
    node.source.plan([Fault::Slow(Duration::from_millis(500)); 160]);
    let asked =
        || node.source.ranges().iter().map(|range| range.end.0 - range.start.0).sum::<u64>();
    let reader = node.cache.workers.reader(node.blob.account());
    let (fetched, ()) = tokio::join!(fetch(&node, 0..160), async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        // One window, of as much as a reader asks for.
        assert!((256 << 10..(256 << 10) + chunk as u64).contains(&asked()), "{}", asked());
        drop(reader);
        // Fetches in flight arrive first; then windows grow.
        tokio::time::sleep(Duration::from_millis(700)).await;
        assert!(asked() > 2 << 20, "{}", asked());
    });
    fetched.unwrap();
    assert!(node.blob.missing().is_empty());
}

#[tokio::test]
async fn failed_prefetch_does_not_fail_a_reader_that_joined() {
    let node = Node::new(&[64 << 10; 4], 0);
    node.source.plan([Fault::Final]);
    let bring = fetch(&node, [2]);
    let read = async {
        tokio::task::yield_now().await;
        node.ensure(2..3).await
    };
    let (brought, read) = tokio::join!(bring, read);
    assert!(brought.is_err());
    read.unwrap();
}

#[tokio::test]
async fn prefetch_of_an_unmounted_image_sends_no_request() {
    let node = Node::new(&[64 << 10; 4], 0);
    let blobs: Arc<[Arc<CachedBlob>]> = Arc::new([node.blob.clone()]);
    let gone = Arc::downgrade(&blobs);
    drop(blobs);
    fetch_in_order::fetch(&gone, vec![(0, 1)], None, &Pace::default(), Purpose::Order(&node.cache))
        .await
        .unwrap();
    assert_eq!(node.source.reads(), 0);
}
