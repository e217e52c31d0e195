//! The versions of containerd to test with.

use std::{
    env,
    ffi::OsString,
    path::{Path, PathBuf},
    process::Command,
};

use lazuli_testkit::kernel::{Feature, require, skip};

/// A containerd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Containerd {
    /// 1.6, which Debian packages.
    Debian,
    /// 2.x, in the directory that `LAZULI_CONTAINERD` names; `scripts/containerd` builds it.
    Current,
}

impl Containerd {
    /// Returns whether this machine has it.
    pub(super) fn is_here(self) -> bool {
        match self {
            Containerd::Debian => {
                ["containerd", "ctr"].map(Feature::Program).into_iter().all(require)
            }
            Containerd::Current => {
                let Some(directory) = built() else {
                    skip("containerd 2.x", "LAZULI_CONTAINERD names none; `make test` builds it");
                    return false;
                };
                let found = directory.join("containerd").exists();
                assert!(found, "LAZULI_CONTAINERD: no containerd in {}", directory.display());
                true
            }
        }
    }

    /// One of its programs, with a PATH to the others.
    pub(super) fn command(self, program: &str) -> Command {
        let Some(directory) = built().filter(|_| self == Containerd::Current) else {
            return Command::new(program);
        };
        let mut command = Command::new(directory.join(program));
        let mut path = OsString::from(&directory);
        if let Some(rest) = env::var_os("PATH") {
            path.push(":");
            path.push(rest);
        }
        command.env("PATH", path);
        command
    }

    /// Its configuration: everything is kept in `directory`, and Lazuli is its default snapshotter.
    pub(super) fn configuration(self, directory: &Path) -> String {
        let path = |name: &str| directory.join(name);
        let lazuli = path("root");
        let [root, state, socket, ttrpc, snapshotter, hosts, verifiers] =
            ["containerd", "state", "c.sock", "t.sock", "s.sock", HOSTS, VERIFIERS].map(path);
        // Two plugins have one place for the whole machine; of two containerds that start with NRI,
        // one may end.
        let common = format!(
            "root = {root:?}\nstate = {state:?}\n\
             disabled_plugins = [\"io.containerd.internal.v1.opt\", \"io.containerd.nri.v1.nri\"]\n\
             [grpc]\naddress = {socket:?}\n[ttrpc]\naddress = {ttrpc:?}\n\
             [proxy_plugins.lazuli]\ntype = \"snapshot\"\naddress = {snapshotter:?}\n"
        );
        // A test may run without the privilege to lower the OOM scores of its processes.
        let own = match self {
            Containerd::Debian => format!(
                "[plugins.\"io.containerd.grpc.v1.cri\"]\n\
                 sandbox_image = \"{PAUSE}\"\nrestrict_oom_score_adj = true\n\
                 [plugins.\"io.containerd.grpc.v1.cri\".containerd]\n\
                 snapshotter = \"lazuli\"\ndisable_snapshot_annotations = false\n\
                 [plugins.\"io.containerd.grpc.v1.cri\".registry]\nconfig_path = {hosts:?}\n"
            ),
            Containerd::Current => format!(
                "capabilities = [\"remap-ids\"]\n\
                 [proxy_plugins.lazuli.exports]\nroot = {lazuli:?}\n\
                 enable_remote_snapshot_annotations = \"true\"\n\
                 [plugins.\"io.containerd.cri.v1.images\"]\n\
                 snapshotter = \"lazuli\"\ndisable_snapshot_annotations = false\n\
                 [plugins.\"io.containerd.cri.v1.images\".registry]\nconfig_path = {hosts:?}\n\
                 [plugins.\"io.containerd.cri.v1.images\".pinned_images]\nsandbox = \"{PAUSE}\"\n\
                 [plugins.\"io.containerd.cri.v1.runtime\"]\nrestrict_oom_score_adj = true\n\
                 [plugins.\"io.containerd.image-verifier.v1.bindir\"]\nbin_dir = {verifiers:?}\n\
                 [[plugins.\"io.containerd.transfer.v1.local\".unpack_config]]\n\
                 platform = \"linux/amd64\"\nsnapshotter = \"overlayfs\"\n\
                 [[plugins.\"io.containerd.transfer.v1.local\".unpack_config]]\n\
                 platform = \"linux/amd64\"\nsnapshotter = \"lazuli\"\n"
            ),
        };
        let version = if self == Containerd::Debian { 2 } else { 3 };
        format!("version = {version}\n{common}{own}")
    }
}

/// The directory with settings of registries.
pub(super) const HOSTS: &str = "hosts";

/// The directory of verifier programs that containerd 2 asks whether an image may be pulled, if it
/// exists.
pub(super) const VERIFIERS: &str = "verifiers";

/// The image of sandboxes.
pub(super) const PAUSE: &str = "pause.example/pause:1";

fn built() -> Option<PathBuf> {
    env::var_os("LAZULI_CONTAINERD").map(PathBuf::from)
}

/// Declares a test for each of the functions, with either containerd.
macro_rules! on_both {
    ($($test:ident),* $(,)?) => {
        mod debian {
            $(#[test] fn $test() { super::$test($crate::containerd::programs::Containerd::Debian) })*
        }
        mod current {
            $(#[test] fn $test() { super::$test($crate::containerd::programs::Containerd::Current) })*
        }
    };
}
pub(super) use on_both;
