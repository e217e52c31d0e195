//! Processes that read and check, and their results.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    process::{Child, ChildStdin, Command, Stdio},
    sync::{Arc, Mutex},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use lazuli_testkit::reading::{Access, Report, Task};

use super::image::built;

/// After this a reader that was told to end counts as stuck: longer than the deadline of any fetch.
const STUCK: Duration = Duration::from_secs(90);

/// Running readers.
pub(crate) struct Readers {
    processes: Vec<Process>,
    seen: Arc<Mutex<Seen>>,
}

struct Process {
    child: Child,
    input: Option<ChildStdin>,
    listener: Option<JoinHandle<Total>>,
}

#[derive(Clone, Copy, Default)]
struct Total {
    bytes: u64,
    accesses: u64,
}

/// The results of readers.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen {
    /// Bytes that were compared.
    pub(crate) bytes: u64,
    /// Reads, walks over mapped pages and runs of programs.
    pub(crate) accesses: u64,
    /// Accesses that got other bytes, with how many of these were 0.
    pub(crate) wrong: Vec<(Access, u64, u64)>,
    /// Accesses that failed, and readers that died.
    pub(crate) errors: Vec<(Option<Access>, String)>,
    /// Accesses that took long.
    pub(crate) waits: Vec<Access>,
}

impl Seen {
    /// Adds the results of others.
    pub(crate) fn add(&mut self, other: Seen) {
        self.bytes += other.bytes;
        self.accesses += other.accesses;
        self.wrong.extend(other.wrong);
        self.errors.extend(other.errors);
        self.waits.extend(other.waits);
    }

    /// Bytes that were wrong.
    pub(crate) fn wrong_bytes(&self) -> u64 {
        self.wrong.iter().map(|(_, bytes, _)| bytes).sum()
    }

    /// Fails unless every byte was right and no access failed.
    #[track_caller]
    pub(crate) fn assert_clean(&self) {
        let wrong = self.wrong.iter().take(5).collect::<Vec<_>>();
        let errors = self.errors.iter().take(5).collect::<Vec<_>>();
        assert!(
            wrong.is_empty() && errors.is_empty(),
            "{} wrong: {wrong:#?}\n{} errors: {errors:#?}",
            self.wrong.len(),
            self.errors.len()
        );
        assert!(self.bytes > 0, "nothing was read");
    }
}

impl Readers {
    /// Starts one process for each task.
    pub(crate) fn start(tasks: impl IntoIterator<Item = Task>) -> Self {
        let seen = Arc::<Mutex<Seen>>::default();
        let processes = tasks.into_iter().map(|task| Process::start(&task, &seen)).collect();
        Readers { processes, seen }
    }

    /// Stops the readers and returns their results.
    pub(crate) fn stop(mut self) -> Seen {
        for process in &mut self.processes {
            process.input = None;
        }
        self.collect()
    }

    /// Waits until they have read everything once, and returns their results.
    pub(crate) fn finish(self) -> Seen {
        self.collect()
    }

    fn collect(mut self) -> Seen {
        let mut totals = Total::default();
        let mut died = Vec::new();
        let began = Instant::now();
        for process in &mut self.processes {
            let status = loop {
                match process.child.try_wait().unwrap() {
                    Some(status) => break Some(status),
                    None if began.elapsed() > STUCK => break None,
                    None => thread::sleep(Duration::from_millis(2)),
                }
            };
            match status {
                Some(status) if status.success() => {}
                Some(status) => died.push((None, format!("a reader ended with {status}"))),
                None => {
                    died.push((None, format!("a reader was stuck for {STUCK:?}")));
                    let _ = process.child.kill();
                }
            }
            let total = process.listener.take().unwrap().join().unwrap();
            totals.bytes += total.bytes;
            totals.accesses += total.accesses;
        }
        let mut seen = std::mem::take(&mut *self.seen.lock().unwrap());
        seen.bytes = totals.bytes;
        seen.accesses = totals.accesses;
        seen.errors.extend(died);
        seen
    }
}

impl Drop for Readers {
    fn drop(&mut self) {
        for process in &mut self.processes {
            let _ = process.child.kill();
            let _ = process.child.wait();
        }
    }
}

impl Process {
    fn start(task: &Task, seen: &Arc<Mutex<Seen>>) -> Self {
        let mut command = Command::new(built("reader"));
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut input = child.stdin.take().unwrap();
        writeln!(input, "{}", serde_json::to_string(task).unwrap()).unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let seen = seen.clone();
        let listener = thread::spawn(move || {
            let mut total = Total::default();
            for line in output.lines() {
                // The last line of a reader that died may be half of one.
                let Ok(report) = serde_json::from_str(&line.unwrap()) else { continue };
                let mut seen = seen.lock().unwrap();
                match report {
                    Report::Wait(access) => seen.waits.push(access),
                    Report::Wrong { access, wrong } => {
                        seen.wrong.push((access, wrong.bytes, wrong.zeros));
                    }
                    Report::Failed { access, error } => seen.errors.push((Some(access), error)),
                    Report::Total { bytes, accesses } => total = Total { bytes, accesses },
                }
            }
            total
        });
        Process { child, input: Some(input), listener: Some(listener) }
    }
}
