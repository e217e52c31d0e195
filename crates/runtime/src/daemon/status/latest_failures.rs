//! The latest failed reads, for `status`.

use std::{collections::VecDeque, sync::Mutex};

use crate::{daemon::api::FailedReadStatus, sync::lock};

/// Failed reads that `status` has.
const LATEST: usize = 16;

/// The latest failed reads.
#[derive(Debug, Default)]
pub(in crate::daemon) struct LatestFailures(Mutex<VecDeque<FailedReadStatus>>);

impl LatestFailures {
    /// Adds one, with the number after the last one's.
    pub(in crate::daemon) fn add(&self, read: FailedReadStatus) {
        let mut latest = lock(&self.0);
        let number = latest.back().map_or(1, |last| last.number + 1);
        if latest.len() == LATEST {
            latest.pop_front();
        }
        latest.push_back(FailedReadStatus { number, ..read });
    }

    /// All of them, the oldest first.
    pub(in crate::daemon) fn all(&self) -> Vec<FailedReadStatus> {
        lock(&self.0).iter().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_failures_are_bounded_and_numbered() {
        let latest = LatestFailures::default();
        let read = FailedReadStatus {
            number: 0,
            pod: None,
            pod_uid: None,
            container: None,
            image: None,
            file: None,
            cause: "timeout".to_owned(),
        };
        (0..100).for_each(|_| latest.add(read.clone()));
        let numbers: Vec<_> = latest.all().iter().map(|read| read.number).collect();
        assert_eq!(numbers, (85..=100).collect::<Vec<_>>());
    }
}
