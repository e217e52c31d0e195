//! Files that are deleted when containerd removes an image.

use std::fs;

use lazuli_testkit::{
    oci::{Compression, Image, Layer},
    tarball::{self, Entry},
};
use rustix::process::Signal;

use super::{
    names,
    programs::{Containerd, on_both},
    rig::{Rig, wait},
};

on_both!(removed_images_leave_no_blob_and_no_metadata);

/// Bytes that containerd counts for a snapshot.
fn usage(rig: &Rig, chain: &str) -> u64 {
    let table = rig.ctr(&["snapshot", "--snapshotter", "lazuli", "usage", "-b", chain]);
    let line = table.lines().find(|line| line.starts_with(chain)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Removes one of two images with a common base, and then the other; in between, a worker dies that
/// still has to delete something.
fn removed_images_leave_no_blob_and_no_metadata(containerd: Containerd) {
    let Some(rig) = Rig::new(containerd, "busybox") else { return };
    let layer = |name: &str, byte: u8| {
        let entries = [Entry::file(name, vec![byte; 300_000])];
        Layer::new(tarball::write(&entries), Compression::Gzip)
    };
    let layout = |name: &str, layers: &[Layer]| {
        let layout = rig.lazuli.directory(name);
        Image::new(layers.iter().cloned()).write_layout(&layout, "image").unwrap();
        rig.convert(&layout, &format!("{name}:lazy"))
    };
    let base = layout("base", &[layer("base", 1)]);
    let derived = layout("derived", &[layer("base", 1), layer("more", 2)]);
    let kept = |part: &str| names(&rig.lazuli.root().join(part));
    let chains = [&base, &derived].map(|image| rig.pull(image).unwrap());
    for chain in &chains {
        // Everything is read.
        assert!(rig.tree("lazuli", chain).len() > 1);
    }
    assert_eq!((kept("images").len(), kept("cache/blobs").len()), (2, 2));
    // containerd, and so the kubelet, counts shared data once.
    wait("a count of everything", || {
        let [first, second] = chains.each_ref().map(|chain| usage(&rig, chain));
        let cache = &rig.lazuli.status()["daemon"]["cache"]["bytes_used"];
        first.min(second) > 300_000 && first + second == cache.as_u64().unwrap()
    });

    rig.remove_images(&[&derived]);
    wait("the end of what one image has", || kept("cache/blobs").len() == 1);
    wait("the end of its metadata", || kept("images").len() == 1);
    // The other image is unchanged, without a request.
    rig.kill_worker();
    assert!(rig.tree("lazuli", &chains[0]).len() > 1);

    // While something of it is mounted still, nothing may go: the next worker needs it.
    let mounted = rig.lazuli.directory("held");
    rig.lazuli.ok(["mount", &base, mounted.to_str().unwrap()]);
    rig.remove_images(&[&base]);
    wait("the end of the snapshots", || rig.mounts().len() == 1);
    rig.kill_worker();
    assert_eq!(fs::read(mounted.join("base")).unwrap(), [1; 300_000]);
    assert_eq!(kept("images").len(), 1);
    rig.lazuli.ok(["umount", mounted.to_str().unwrap()]);
    rig.pull(&base).unwrap();
    rig.remove_images(&[&base]);
    wait("the end of everything", || kept("images").is_empty() && kept("cache/blobs").is_empty());
    // A removed image is pulled like any other.
    rig.pull(&base).unwrap();
    rig.end_containerd(Signal::TERM);
    rig.start_containerd();
    assert!(rig.tree("lazuli", &chains[0]).len() > 1);
    rig.remove_images(&[&base]);
    rig.nothing_left();
}
