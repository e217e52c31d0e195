//! Processes die under containers that run.

use std::thread;

use rustix::process::Signal;

use super::{
    programs::{Containerd, on_both},
    rig::Rig,
};

on_both!(containers_outlive_containerd_worker_and_keeper);

/// The files to read after each death; none was read before.
const PARTS: [&str; 6] = [
    "/usr/bin/[a-d]*",
    "/usr/bin/[e-m]*",
    "/usr/bin/[n-z]*",
    "/usr/sbin/*",
    "/usr/lib/x86_64-linux-gnu/*",
    "/usr/share/doc/*/copyright",
];

fn containers_outlive_containerd_worker_and_keeper(containerd: Containerd) {
    let Some(rig) = Rig::new(containerd, "debian-slim") else { return };
    let (ordinary, lazy) = (rig.push_ordinary(), rig.push_lazy());
    // The expected content, from a container on an ordinary image.
    rig.pull(&ordinary).unwrap();
    let reference = rig.cri.start("reference", &ordinary, &["sleep", "1000"]).unwrap();
    let sums = |container: &str, part: usize| {
        let command = format!("sha256sum {} 2>/dev/null; true", PARTS[part]);
        let output = rig.cri.exec(container, &["sh", "-c", &command]).unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    let expected: Vec<_> = (0..PARTS.len()).map(|part| sums(&reference.container, part)).collect();
    assert!(expected.iter().all(|part| part.len() > 500), "{expected:#?}");
    rig.cri.remove(&reference.sandbox).unwrap();

    rig.pull(&lazy).unwrap();
    let pod = rig.cri.start("pod", &lazy, &["sleep", "1000"]).unwrap();
    let deaths: [(&str, &(dyn Fn() + Sync)); PARTS.len()] = [
        ("worker", &|| {
            rig.kill_worker();
            rig.reconnect();
        }),
        ("keeper", &|| rig.kill_keeper()),
        ("containerd, told to end", &|| {
            rig.end_containerd(Signal::TERM);
            rig.start_containerd();
        }),
        ("containerd, killed", &|| {
            rig.end_containerd(Signal::KILL);
            rig.start_containerd();
        }),
        ("both of Lazuli", &|| {
            rig.kill_lazuli();
            rig.start_daemon();
            rig.reconnect();
        }),
        ("all three", &|| {
            rig.end_containerd(Signal::KILL);
            rig.kill_lazuli();
            rig.start_daemon();
            rig.start_containerd();
        }),
    ];
    for (part, (process, die)) in deaths.into_iter().enumerate() {
        // A reader that waits notices nothing of Lazuli's own deaths, unless both processes are
        // gone.
        let meanwhile = part < 2;
        let seen = thread::scope(|scope| {
            let reader = meanwhile.then(|| scope.spawn(|| sums(&pod.container, part)));
            die();
            reader.map(|reader| reader.join().unwrap())
        });
        let seen = seen.unwrap_or_else(|| sums(&pod.container, part));
        assert_eq!(seen, expected[part], "after the death of {process}");
        let another = rig.cri.start(&format!("after-{part}"), &lazy, &["sleep", "1000"]).unwrap();
        assert_eq!(sums(&another.container, part), expected[part], "after the death of {process}");
        rig.cri.remove(&another.sandbox).unwrap();
        assert_eq!(rig.mounts().len(), 1, "after the death of {process}");
    }
    rig.cri.remove(&pod.sandbox).unwrap();
    rig.remove_images(&[&lazy, &ordinary]);
    rig.nothing_left();
}
