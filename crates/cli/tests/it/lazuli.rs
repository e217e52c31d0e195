//! A private Lazuli: its own state directory, its own daemon, gone with the value.

use std::{
    ffi::OsStr,
    path::{Path, PathBuf},
    process::{Command, Output},
    thread,
    time::{Duration, Instant},
};

use lazuli_testkit::{kernel::skip, network::Node};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

pub(crate) struct Lazuli {
    directory: TempDir,
    root: &'static str,
    node: Option<Node>,
}

impl Lazuli {
    pub(crate) fn new() -> Self {
        // Not the default temporary directory: it may be a tmpfs, which has no pre-content events.
        let directory = tempfile::Builder::new().prefix("lazuli-test-").tempdir_in("/var/tmp");
        let lazuli = Lazuli { directory: directory.unwrap(), root: "root", node: None };
        lazuli.configure("");
        lazuli
    }

    /// Writes the configuration, with background fetches disabled: most tests count the requests
    /// that readers cause.
    pub(crate) fn configure(&self, text: &str) {
        let quiet = "[prefetch]\nahead = \"nothing\"\nrest_bytes_per_second = 0\n";
        self.configure_all(&format!("{text}\n{quiet}"));
    }

    /// Writes the whole configuration. The fill level of the machine's disk doesn't matter, unless
    /// `text` sets it.
    pub(crate) fn configure_all(&self, text: &str) {
        let (table, keep) = ("[cache]\n", "[cache]\nkeep_free = 0\n");
        let text = match text {
            text if text.contains("keep_free") => text.to_owned(),
            text if text.contains(table) => text.replace(table, keep),
            text => format!("{text}\n{keep}"),
        };
        std::fs::write(self.path("config.toml"), text).unwrap();
    }

    /// A path in the private directory.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// A new empty directory.
    pub(crate) fn directory(&self, name: &str) -> PathBuf {
        let path = self.path(name);
        std::fs::create_dir_all(&path).unwrap();
        path
    }

    pub(crate) fn root(&self) -> PathBuf {
        self.path(self.root)
    }

    /// The same with a state directory that does not exist yet, below a symbolic link.
    pub(crate) fn behind_a_link(mut self) -> Self {
        std::os::unix::fs::symlink(".", self.path("link")).unwrap();
        self.root = "link/new";
        self
    }

    /// Runs [`Lazuli::output`] and its callers on a node of another network.
    pub(crate) fn on(mut self, node: Node) -> Self {
        self.node = Some(node);
        self
    }

    pub(crate) fn command<A: AsRef<OsStr>>(
        &self,
        arguments: impl IntoIterator<Item = A>,
    ) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_lazuli"));
        command.arg("--root").arg(self.root()).arg("--config").arg(self.path("config.toml"));
        command.args(arguments).current_dir(self.directory.path());
        command.env("XDG_CACHE_HOME", self.path("cache"));
        // Not the logins of the user that runs the tests.
        command.env("DOCKER_CONFIG", self.path("docker"));
        command
    }

    pub(crate) fn output<A: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = A>) -> Output {
        let mut command = self.command(arguments);
        match &self.node {
            Some(node) => node.inside(|| command.output()).unwrap().unwrap(),
            None => command.output().unwrap(),
        }
    }

    /// Standard output of a command that must succeed.
    #[track_caller]
    pub(crate) fn ok<A: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = A>) -> String {
        let arguments: Vec<_> = arguments.into_iter().collect();
        let mut output = self.output(&arguments);
        // A program that another test starts has copies of our open files until it is executed.
        let begun = Instant::now();
        while is_busy(&output) && begun.elapsed() < Duration::from_secs(30) {
            thread::sleep(Duration::from_millis(50));
            output = self.output(&arguments);
        }
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}: {error}{}", output.status, self.log());
        String::from_utf8(output.stdout).unwrap()
    }

    /// Standard error of a command that must fail.
    #[track_caller]
    pub(crate) fn fails<A: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = A>) -> String {
        let output = self.output(arguments);
        assert!(!output.status.success(), "succeeded: {}", String::from_utf8_lossy(&output.stdout));
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(!error.contains("panicked"), "{error}");
        error
    }

    /// Checks that no index and no lazy form of an image counts under this configuration: the
    /// daemon of a new node pulls the image before it mounts it.
    #[track_caller]
    pub(crate) fn assert_is_pulled_whole(&self, image: &str) {
        let node = Lazuli::new();
        std::fs::copy(self.path("config.toml"), node.path("config.toml")).unwrap();
        let mountpoint = node.directory("mnt");
        let at = mountpoint.to_str().unwrap();
        let mounted = node.output(["mount", image, at, "--driver", "fuse"]);
        let said = String::from_utf8_lossy(&mounted.stderr);
        assert!(mounted.status.success() && said.contains("has no index"), "{said}");
        node.ok(["umount", at]);
    }

    /// `status --json`.
    #[track_caller]
    pub(crate) fn status(&self) -> Value {
        serde_json::from_str(&self.ok(["status", "--json"])).unwrap()
    }

    /// `status --json` of one mount.
    #[track_caller]
    pub(crate) fn mount_status(&self, mountpoint: &Path) -> Value {
        let status = self.status();
        let mounts = status["mounts"].as_array().unwrap();
        let own = mounts.iter().find(|mount| mount["mountpoint"] == mountpoint.to_str().unwrap());
        own.unwrap_or_else(|| panic!("{} is not in {status:#}", mountpoint.display())).clone()
    }

    /// The process that serves readers.
    pub(crate) fn worker(&self) -> Pid {
        let pid = self.status()["daemon"]["worker_pid"].as_i64().unwrap();
        Pid::from_raw(i32::try_from(pid).unwrap()).unwrap()
    }

    /// Kills the worker, and waits for the one that the keeper starts in its place.
    pub(crate) fn kill(&self, worker: Pid) {
        kill_process(worker, Signal::KILL).unwrap();
        while self.worker() == worker {
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }

    /// The daemon's log.
    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.root().join("daemon.log")).unwrap_or_default()
    }
}

impl Drop for Lazuli {
    fn drop(&mut self) {
        let _ = self.output(["stop", "--force"]);
        if std::thread::panicking() {
            eprintln!("daemon log:\n{}", self.log());
        }
        let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let own = self.directory.path().to_str().unwrap();
        let left: Vec<_> = table.lines().filter(|line| line.contains(own)).collect();
        assert!(left.is_empty() || std::thread::panicking(), "left mounted: {left:#?}");
    }
}

/// The OCI layout of a corpus image, if `LAZULI_CORPUS` has it.
pub(crate) fn corpus(name: &str) -> Option<PathBuf> {
    let layout = std::env::var_os("LAZULI_CORPUS").map(|corpus| PathBuf::from(corpus).join(name));
    let found = layout.filter(|layout| layout.join("index.json").exists());
    if found.is_none() {
        let needs = format_args!("the corpus image {name}");
        skip(needs, "LAZULI_CORPUS has none; `make test` builds it");
    }
    found
}

/// Returns whether an unmount was refused because files are open.
fn is_busy(output: &Output) -> bool {
    !output.status.success() && output.stderr.trim_ascii_end().ends_with(b"is in use")
}
