//! Readers' results when the network fails: each fault at an in-process registry, with a real mount
//! and a reader.
//!
//! Every test is a row of the table in docs/measurements/reliability.md. With `LAZULI_RESULTS=DIR`
//! the rows are written to `DIR/network-faults.json`.

mod rows;
mod scene;
mod tls;

use std::{
    ops::RangeInclusive,
    panic::Location,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use lazuli_sys::mmap::{FinishedFile, Map};
use serde_json::json;

use self::scene::{Scene, Seen};
use crate::{
    drivers::able,
    reliability::{report_row, round_seconds},
};

/// Seconds that a busy machine may add.
const SLACK: f64 = 10.0;

/// A fault with its expected effects.
struct Case {
    /// As the table calls it.
    fault: &'static str,
    /// Number of mirrors before the registry.
    mirrors: usize,
    /// `fetch.deadline_seconds`.
    deadline: u64,
    /// How long the fault lasts; `None`: until the reader has its answer.
    lasts: Option<f64>,
    /// The first reader's result, and how many seconds later.
    sees: Seen,
    after: RangeInclusive<f64>,
    /// Seconds between the end of the fault, or the question if that is later, and right bytes.
    recovers: RangeInclusive<f64>,
    /// Requests that servers saw before the first reader had its answer, and those that Lazuli
    /// counted.
    requests: RangeInclusive<u64>,
}

impl Case {
    /// A fault of one registry that readers do not notice.
    fn hidden(fault: &'static str, within: f64, requests: u64) -> Self {
        Case {
            fault,
            mirrors: 0,
            deadline: 20,
            lasts: None,
            sees: Seen::Right,
            after: 0.0..=within,
            recovers: 0.0..=within,
            requests: requests..=requests,
        }
    }

    /// A fault of one registry that readers notice at once, and that is forgotten at once.
    fn noticed(fault: &'static str, requests: u64) -> Self {
        Case { sees: Seen::Eio, ..Case::hidden(fault, 1.0, requests) }
    }

    /// Makes the fault happen while a reader reads, ends it, and looks at everything.
    #[track_caller]
    fn check(self, begin: impl FnOnce(&Scene), end: impl FnOnce(&Scene)) {
        let (fault, line) = (self.fault, Location::caller().line());
        if !able("fanotify") {
            return;
        }
        let scene = Scene::new(self.deadline, self.mirrors);
        // Connections, tokens and redirects are there before the fault is.
        assert_eq!(scene.read("first"), Seen::Right, "{fault}");
        let before = scene.status();
        scene.servers().for_each(|server| server.reset_stats());
        begin(&scene);
        let started = Instant::now();
        let (seen, after, ended) = thread::scope(|scope| {
            let reader = scope.spawn(|| (scene.read("second"), started.elapsed()));
            let ended = self.lasts.map(|lasts| {
                thread::sleep(Duration::from_secs_f64(lasts));
                Instant::now()
            });
            match ended {
                Some(_) => {
                    end(&scene);
                    let (seen, after) = reader.join().unwrap();
                    (seen, after, ended)
                }
                None => {
                    let (seen, after) = reader.join().unwrap();
                    let ended = (seen == Seen::Eio).then(Instant::now);
                    end(&scene);
                    (seen, after, ended)
                }
            }
        });
        let counted =
            |key: &str| scene.status()[key].as_u64().unwrap() - before[key].as_u64().unwrap();
        let counted = (counted("requests"), counted("bytes_fetched"));
        // Read last: an answer that drips goes on until its connection is seen to be closed.
        let requests: u64 = scene.servers().map(|server| server.stats().requests).sum();
        let bytes: u64 = scene.servers().map(|server| server.stats().bytes).sum();
        let right = match seen {
            Seen::Right => started + after,
            Seen::Eio => {
                while scene.read("second") != Seen::Right {
                    assert!(started.elapsed() < Duration::from_secs(60), "{fault}: never right");
                    thread::sleep(Duration::from_millis(20));
                }
                Instant::now()
            }
        };
        let recovered = right.saturating_duration_since(ended.unwrap_or(started)).as_secs_f64();
        let after = after.as_secs_f64();
        let row = json!({
            "fault": fault,
            "reader": seen.text(),
            "after_seconds": round_seconds(after),
            "recovered_seconds": round_seconds(recovered),
            "requests": requests,
            "bytes": bytes,
            "requests_counted": counted.0,
            "bytes_counted": counted.1,
        });
        let problem = format!("{row:#}");
        assert_eq!(seen, self.sees, "{problem}");
        let within = |range: RangeInclusive<f64>, seconds: f64| {
            (*range.start()..=range.end() + SLACK).contains(&seconds)
        };
        assert!(within(self.after, after), "{problem}");
        assert!(within(self.recovers, recovered), "{problem}");
        assert!(self.requests.contains(&requests), "{problem}");
        assert!(counted.1 <= bytes, "{problem}");
        // All other files are readable, and no wrong bytes were kept.
        for name in ["third", "second", "first"] {
            assert_eq!(scene.read(name), Seen::Right, "{name} after {problem}");
        }
        for server in scene.servers() {
            assert_eq!(server.violations(), Vec::<String>::new(), "{problem}");
        }
        report_row("network-faults", line, row);
    }
}

/// A program that maps a file and reads it, for `rows::a_mapping_gets_a_signal`.
#[test]
#[ignore = "no test: what a test starts"]
fn mapping_reader() {
    let path = std::env::var_os("LAZULI_TEST_MAP").expect("LAZULI_TEST_MAP names a file");
    let map = Map::of(FinishedFile::open(Path::new(&path)).unwrap()).unwrap();
    assert!(map.as_ref() == scene::content(2));
}
