//! Reports failed reads to the log, rate-limited and deduplicated.
//!
//! The reader's control groups are read at once, since the reader may end with the error. Listeners
//! resolve names, off the read path.

use std::{
    collections::HashMap,
    fs,
    ops::Range,
    sync::Mutex,
    time::{Duration, Instant},
};

use lazuli_image::{Decoded, Digest};
use tokio::sync::mpsc::{Receiver, Sender, channel};

use crate::{error::ReadError, sharing::Account, sync::lock};

/// Limit of one image, so that an image with an unreachable registry leaves room to others.
const IMAGE: Rate = Rate { burst: 10, refill: Duration::from_secs(6) };

/// Limit of all images together: four images can use theirs fully.
const NODE: Rate = Rate { burst: 40, refill: Duration::from_millis(1500) };

/// Maximum number of images with counters. Beyond it, the image whose counter changed least
/// recently is forgotten: it has most likely earned a whole burst by now.
const IMAGES: usize = 256;

/// Time during which a repeated failure of one reader is no news. For one read of a program, the
/// kernel asks up to six times.
const SAME: Duration = Duration::from_secs(10);

/// Bytes of a thread's list of control groups that are kept. Each has a name of up to 255.
const GROUPS: usize = 4096;

/// A read that ended with an error.
#[derive(Debug)]
pub(crate) struct FailedRead {
    /// The blob.
    pub(crate) blob: Digest,
    /// The requested range.
    pub(crate) range: Range<Decoded>,
    /// Why it failed.
    pub(crate) error: ReadError,
    /// The thread that read, if the kernel names it.
    pub(crate) thread: Option<i32>,
    /// Its control groups, as `/proc/THREAD/cgroup` has them.
    pub(crate) groups: String,
    /// Reads before it that failed and were not reported.
    pub(crate) unreported: u64,
}

/// The reporter of failed reads.
#[derive(Debug)]
pub(super) struct FailedReads {
    state: Mutex<Allowances>,
    reports: Sender<FailedRead>,
    listener: Mutex<Option<Receiver<FailedRead>>>,
}

/// Reports at once, and how long it takes to earn one more.
#[derive(Clone, Copy, Debug)]
struct Rate {
    burst: u32,
    refill: Duration,
}

/// The remainder of a [`Rate`].
#[derive(Debug)]
struct Allowance {
    rate: Rate,
    left: u32,
    refilled: Instant,
}

#[derive(Debug)]
struct Allowances {
    node: Allowance,
    images: HashMap<Account, ImageReports>,
}

#[derive(Debug)]
struct ImageReports {
    allowance: Allowance,
    unreported: u64,
    last: Option<(Question, Instant)>,
}

/// The blob and offset at which a read begins, and the thread that reads.
type Question = (Digest, Decoded, Option<i32>);

impl Allowance {
    fn new(rate: Rate, now: Instant) -> Self {
        Allowance { rate, left: rate.burst, refilled: now }
    }

    /// Adds the amount earned by now.
    fn earn(&mut self, now: Instant) {
        let Rate { burst, refill } = self.rate;
        let earned = now.saturating_duration_since(self.refilled).as_millis() / refill.as_millis();
        if earned > 0 {
            self.left = burst.min(self.left.saturating_add(earned.try_into().unwrap_or(burst)));
            self.refilled = now;
        }
    }
}

impl Allowances {
    /// The state of one image, which another one gives way to if there are too many.
    fn of(&mut self, image: Account, now: Instant) -> (&mut Allowance, &mut ImageReports) {
        if self.images.len() >= IMAGES && !self.images.contains_key(&image) {
            let oldest = self.images.iter().min_by_key(|(_, state)| state.allowance.refilled);
            if let Some(oldest) = oldest.map(|(image, _)| *image) {
                self.images.remove(&oldest);
            }
        }
        let new =
            || ImageReports { allowance: Allowance::new(IMAGE, now), unreported: 0, last: None };
        (&mut self.node, self.images.entry(image).or_insert_with(new))
    }
}

impl FailedReads {
    pub(super) fn new() -> Self {
        let (reports, listener) = channel(NODE.burst as usize);
        let node = Allowance::new(NODE, Instant::now());
        let state = Allowances { node, images: HashMap::new() };
        FailedReads { state: state.into(), reports, listener: Mutex::new(Some(listener)) }
    }

    /// Returns the receiving end, once.
    pub(super) fn listen(&self) -> Option<Receiver<FailedRead>> {
        lock(&self.listener).take()
    }

    /// Reports a read of an image's blob, unless too many are reported already.
    pub(super) fn report(
        &self,
        image: Account,
        blob: Digest,
        range: &Range<Decoded>,
        error: &ReadError,
        thread: Option<i32>,
    ) {
        let now = Instant::now();
        let Some(unreported) = self.admit(image, (blob, range.start, thread), now) else {
            return;
        };
        let (range, error, groups) = (range.clone(), error.clone(), groups(thread));
        let read = FailedRead { blob, range, error, thread, groups, unreported };
        if self.reports.try_send(read).is_err() {
            let mut state = lock(&self.state);
            state.of(image, now).1.unreported += unreported + 1;
        }
    }

    /// Returns `None` if a read is not to be reported, else how many of the image's reads were not
    /// reported before it.
    fn admit(&self, image: Account, question: Question, now: Instant) -> Option<u64> {
        let mut state = lock(&self.state);
        let (node, image) = state.of(image, now);
        if let Some((known, when)) = image.last
            && known == question
            && now.saturating_duration_since(when) < SAME
        {
            return None;
        }
        node.earn(now);
        image.allowance.earn(now);
        if node.left == 0 || image.allowance.left == 0 {
            image.unreported += 1;
            return None;
        }
        node.left -= 1;
        image.allowance.left -= 1;
        image.last = Some((question, now));
        Some(std::mem::take(&mut image.unreported))
    }
}

/// The control groups of a thread, if they can be read.
fn groups(thread: Option<i32>) -> String {
    let Some(thread) = thread else { return String::new() };
    let mut groups = fs::read(format!("/proc/{thread}/cgroup")).unwrap_or_default();
    groups.truncate(GROUPS);
    String::from_utf8_lossy(&groups).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blob(number: u8) -> Digest {
        Digest::sha256([number; 32])
    }

    fn image(number: u8) -> Account {
        Account::Image(Digest::sha256([number; 32]))
    }

    #[test]
    fn a_flood_is_counted_and_reported_slowly() {
        let (reads, begun) = (FailedReads::new(), Instant::now());
        let admit =
            |start, after| reads.admit(image(1), (blob(1), Decoded(start), None), begun + after);
        let first = (0..100).filter(|start| admit(*start, Duration::ZERO).is_some()).count();
        assert_eq!(first, IMAGE.burst as usize);
        assert_eq!(admit(100, IMAGE.refill), Some(90));
        assert_eq!(admit(101, IMAGE.refill), None);
        let later = (200..300).filter(|start| admit(*start, 100 * IMAGE.refill).is_some()).count();
        assert_eq!(later, IMAGE.burst as usize);
    }

    #[test]
    fn the_flood_of_one_image_hides_no_other() {
        let (reads, now) = (FailedReads::new(), Instant::now());
        let admit =
            |number, start| reads.admit(image(number), (blob(1), Decoded(start), None), now);
        assert_eq!((0..1000).filter(|start| admit(1, *start).is_some()).count(), 10);
        assert_eq!(admit(2, 0), Some(0), "another image, and not the first one's count");
        let all = (0..1000).filter(|start| admit((start % 100) as u8 + 3, *start).is_some());
        assert_eq!(all.count(), NODE.burst as usize - 11, "however many images fail");
    }

    #[test]
    fn the_states_of_images_are_bounded() {
        let (reads, begun) = (FailedReads::new(), Instant::now());
        for number in 0..2 * IMAGES {
            let mut digest = [0; 32];
            digest[..8].copy_from_slice(&number.to_le_bytes());
            let image = Account::Image(Digest::sha256(digest));
            let after = u32::try_from(number).unwrap() * NODE.refill;
            assert!(reads.admit(image, (blob(1), Decoded(0), None), begun + after).is_some());
        }
        assert_eq!(lock(&reads.state).images.len(), IMAGES);
    }

    #[test]
    fn a_repeated_failure_is_reported_once_in_a_while() {
        let (reads, begun) = (FailedReads::new(), Instant::now());
        let admit =
            |thread, after| reads.admit(image(1), (blob(1), Decoded(0), thread), begun + after);
        assert_eq!(admit(Some(1), Duration::ZERO), Some(0));
        assert_eq!(admit(Some(1), Duration::ZERO), None);
        assert_eq!(admit(Some(2), Duration::ZERO), Some(0), "another reader");
        assert_eq!(admit(Some(2), SAME), Some(0));
    }

    #[test]
    fn the_groups_of_a_reader_are_read_at_once() {
        let reads = FailedReads::new();
        let own = fs::read_link("/proc/thread-self").unwrap();
        let own = own.file_name().unwrap().to_str().unwrap().parse().unwrap();
        let error = ReadError::Interrupted { blob: blob(1) };
        let mut listener = reads.listen().unwrap();
        reads.report(image(1), blob(1), &(Decoded(0)..Decoded(1)), &error, Some(own));
        reads.report(image(1), blob(2), &(Decoded(0)..Decoded(1)), &error, None);
        let read = listener.try_recv().unwrap();
        assert_eq!(read.groups, fs::read_to_string("/proc/thread-self/cgroup").unwrap());
        assert_eq!(listener.try_recv().unwrap().groups, "");
        assert!(reads.listen().is_none());
    }
}
