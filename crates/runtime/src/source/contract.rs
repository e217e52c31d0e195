//! The contract of sources, as one test that runs against each of them.

use std::{
    ops::Range,
    sync::atomic::{AtomicU64, Ordering},
};

use bytes::Bytes;
use lazuli_image::Stored;

use super::BlobSource;

/// A blob for [`check`] to read.
pub(crate) fn content() -> Bytes {
    lazuli_testkit::odd::random(7, 300_000).into()
}

/// Checks `source`, a source of `content`, against the contract of [`BlobSource`].
pub(crate) async fn check(source: &dyn BlobSource, content: &Bytes) {
    let end = content.len();
    for Range { start, end } in
        [0..1, 0..end, end - 1..end, 4095..4097, 1000..200_000, 0..0, end..end]
    {
        for _ in 0..2 {
            let range = Stored(start as u64)..Stored(end as u64);
            let count = AtomicU64::new(0);
            let arrived = |bytes| {
                count.fetch_add(bytes, Ordering::Relaxed);
            };
            let bytes = source.read(range, &arrived).await.unwrap();
            assert_eq!(count.into_inner(), (end - start) as u64, "{start}..{end} of {source:?}");
            assert!(bytes == content[start..end], "{start}..{end} of {source:?}");
        }
    }
    for (start, end) in [(0, end + 1), (end, end + 1), (end + 10, end + 20)] {
        let range = Stored(start as u64)..Stored(end as u64);
        let error = source.read(range, &|_| {}).await.unwrap_err();
        assert!(!error.is_transient(), "{start}..{end} of {source:?}: {error}");
    }
    let reads = (0..50_u64).map(|n| source.read(Stored(n * 7)..Stored(n * 7 + 5000), &|_| {}));
    for (n, bytes) in futures_util::future::join_all(reads).await.into_iter().enumerate() {
        assert_eq!(bytes.unwrap(), content[n * 7..n * 7 + 5000]);
    }
}
