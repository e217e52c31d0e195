//! Reads random parts of files with known content until its standard input ends, and reports the
//! results.
//!
//! See [`lazuli_testkit::reading`] for the protocol.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command-line tool")]

use std::{
    collections::HashMap,
    fs::File,
    io::{self, BufRead as _, Read as _, Write as _},
    os::unix::{fs::FileExt as _, process::ExitStatusExt as _},
    process::{Command, ExitCode, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use lazuli_sys::mmap::{FinishedFile, Map};
use lazuli_testkit::{
    content::{self, Choices, Wrong},
    reading::{Access, LONG, Mode, PAYLOAD, Readable, Report, Task, now},
};
use rustix::fs::{Advice, fadvise};

/// Largest piece of one access.
const PIECE: u64 = 128 << 10;
/// Files that stay open: far below the 1024 descriptors that a process gets without asking.
const OPEN: u64 = 500;
/// Interval for reporting totals.
const TOTALS: Duration = Duration::from_millis(200);

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("reader: {error}");
            ExitCode::FAILURE
        }
    }
}

/// State that all threads share.
#[derive(Default)]
struct Shared {
    ended: AtomicBool,
    bytes: AtomicU64,
    accesses: AtomicU64,
}

fn run() -> io::Result<()> {
    let mut line = String::new();
    io::stdin().lock().read_line(&mut line)?;
    let task: Task = serde_json::from_str(&line)?;
    let shared = Arc::<Shared>::default();
    let watched = shared.clone();
    thread::spawn(move || {
        let _ = io::stdin().lock().read_to_end(&mut Vec::new());
        watched.ended.store(true, Ordering::Relaxed);
    });
    let results: Vec<io::Result<()>> = thread::scope(|scope| {
        let readers = (0..task.threads).map(|thread| {
            let mut reader = Reader {
                choices: Choices::new(!(task.seed << 16 | thread)),
                open: HashMap::new(),
                shared: &shared,
                said: Instant::now(),
            };
            let task = &task;
            scope.spawn(move || reader.run(task))
        });
        // All have to be there before the first is waited for.
        let readers: Vec<_> = readers.collect();
        let join = |reader: thread::ScopedJoinHandle<'_, _>| reader.join();
        readers.into_iter().map(|reader| join(reader).unwrap_or_else(panicked)).collect()
    });
    results.into_iter().collect::<io::Result<()>>()?;
    shared.total()
}

fn panicked(_: Box<dyn std::any::Any + Send>) -> io::Result<()> {
    Err(io::Error::other("a thread panicked"))
}

impl Shared {
    fn total(&self) -> io::Result<()> {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        print_report(&Report::Total { bytes: count(&self.bytes), accesses: count(&self.accesses) })
    }
}

/// A reader's state for a file.
enum Opened {
    File(File),
    Map(Map),
}

struct Reader<'a> {
    choices: Choices,
    open: HashMap<usize, Opened>,
    shared: &'a Shared,
    said: Instant,
}

impl Reader<'_> {
    fn run(&mut self, task: &Task) -> io::Result<()> {
        if task.once {
            return self.once(task);
        }
        while !self.shared.ended.load(Ordering::Relaxed) {
            self.random(task)?;
        }
        Ok(())
    }

    /// Every byte of every file in order.
    fn once(&mut self, task: &Task) -> io::Result<()> {
        for (index, file) in task.files.iter().enumerate() {
            let mut offset = 0;
            while offset < file.size {
                let len = PIECE.min(file.size - offset);
                self.access(task, index, offset, len)?;
                offset += len;
            }
            self.open.clear();
        }
        Ok(())
    }

    /// One access somewhere.
    fn random(&mut self, task: &Task) -> io::Result<()> {
        let index = self.choices.below(task.files.len() as u64) as usize;
        let size = task.files[index].size;
        let offset = self.choices.below(size);
        let longest = PIECE.min(size - offset);
        let len = match self.choices.below(3) {
            0 => longest.min(1 + self.choices.below(4096)),
            1 => longest,
            _ => 1 + self.choices.below(longest),
        };
        // Now and then a file is opened again, so that open(2) is in the mix as well.
        if self.choices.below(16) == 0 {
            self.open.remove(&index);
        }
        if self.open.len() as u64 >= OPEN / task.threads {
            self.open.clear();
        }
        self.access(task, index, offset, len)
    }

    fn access(&mut self, task: &Task, index: usize, offset: u64, len: u64) -> io::Result<()> {
        let file = &task.files[index];
        let began = now();
        let (len, result) = match task.mode {
            Mode::Execve => (file.size, execute(file, &task.code).map(|wrong| (file.size, wrong))),
            _ => (len, self.piece(task.mode, index, file, offset, len)),
        };
        let access = Access { path: file.path.clone(), offset, len, began, ended: now() };
        self.shared.accesses.fetch_add(1, Ordering::Relaxed);
        if access.took() > LONG {
            print_report(&Report::Wait(access.clone()))?;
        }
        match result {
            Ok((compared, wrong)) => {
                self.shared.bytes.fetch_add(compared, Ordering::Relaxed);
                if wrong.bytes > 0 {
                    print_report(&Report::Wrong { access, wrong })?;
                }
            }
            Err(error) => {
                self.open.remove(&index);
                print_report(&Report::Failed { access, error: error.to_string() })?;
                // A reader retries after errors, though not a million times a second.
                thread::sleep(Duration::from_millis(1));
            }
        }
        if self.said.elapsed() > TOTALS {
            self.said = Instant::now();
            self.shared.total()?;
        }
        Ok(())
    }

    /// Reads and compares one piece of a file.
    fn piece(
        &mut self,
        mode: Mode,
        index: usize,
        file: &Readable,
        offset: u64,
        len: u64,
    ) -> io::Result<(u64, Wrong)> {
        let opened = match self.open.entry(index) {
            std::collections::hash_map::Entry::Occupied(opened) => opened.into_mut(),
            std::collections::hash_map::Entry::Vacant(vacant) => vacant.insert(match mode {
                Mode::Mmap => Opened::Map(Map::of(FinishedFile::open(&file.path)?)?),
                _ => Opened::File(File::open(&file.path)?),
            }),
        };
        let wrong = match opened {
            Opened::Map(map) => {
                let piece = map.get(offset as usize..(offset + len) as usize);
                let piece = piece.ok_or_else(|| io::Error::other("the file is too short"))?;
                content::check(file.seed, offset, piece)
            }
            Opened::File(opened) => {
                // Drop cached pages now and then, so that the kernel asks for them again.
                if self.choices.below(8) == 0 {
                    let len = std::num::NonZeroU64::new(len);
                    fadvise(&*opened, offset, len, Advice::DontNeed)?;
                }
                let mut bytes = vec![0; len as usize];
                opened.read_exact_at(&mut bytes, offset)?;
                content::check(file.seed, offset, &bytes)
            }
        };
        Ok((len, wrong))
    }
}

/// Runs a program that checks itself.
fn execute(file: &Readable, code: &str) -> io::Result<Wrong> {
    let mut program = Command::new(&file.path);
    let output = program.args([&file.seed.to_string(), code]).stdin(Stdio::null()).output()?;
    if output.status.success() {
        return Ok(Wrong::default());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let number = |text: Option<&str>| text.and_then(|text| text.parse().ok()).unwrap_or(0);
    match said.strip_prefix("wrong content: ") {
        Some(counts) => {
            let mut words = counts.split_whitespace();
            let bytes = number(words.next());
            Ok(Wrong { bytes, zeros: number(words.nth(1)) })
        }
        None if said.starts_with("wrong code") => Ok(Wrong { bytes: PAYLOAD as u64, zeros: 0 }),
        None => match output.status.signal() {
            Some(signal) => Err(io::Error::other(format!("signal {signal}"))),
            None => Err(io::Error::other(format!("{}: {}", output.status, said.trim_end()))),
        },
    }
}

fn print_report(report: &Report) -> io::Result<()> {
    let mut line = serde_json::to_string(report)?;
    line.push('\n');
    let mut output = io::stdout().lock();
    output.write_all(line.as_bytes())?;
    output.flush()
}
