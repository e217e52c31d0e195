//! Reads that ended with an error, for the log: as many as say something new.
//!
//! The reader's control groups are read at once, since it may end with the error. Names are the
//! listener's business, off the path of reads.

use std::{
    fs,
    ops::Range,
    sync::Mutex,
    time::{Duration, Instant},
};

use lazuli_image::{Decoded, Digest};
use tokio::sync::mpsc::{Receiver, Sender, channel};

use crate::{error::ReadError, sync::lock};

/// Reads that are reported at once.
const BURST: u32 = 10;

/// After so long one more is reported.
const REFILL: Duration = Duration::from_secs(6);

/// How long the same failure of the same reader is no news. For one read of a program the kernel
/// asks up to six times.
const SAME: Duration = Duration::from_secs(10);

/// Bytes of a thread's list of control groups that are kept. Each has a name of up to 255.
const GROUPS: usize = 4096;

/// A read that ended with an error.
#[derive(Debug)]
pub(crate) struct FailedRead {
    /// The blob.
    pub(crate) blob: Digest,
    /// What was asked for.
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

/// Where they are reported.
#[derive(Debug)]
pub(super) struct FailedReads {
    state: Mutex<State>,
    reports: Sender<FailedRead>,
    listener: Mutex<Option<Receiver<FailedRead>>>,
}

#[derive(Debug)]
struct State {
    left: u32,
    refilled: Instant,
    unreported: u64,
    last: Option<(Digest, Decoded, Option<i32>, Instant)>,
}

impl FailedReads {
    pub(super) fn new() -> Self {
        let (reports, listener) = channel(BURST as usize);
        let state = State { left: BURST, refilled: Instant::now(), unreported: 0, last: None };
        FailedReads { state: state.into(), reports, listener: Mutex::new(Some(listener)) }
    }

    /// Where they arrive, once.
    pub(super) fn listen(&self) -> Option<Receiver<FailedRead>> {
        lock(&self.listener).take()
    }

    /// Reports a read, unless too many are reported already.
    pub(super) fn report(
        &self,
        blob: Digest,
        range: &Range<Decoded>,
        error: &ReadError,
        thread: Option<i32>,
    ) {
        let Some(unreported) = self.admit((blob, range.start, thread), Instant::now()) else {
            return;
        };
        let (range, error, groups) = (range.clone(), error.clone(), groups(thread));
        let read = FailedRead { blob, range, error, thread, groups, unreported };
        if self.reports.try_send(read).is_err() {
            lock(&self.state).unreported += unreported + 1;
        }
    }

    /// Whether to report a read, and how many were not before it.
    fn admit(
        &self,
        (blob, start, thread): (Digest, Decoded, Option<i32>),
        now: Instant,
    ) -> Option<u64> {
        let mut state = lock(&self.state);
        if let Some((known_blob, known_start, known_thread, when)) = state.last
            && (known_blob, known_start, known_thread) == (blob, start, thread)
            && now.saturating_duration_since(when) < SAME
        {
            return None;
        }
        let earned = now.saturating_duration_since(state.refilled).as_secs() / REFILL.as_secs();
        if earned > 0 {
            state.left = BURST.min(state.left.saturating_add(earned.try_into().unwrap_or(BURST)));
            state.refilled = now;
        }
        if state.left == 0 {
            state.unreported += 1;
            return None;
        }
        state.left -= 1;
        state.last = Some((blob, start, thread, now));
        Some(std::mem::take(&mut state.unreported))
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

    #[test]
    fn a_flood_is_counted_and_reported_slowly() {
        let (reads, begun) = (FailedReads::new(), Instant::now());
        let admit = |start, after| reads.admit((blob(1), Decoded(start), None), begun + after);
        let first = (0..100).filter(|start| admit(*start, Duration::ZERO).is_some()).count();
        assert_eq!(first, BURST as usize);
        assert_eq!(admit(100, REFILL), Some(90));
        assert_eq!(admit(101, REFILL), None);
        let later = (200..300).filter(|start| admit(*start, 100 * REFILL).is_some()).count();
        assert_eq!(later, BURST as usize);
    }

    #[test]
    fn a_question_that_is_repeated_is_no_news_for_a_while() {
        let (reads, begun) = (FailedReads::new(), Instant::now());
        let admit = |thread, after| reads.admit((blob(1), Decoded(0), thread), begun + after);
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
        reads.report(blob(1), &(Decoded(0)..Decoded(1)), &error, Some(own));
        reads.report(blob(2), &(Decoded(0)..Decoded(1)), &error, None);
        let read = listener.try_recv().unwrap();
        assert_eq!(read.groups, fs::read_to_string("/proc/thread-self/cgroup").unwrap());
        assert_eq!(listener.try_recv().unwrap().groups, "");
        assert!(reads.listen().is_none());
    }
}
