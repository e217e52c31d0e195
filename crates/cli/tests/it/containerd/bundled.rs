//! Pods on a node that was delivered with their images, and has no network.

use std::time::Duration;

use lazuli_testkit::{
    oci::{Compression, Layer},
    registry::{FakeRegistry, Fault},
};

use super::{
    chain_ids::{WHO, busybox, push, who},
    programs::{Containerd, on_both},
    rig::Rig,
};

on_both!(pods_start_without_a_registry, pods_start_while_the_registry_hangs);

/// What a node may have: a lazy image, one whose layers are shown by their indexes, and one that
/// containerd has to unpack.
struct Images {
    lazy: String,
    ordinary: String,
    zstd: String,
}

fn bundle(rig: &Rig, registry: &FakeRegistry) -> Images {
    let base = |compression| Layer::new(busybox(), compression);
    let ordinary = push(registry, "ordinary", &[base(Compression::Gzip), who("bundled")]);
    // Not the same layers in another form, which containerd would share.
    let zstd = push(registry, "zstd", &[who("bundled"), base(Compression::Zstd)]);
    let lazy = format!("{}/lazy:1", registry.host());
    rig.lazuli.ok(["convert", &ordinary, &lazy]);
    let to = rig.lazuli.root().join("bundle");
    let said = rig.lazuli.ok(["bundle", "--to", to.to_str().unwrap(), &lazy, &ordinary, &zstd]);
    assert_eq!(said.matches("unpacked").count(), 1, "{said}");
    Images { lazy, ordinary, zstd }
}

fn run(rig: &Rig, image: &str) {
    rig.cri.pull(image, None).unwrap();
    let name = rig.own(&image.replace(['/', ':'], "-"));
    let output = rig.cri.run(&name, image, &WHO).unwrap();
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "bundled\n", "{image}");
}

fn pods_start_without_a_registry(containerd: Containerd) {
    let Some(rig) = Rig::mirrored(containerd, "busybox", "") else { return };
    let registry = FakeRegistry::start().unwrap();
    let Images { lazy, ordinary, zstd } = bundle(&rig, &registry);
    registry.go_away();
    for (image, mounts) in [(&lazy, 1), (&ordinary, 2), (&zstd, 3)] {
        run(&rig, image);
        assert_eq!(rig.mounts().len(), mounts, "{image}: {:#?}", rig.mounts());
    }
    // A reboot: nothing in memory is left.
    rig.kill_worker();
    run(&rig, &lazy);
    run(&rig, &ordinary);
    rig.remove_images(&[&lazy, &ordinary, &zstd]);
    rig.nothing_left();
}

fn pods_start_while_the_registry_hangs(containerd: Containerd) {
    let Some(rig) = Rig::mirrored(containerd, "busybox", "") else { return };
    let registry = FakeRegistry::start().unwrap();
    let Images { lazy, ordinary, zstd } = bundle(&rig, &registry);
    registry.fault("", "", usize::MAX, Fault::Hang(Duration::from_secs(600)));
    for image in [&lazy, &ordinary, &zstd] {
        run(&rig, image);
    }
    rig.remove_images(&[&lazy, &ordinary, &zstd]);
    rig.nothing_left();
}
