//! Containers that containerd starts on images of its own and of ours.

mod bundled;
mod by_layer;
mod chain_ids;
mod commit;
mod crowd;
mod foreign;
mod leaks;
mod lost;
mod machines;
mod mapped;
mod mirror;
mod programs;
mod removal;
mod restarts;
mod resumed;
mod rig;
mod signed;
mod soak;
mod trees;
mod unmodified;
mod unpacked;

use std::{fs, path::Path};

use foreign::media_types_of_docker_make_no_difference;
use programs::{Containerd, on_both};
use rig::{Rig, assert_same};

on_both!(
    ordinary_images_are_what_overlayfs_makes_of_them,
    lazy_images_arrive_as_they_are_read,
    lazy_images_show_the_same_tree,
    the_driver_is_the_configurations,
    an_image_without_its_data_is_refused,
    one_tag_has_an_image_for_each_snapshotter,
    the_kubelet_is_told_where_images_are,
    media_types_of_docker_make_no_difference,
);

/// Ordinary images, pulled and run as with overlayfs.
fn ordinary_images_are_what_overlayfs_makes_of_them(containerd: Containerd) {
    let Some(rig) = Rig::new(containerd, "debian-slim") else { return };
    let image = rig.push_ordinary();
    let [overlayfs, lazuli] = ["overlayfs", "lazuli"].map(|snapshotter| {
        rig.ctr(&["image", "pull", "--plain-http", "--snapshotter", snapshotter, &image]);
        rig.tree(snapshotter, &rig.chain_id(&image))
    });
    assert!(lazuli.len() > 1000, "{}", lazuli.len());
    assert_same(&overlayfs, &lazuli);
    let script = "rm /etc/passwd && mv /etc /moved && echo new > /etc && cat /moved/hostname /etc";
    let name = rig.own("c");
    let outputs = ["overlayfs", "lazuli"].map(|snapshotter| {
        let run = ["run", "--rm", "--snapshotter", snapshotter, &image, &name, "sh", "-c", script];
        rig.try_ctr(&run)
    });
    assert!(outputs[1].1.ends_with("new\n"), "{outputs:?}");
    assert_eq!(outputs[0], outputs[1]);
    rig.remove_images(&[&image]);
    rig.nothing_left();
}

/// A lazy image: pulled without its data, run, its server killed under it, removed.
fn lazy_images_arrive_as_they_are_read(containerd: Containerd) {
    let Some(rig) = Rig::new(containerd, "debian-slim") else { return };
    let image = rig.push_lazy();
    let chain = match containerd {
        // Its `ctr` passes nothing on.
        Containerd::Debian => rig.pull(&image).unwrap(),
        Containerd::Current => {
            rig.ctr(&["image", "pull", "--plain-http", "--snapshotter", "lazuli", &image]);
            rig.chain_id(&image)
        }
    };
    let [mounted] = &rig.mounts()[..] else { panic!("{:#?}", rig.mounts()) };
    assert!(mounted["image"].as_str().unwrap().starts_with(&image), "{mounted:#}");

    let [first, second] = ["c1", "c2"].map(|name| rig.own(name));
    rig.ctr(&["run", "-d", "--snapshotter", "lazuli", &image, &first, "sleep", "1000"]);
    let exec = |arguments: &[&str]| {
        let id = format!("e{}", next_number());
        rig.ctr(&[&["task", "exec", "--exec-id", &id, &first], arguments].concat())
    };
    assert_eq!(exec(&["head", "-c", "4", "/usr/bin/perl"]), "\u{7f}ELF");
    let [mounted] = &rig.mounts()[..] else { panic!() };
    let [fetched, total] =
        ["bytes_fetched", "bytes_total"].map(|key| mounted[key].as_u64().unwrap());
    assert!(fetched * 4 < total, "{fetched} of {total} bytes fetched");

    // The server dies under the container; unread data arrives from the next one.
    rig.kill_worker();
    exec(&[
        "sh",
        "-c",
        "cat /usr/bin/* /usr/lib/x86_64-linux-gnu/* >/dev/null 2>&1; test -s /usr/bin/tar",
    ]);
    exec(&["sh", "-c", "echo written > /root/new && mv /usr/share/doc /root/doc"]);
    assert_eq!(exec(&["cat", "/root/new"]), "written\n");

    // A second container of the image shares everything; a takeover goes unnoticed.
    rig.lazuli.ok(["daemon", "--takeover"]);
    let run =
        ["run", "--rm", "--snapshotter", "lazuli", &image, &second, "cat", "/etc/debian_version"];
    assert!(!rig.ctr(&run).is_empty());
    assert_eq!(rig.mounts().len(), 1);

    rig.end(&first);
    assert!(rig.ctr(&["snapshot", "--snapshotter", "lazuli", "ls"]).contains(&chain));
    rig.remove_images(&[&image]);
    rig.nothing_left();
}

/// Lazy images show the same tree as their sources under overlayfs.
fn lazy_images_show_the_same_tree(containerd: Containerd) {
    let Some(rig) = Rig::new(containerd, "busybox") else { return };
    let (ordinary, lazy) = (rig.push_ordinary(), rig.push_lazy());
    rig.ctr(&["image", "pull", "--plain-http", "--snapshotter", "overlayfs", &ordinary]);
    let theirs = rig.tree("overlayfs", &rig.chain_id(&ordinary));
    let ours = rig.tree("lazuli", &rig.pull(&lazy).unwrap());
    assert_same(&theirs, &ours);
    rig.remove_images(&[&lazy, &ordinary]);
    rig.nothing_left();
}

/// Nodes may be told to serve containers through FUSE.
fn the_driver_is_the_configurations(containerd: Containerd) {
    let Some(rig) = Rig::configured(containerd, "busybox", "driver = \"fuse\"\n") else { return };
    let image = rig.push_lazy();
    rig.pull(&image).unwrap();
    let [mounted] = &rig.mounts()[..] else { panic!("{:#?}", rig.mounts()) };
    assert_eq!(mounted["driver"], "fuse", "{mounted:#}");
    let name = rig.own("c");
    let run = ["run", "--rm", "--snapshotter", "lazuli", &image, &name, "ls", "/bin/sh"];
    assert_eq!(rig.ctr(&run), "/bin/sh\n");
    rig.remove_images(&[&image]);
    rig.nothing_left();
}

/// Data that is not where it should be is noticed while the image is pulled, and not by the
/// container.
fn an_image_without_its_data_is_refused(containerd: Containerd) {
    let Some(rig) = Rig::new(containerd, "busybox") else { return };
    let image = rig.push_lazy();
    rig.ctr(&["content", "fetch", "--plain-http", "--metadata-only", &image]);
    let manifest = rig.content(&rig.manifest_digest(&image));
    let blob = manifest["layers"][0]["digest"].as_str().unwrap();
    rig.lose_blob(blob);
    let error = rig.pull(&image).unwrap_err().to_string();
    assert!(error.contains(&image) && error.contains(blob), "{error}");
    assert!(rig.mounts().is_empty());
    rig.remove_images(&[&image]);
    rig.nothing_left();
}

/// An index of both images: nodes without Lazuli run the ordinary one, whatever containerd they
/// have.
fn one_tag_has_an_image_for_each_snapshotter(containerd: Containerd) {
    let Some(rig) = Rig::new(containerd, "busybox") else { return };
    let ordinary = rig.push_ordinary();
    let both = ordinary.replace(":ordinary", ":both");
    rig.lazuli.ok(["convert", &ordinary, &both, "--keep-oci"]);
    let pull = |arguments: &[&str]| {
        rig.ctr(&[&["image", "pull", "--plain-http"], arguments, &[&both]].concat());
    };
    let run = |snapshotter: &str| {
        let name = rig.own(snapshotter);
        let run = ["run", "--rm", "--snapshotter", snapshotter, &both, &name, "ls", "/bin/sh"];
        assert_eq!(rig.ctr(&run), "/bin/sh\n");
    };
    for snapshotter in ["overlayfs", "lazuli"] {
        pull(&["--snapshotter", snapshotter]);
        run(snapshotter);
    }
    assert!(rig.mounts().is_empty(), "{:#?}", rig.mounts());
    // Through CRI, as nodes of Kubernetes do.
    rig.cri.pull(&both, None).unwrap();
    let pod = rig.cri.start("both", &both, &["sleep", "1000000"]).unwrap();
    let output = rig.cri.exec(&pod.container, &["ls", "/bin/sh"]).unwrap();
    assert_eq!(output.stdout, b"/bin/sh\n");
    rig.cri.remove(&pod.sandbox).unwrap();
    rig.remove_images(&[&both]);

    // By itself, Lazuli takes the lazy one.
    let directory = rig.lazuli.directory("mnt");
    let mountpoint = directory.to_str().unwrap();
    rig.lazuli.ok(["mount", &both, mountpoint]);
    assert!(directory.join("bin/sh").exists());
    rig.lazuli.ok(["umount", mountpoint]);
    rig.nothing_left();
}

/// Without a directory that exists, the kubelet's statistics of the node fail, and with them every
/// eviction.
fn the_kubelet_is_told_where_images_are(containerd: Containerd) {
    let Some(rig) = Rig::new(containerd, "busybox") else { return };
    let directories = rig.cri.image_directories().unwrap();
    match containerd {
        // It looks where its own snapshotters are, whatever the configuration says.
        Containerd::Debian => assert_eq!(directories.len(), 1, "{directories:?}"),
        Containerd::Current => {
            assert_eq!(directories, [rig.lazuli.root()]);
            assert!(rig.lazuli.root().is_dir());
        }
    }
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
