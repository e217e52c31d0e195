//! Chooses chunks to evict when images exceed their share.

use std::collections::HashMap;

use crate::sharing::Account;

/// A chunk that may go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Idle {
    /// When it was asked for last.
    pub(super) last: u32,
    /// The position of its blob.
    pub(super) blob: usize,
    /// Its place in the blob.
    pub(super) at: usize,
    pub(super) bytes: u64,
    pub(super) account: Account,
}

/// The bytes of each image on the disk above its share.
#[derive(Debug)]
pub(super) struct Excess(HashMap<Account, u64>);

impl Excess {
    /// `held` are the bytes of each image, and `total` the limit for all of them.
    pub(super) fn of(held: &HashMap<Account, u64>, total: u64) -> Self {
        let share = total / (held.len() as u64).max(1);
        let above = |(account, bytes): (&Account, &u64)| (*account, bytes.saturating_sub(share));
        Excess(held.iter().map(above).filter(|(_, bytes)| *bytes > 0).collect())
    }

    /// Returns whether any image exceeds its share.
    pub(super) fn is_any(&self) -> bool {
        !self.0.is_empty()
    }

    /// Returns whether this image exceeds its share.
    pub(super) fn has(&self, account: &Account) -> bool {
        self.0.contains_key(account)
    }

    /// Chooses chunks with about `bytes`, those first whose latest request is longest ago: chunks
    /// of images above their share, and of others when no image is any more, or when `for_others`
    /// of them need space.
    pub(super) fn choose(
        &mut self,
        mut idle: Vec<Idle>,
        bytes: u64,
        for_others: bool,
    ) -> Vec<Idle> {
        idle.sort_unstable_by_key(|idle| (idle.last, idle.blob, idle.at));
        let mut sum = 0;
        let mut chosen = Vec::new();
        let mut rest = Vec::new();
        for idle in idle {
            match self.0.get_mut(&idle.account) {
                Some(excess) if sum < bytes => {
                    *excess = excess.saturating_sub(idle.bytes);
                    if *excess == 0 {
                        self.0.remove(&idle.account);
                    }
                    sum += idle.bytes;
                    chosen.push(idle);
                }
                _ => rest.push(idle),
            }
        }
        if for_others || !self.is_any() {
            for idle in rest {
                if sum >= bytes {
                    break;
                }
                sum += idle.bytes;
                chosen.push(idle);
            }
        }
        chosen
    }
}

#[cfg(test)]
mod tests {
    use lazuli_image::Digest;

    use super::*;

    const HOG: Account = Account::Image(Digest::sha256([1; 32]));
    const OTHER: Account = Account::Image(Digest::sha256([2; 32]));

    /// Chunks of ten bytes, in the order in which they were asked for.
    fn idle(accounts: &[Account]) -> Vec<Idle> {
        let chunk = |(at, account): (usize, &Account)| {
            let blob = usize::from(*account == OTHER);
            Idle { last: at as u32, blob, at, bytes: 10, account: *account }
        };
        accounts.iter().enumerate().map(chunk).collect()
    }

    fn chosen(held: &[(Account, u64)], idle: Vec<Idle>, bytes: u64, others: bool) -> Vec<usize> {
        let mut excess = Excess::of(&held.iter().copied().collect(), 100);
        excess.choose(idle, bytes, others).into_iter().map(|idle| idle.at).collect()
    }

    #[test]
    fn oldest_chunks_are_evicted_first() {
        let chunks = idle(&[HOG, OTHER, HOG, OTHER]);
        assert_eq!(chosen(&[(HOG, 50), (OTHER, 50)], chunks, 30, false), [0, 1, 2]);
        assert_eq!(chosen(&[(HOG, 120)], idle(&[HOG, HOG]), 10, false), [0]);
    }

    #[test]
    fn an_image_above_its_share_gives_up_its_own() {
        let chunks = idle(&[OTHER, OTHER, HOG, HOG, HOG]);
        let held = [(HOG, 100), (OTHER, 20)];
        assert_eq!(chosen(&held, chunks.clone(), 20, false), [2, 3]);
        // Another image keeps its chunks while this one exceeds its share, even though its
        // remaining chunk is too recent to evict.
        assert_eq!(chosen(&held, chunks.clone(), 50, false), [2, 3, 4]);
        assert_eq!(chosen(&[(HOG, 70), (OTHER, 20)], chunks.clone(), 50, false), [2, 3, 0, 1, 4]);
        // A reader of an image within its share finds room all the same.
        assert_eq!(chosen(&held, chunks, 50, true), [2, 3, 4, 0, 1]);
    }
}
