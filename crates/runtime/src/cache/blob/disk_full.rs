//! Delays readers on a full disk until there is space.

use std::{io, ops::Range, sync::Arc, time::Duration};

use lazuli_image::BLOCK_SIZE;
use rustix::fs::{FallocateFlags, fallocate};
use tokio::time::Instant;

use super::{super::store::is_full, CachedBlob};

/// First and longest pause between two attempts.
const PAUSES: [Duration; 2] = [Duration::from_millis(50), Duration::from_secs(2)];

/// A reader's wait for space.
#[derive(Debug)]
pub(super) struct WaitForSpace {
    deadline: Instant,
    pause: Duration,
}

impl WaitForSpace {
    pub(super) fn new(deadline: Duration) -> Self {
        WaitForSpace { deadline: Instant::now() + deadline, pause: PAUSES[0] }
    }

    /// Waits until the disk has space for the missing chunks of `wanted`, and reserves it until
    /// they are fetched. Returns `false` when waiting ends first.
    pub(super) async fn find(&mut self, blob: &Arc<CachedBlob>, wanted: Range<usize>) -> bool {
        loop {
            if Instant::now() + self.pause >= self.deadline {
                return false;
            }
            tokio::time::sleep(self.pause).await;
            self.pause = (self.pause * 2).min(PAUSES[1]);
            let (blob, wanted) = (blob.clone(), wanted.clone());
            let look = tokio::task::spawn_blocking(move || {
                reserve(&blob, wanted.clone()) || {
                    let size = |at: usize| u64::from(blob.chunk(at).decoded_size);
                    if let Some(cache) = blob.cache.upgrade() {
                        cache.make_room(wanted.clone().map(size).sum(), blob.account());
                    }
                    reserve(&blob, wanted)
                }
            });
            if look.await.unwrap_or(false) {
                return true;
            }
        }
    }
}

/// Gives the file blocks for the chunks of `wanted` that are missing; they read as zeros, like a
/// hole. Returns `false` if the disk is too full. Blocks.
fn reserve(blob: &Arc<CachedBlob>, wanted: Range<usize>) -> bool {
    let missing = |at: &usize| !blob.has(*at);
    let reserved = blob.change(|data| {
        wanted.filter(missing).try_for_each(|at| {
            let chunk = blob.chunk(at);
            let size = u64::from(chunk.decoded_size).next_multiple_of(BLOCK_SIZE);
            Ok(fallocate(data, FallocateFlags::KEEP_SIZE, chunk.decoded.0, size)?)
        })
    });
    // Another error, such as a file system without this call, leaves it to the write to find out.
    !reserved.is_err_and(|error: io::Error| is_full(&error))
}
