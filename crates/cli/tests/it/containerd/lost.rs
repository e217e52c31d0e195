//! containerd or Lazuli lost its state, and the other one did not.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use rustix::process::{Pid, Signal, kill_process};

use super::{
    programs::{Containerd, on_both},
    rig::{Rig, unmount_free, wait},
};

on_both!(a_new_containerd_gets_on_with_what_the_old_one_left, lost_snapshots_are_pulled_again);

/// Names collide, and pulls and containers go on; containers of the old one keep their files, until
/// they end.
fn a_new_containerd_gets_on_with_what_the_old_one_left(containerd: Containerd) {
    let Some(rig) = Rig::new(containerd, "busybox") else { return };
    let images = [rig.push_ordinary(), rig.push_lazy()];
    let chains = images.each_ref().map(|image| rig.pull(image).unwrap());
    let olds = images.each_ref().map(|image| {
        let name = rig.own(if image.ends_with("lazy") { "old-lazy" } else { "old" });
        let script = "echo mine > /own && exec sleep 1000";
        rig.ctr(&["run", "-d", "--snapshotter", "lazuli", image, &name, "sh", "-c", script]);
        Left::of(&rig, name)
    });
    rig.end_containerd(Signal::KILL);
    fs::remove_dir_all(rig.lazuli.path("containerd")).unwrap();
    fs::rename(rig.lazuli.path("state"), rig.lazuli.path("old-state")).unwrap();
    rig.start_containerd();

    for (image, chain) in images.iter().zip(&chains) {
        assert_eq!(rig.pull(image).unwrap(), *chain);
        let name = rig.own("new");
        let run = ["run", "--rm", "--snapshotter", "lazuli", image, &name, "ls", "/bin/sh"];
        assert_eq!(rig.ctr(&run), "/bin/sh\n");
    }
    // containerd's collector removes unknown snapshots.
    rig.remove_images(&[&images[0], &images[1]]);
    wait("the end of all records", || {
        let snapshots = &rig.lazuli.status()["snapshots"];
        snapshots["committed"] == 0 && snapshots["active"] == 0
    });
    assert!(rig.lazuli.status()["snapshots"]["removed"].as_u64().unwrap() >= 3);
    for old in &olds {
        assert_eq!(fs::read(old.root().join("own")).unwrap(), b"mine\n");
        assert!(fs::read_dir(old.root().join("bin")).unwrap().count() > 10);
        fs::write(old.root().join("more"), "written").unwrap();
        fs::remove_file(old.root().join("bin/ls")).unwrap();
    }
    for old in olds {
        old.end(&rig.lazuli.path("old-state"));
    }
    // The next removal finds that they are unused.
    rig.pull(&images[1]).unwrap();
    rig.remove_images(&[&images[1]]);
    rig.nothing_left();
}

/// containerd gets the name of the missing snapshot, and the remedy.
fn lost_snapshots_are_pulled_again(containerd: Containerd) {
    let Some(rig) = Rig::new(containerd, "busybox") else { return };
    let image = rig.push_ordinary();
    rig.pull(&image).unwrap();
    rig.lazuli.ok(["stop", "--force"]);
    fs::remove_dir_all(rig.lazuli.root().join("snapshots")).unwrap();
    rig.start_daemon();
    let name = rig.own("c");
    let run = ["run", "--rm", "--snapshotter", "lazuli", &image, &name, "ls", "/bin/sh"];
    wait("the reason", || {
        // containerd has to notice first that there is another daemon.
        let (started, output) = rig.try_ctr(&run);
        assert!(!started, "{output}");
        output.contains("pull the image again")
    });
    rig.remove_images(&[&image]);
    rig.pull(&image).unwrap();
    assert_eq!(rig.ctr(&run), "/bin/sh\n");
    rig.remove_images(&[&image]);
    rig.nothing_left();
}

/// A container whose containerd is gone.
struct Left {
    name: String,
    process: Pid,
    shim: Pid,
}

impl Left {
    fn of(rig: &Rig, name: String) -> Self {
        let tasks = rig.ctr(&["task", "ls"]);
        let task = tasks.lines().find(|line| line.starts_with(&name)).unwrap();
        let process = pid(task.split_whitespace().nth(1).unwrap());
        let stat = format!("/proc/{}/stat", process.as_raw_nonzero());
        let stat = fs::read_to_string(stat).unwrap();
        let shim = pid(stat.rsplit(')').next().unwrap().split_whitespace().nth(1).unwrap());
        Left { name, process, shim }
    }

    /// Its files, as it sees them.
    fn root(&self) -> PathBuf {
        format!("/proc/{}/root", self.process.as_raw_nonzero()).into()
    }

    /// Kills it, and removes its mounts below containerd's state directory.
    fn end(self, state: &Path) {
        let _ = kill_process(self.shim, Signal::KILL);
        let mut runc = Command::new("runc");
        runc.args(["--root", "/run/containerd/runc/k8s.io", "delete", "--force", &self.name]);
        assert!(runc.status().unwrap().success());
        let rootfs = Path::new("io.containerd.runtime.v2.task/k8s.io").join(&self.name);
        unmount_free(&state.join(rootfs).join("rootfs"));
    }
}

fn pid(text: &str) -> Pid {
    Pid::from_raw(text.parse().unwrap()).unwrap()
}
