//! Containers that containerd starts on images of its own and of ours.

mod rig;

use std::{fs, path::Path};

use rig::{Rig, assert_same};
use rustix::process::{Pid, Signal, kill_process};

/// Ordinary images, pulled and run by `ctr` as with overlayfs.
#[test]
fn ordinary_images_are_what_overlayfs_makes_of_them() {
    let Some(rig) = Rig::new("debian-slim") else { return };
    let image = rig.push_ordinary();
    let [overlayfs, lazuli] = ["overlayfs", "lazuli"].map(|snapshotter| {
        rig.ctr(&["image", "pull", "--plain-http", "--snapshotter", snapshotter, &image]);
        rig.tree(snapshotter, &rig.chain_id(&image))
    });
    assert!(lazuli.len() > 1000, "{}", lazuli.len());
    assert_same(&overlayfs, &lazuli);
    let script = "rm /etc/passwd && mv /etc /moved && echo new > /etc && cat /moved/hostname /etc";
    let outputs = ["overlayfs", "lazuli"].map(|snapshotter| {
        let run = ["run", "--rm", "--snapshotter", snapshotter, &image, "c", "sh", "-c", script];
        rig.try_ctr(&run).1
    });
    assert!(outputs[1].ends_with("new\n"), "{outputs:?}");
    assert_eq!(outputs[0], outputs[1]);
    rig.ctr(&["image", "rm", "--sync", &image]);
    rig.nothing_left();
}

/// A lazy image: pulled without its data, run, its server killed under it, removed.
#[test]
fn lazy_images_arrive_as_they_are_read() {
    let Some(rig) = Rig::new("debian-slim") else { return };
    let image = rig.push_lazy();
    let chain = rig.pull_lazily(&image).unwrap();
    let [mounted] = &rig.mounts()[..] else { panic!("{:#?}", rig.mounts()) };
    assert!(mounted["image"].as_str().unwrap().starts_with(&image), "{mounted:#}");

    rig.ctr(&["run", "-d", "--snapshotter", "lazuli", &image, "c1", "sleep", "1000"]);
    let exec = |arguments: &[&str]| {
        let id = format!("e{}", next_number());
        rig.ctr(&[&["task", "exec", "--exec-id", &id, "c1"], arguments].concat())
    };
    assert_eq!(exec(&["head", "-c", "4", "/usr/bin/perl"]), "\u{7f}ELF");
    let [mounted] = &rig.mounts()[..] else { panic!() };
    let [fetched, total] =
        ["bytes_fetched", "bytes_total"].map(|key| mounted[key].as_u64().unwrap());
    assert!(fetched * 4 < total, "{fetched} of {total} bytes fetched");

    // The server dies under the container; what was never read arrives from the next one.
    let worker = rig.lazuli.status()["daemon"]["worker_pid"].as_i64().unwrap();
    let worker = Pid::from_raw(i32::try_from(worker).unwrap()).unwrap();
    kill_process(worker, Signal::KILL).unwrap();
    exec(&[
        "sh",
        "-c",
        "cat /usr/bin/* /usr/lib/x86_64-linux-gnu/* >/dev/null 2>&1; test -s /usr/bin/tar",
    ]);
    exec(&["sh", "-c", "echo written > /root/new && mv /usr/share/doc /root/doc"]);
    assert_eq!(exec(&["cat", "/root/new"]), "written\n");
    assert_ne!(rig.lazuli.status()["daemon"]["worker_pid"], worker.as_raw_nonzero().get());

    // A second container of the image shares everything; a takeover goes unnoticed.
    rig.lazuli.ok(["daemon", "--takeover"]);
    let run =
        ["run", "--rm", "--snapshotter", "lazuli", &image, "c2", "cat", "/etc/debian_version"];
    assert!(!rig.ctr(&run).is_empty());
    assert_eq!(rig.mounts().len(), 1);

    rig.ctr(&["task", "kill", "--signal", "KILL", "c1"]);
    rig.settled(&["task", "rm", "c1"]);
    rig.ctr(&["container", "rm", "c1"]);
    assert!(rig.ctr(&["snapshot", "--snapshotter", "lazuli", "ls"]).contains(&chain));
    rig.ctr(&["image", "rm", "--sync", &image]);
    rig.nothing_left();
}

/// The same tree as the image that it was made of has with overlayfs.
#[test]
fn lazy_images_show_the_same_tree() {
    let Some(rig) = Rig::new("busybox") else { return };
    let (ordinary, lazy) = (rig.push_ordinary(), rig.push_lazy());
    rig.ctr(&["image", "pull", "--plain-http", "--snapshotter", "overlayfs", &ordinary]);
    let theirs = rig.tree("overlayfs", &rig.chain_id(&ordinary));
    let ours = rig.tree("lazuli", &rig.pull_lazily(&lazy).unwrap());
    assert_same(&theirs, &ours);
    rig.ctr(&["image", "rm", "--sync", &lazy, &ordinary]);
    rig.nothing_left();
}

/// Data that is not where it should be is noticed while the image is pulled, and not by the container.
#[test]
fn an_image_without_its_data_is_refused() {
    let Some(mut rig) = Rig::new("busybox") else { return };
    let image = rig.push_lazy();
    let blob = rig.lose_data(&image);
    let error = rig.pull_lazily(&image).unwrap_err();
    assert!(error.contains(&image) && error.contains(&blob), "{error}");
    assert!(rig.mounts().is_empty());
    rig.ctr(&["image", "rm", "--sync", &image]);
}

/// A number that was not given before.
fn next_number() -> usize {
    use std::sync::atomic::{AtomicUsize, Ordering};
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Names in a directory.
fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}
