//! Limits the chunks of all images in memory.
//!
//! Each row of a chunk table takes about 90 bytes for as long as its image is open, so image makers
//! must not control the total. One image may have [`MAX_ROWS`], and all of them together a reserve
//! more. An image opened beside others may take half of the rest, so that none can take all of it.
//!
//! Images with the same bootstrap share one table, however often they are opened.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use lazuli_image::{
    Digest,
    rafs::{Bootstrap, layout::MAX_ROWS},
};
use lazuli_sys::mmap::Map;

/// Rows of all images.
const ALL: u64 = MAX_ROWS + RESERVE;

/// Rows that the largest image leaves to others.
const RESERVE: u64 = 512 << 10;

/// One limit per process, as memory is.
static OPEN: Mutex<Open> = Mutex::new(Open { images: Vec::new(), opening: 0 });

struct Open {
    /// By manifest.
    images: Vec<(Digest, Weak<Bootstrap<Map>>)>,
    /// Rows of those that are being opened.
    opening: u64,
}

/// The reason for opening an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// A client wants it; subject to the limit.
    New,
    /// It was served before, or is only inspected.
    Known,
}

/// Rows of an image that is being opened. To be kept until [`share`].
#[derive(Debug)]
#[must_use]
pub(super) struct Reservation(u64);

/// Reserves this many rows. Call it before reading them. The error is the number of rows available.
pub(super) fn reserve(rows: u64, purpose: Purpose) -> Result<Reservation, u64> {
    let mut open = lock();
    let left = left_beside(
        open.images.iter().map(|(_, image)| image).map(rows_of).sum::<u64>() + open.opening,
    );
    if purpose == Purpose::New && rows > left {
        return Err(left);
    }
    open.opening += rows;
    Ok(Reservation(rows))
}

/// The maximum number of rows for an image, given the rows of the others.
fn left_beside(held: u64) -> u64 {
    if held == 0 { MAX_ROWS } else { ALL.saturating_sub(held) / 2 }
}

/// The bootstrap of this image that is open already, if it has these bytes.
pub(super) fn find(manifest: &Digest, bytes: &[u8]) -> Option<Arc<Bootstrap<Map>>> {
    let open = lock();
    let images = open.images.iter().filter(|(digest, _)| digest == manifest);
    images.filter_map(|(_, image)| image.upgrade()).find(|image| image.bytes() == bytes)
}

/// Lets others [`find`] a bootstrap.
pub(super) fn share(manifest: &Digest, bootstrap: &Arc<Bootstrap<Map>>) {
    let mut open = lock();
    open.images.retain(|(_, image)| image.strong_count() > 0);
    let is_known = open.images.iter().any(|(_, image)| image.as_ptr() == Arc::as_ptr(bootstrap));
    if !is_known {
        open.images.push((*manifest, Arc::downgrade(bootstrap)));
    }
}

fn rows_of(image: &Weak<Bootstrap<Map>>) -> u64 {
    let blobs = image.upgrade();
    blobs.map_or(0, |image| image.blobs().iter().map(|blob| blob.chunks.len() as u64).sum())
}

fn lock() -> MutexGuard<'static, Open> {
    OPEN.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for Reservation {
    fn drop(&mut self) {
        lock().opening -= self.0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_alone_may_be_large_and_leaves_something_for_others() {
        assert_eq!(left_beside(0), MAX_ROWS);
        assert_eq!(left_beside(MAX_ROWS), RESERVE / 2);
        assert_eq!(left_beside(ALL), 0);
        assert_eq!(left_beside(u64::MAX), 0);
        // However many images follow, some rows are left for the next one.
        let mut held = MAX_ROWS;
        for _ in 0..10 {
            held += left_beside(held);
        }
        assert!(left_beside(held) > 100);
    }

    #[test]
    fn rows_of_images_being_opened_count() {
        // Other tests open small images meanwhile.
        let first = reserve(MAX_ROWS, Purpose::Known).unwrap();
        let left = reserve(MAX_ROWS, Purpose::New).unwrap_err();
        assert!(left <= RESERVE / 2, "{left}");
        drop(reserve(1000, Purpose::New).unwrap());
        drop(reserve(MAX_ROWS, Purpose::Known).unwrap());
        drop(first);
        assert!(reserve(MAX_ROWS / 4, Purpose::New).is_ok());
    }
}
