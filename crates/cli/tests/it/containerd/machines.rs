//! Snapshots for runtimes of virtual machines. In place of one, runc runs here, for which
//! containerd mounts the disks itself: its mount manager knows such mounts from its own EROFS
//! snapshotter.

use std::{fs, os::unix::net::UnixStream};

use lazuli_testkit::cri::Client;
use rustix::process::Signal;

use super::{
    programs::Containerd,
    rig::{Rig, wait},
};

/// The runtime of pods whose snapshots are disks.
const RUNTIME: &str = "vm";

#[test]
fn one_image_starts_for_runc_and_for_virtual_machines() {
    let Some(rig) = Rig::new(Containerd::Current, "redis") else { return };
    let socket = rig.lazuli.path("s.sock");
    assert!(UnixStream::connect(&socket).is_ok());
    rig.end_containerd(Signal::TERM);
    let path = rig.lazuli.path("containerd.toml");
    let more = format!(
        "[proxy_plugins.lazuli-vm]\ntype = \"snapshot\"\naddress = {socket:?}\n\
         [proxy_plugins.lazuli-vm.exports]\nenable_remote_snapshot_annotations = \"true\"\n\
         [plugins.\"io.containerd.cri.v1.runtime\".containerd.runtimes.{RUNTIME}]\n\
         runtime_type = \"io.containerd.runc.v2\"\nsnapshotter = \"lazuli-vm\"\n"
    );
    fs::write(&path, fs::read_to_string(&path).unwrap() + &more).unwrap();
    rig.start_containerd();
    let image = rig.push_lazy();
    let machines = Client::connect(&rig.lazuli.path("c.sock")).unwrap().with_runtime(RUNTIME);
    machines.pull(&image, None).unwrap();
    let drivers = || {
        let mounts = rig.mounts();
        let all = mounts.iter().map(|mount| mount["driver"].as_str().unwrap().to_owned());
        all.collect::<Vec<_>>()
    };
    assert_eq!(drivers(), ["disks"]);
    let (fetched, total) = {
        let mount = &rig.mounts()[0];
        (mount["bytes_fetched"].as_u64().unwrap(), mount["bytes_total"].as_u64().unwrap())
    };
    assert!(fetched < total / 2, "{fetched} of {total}");
    let script = "echo changed > /tmp/file && cat /tmp/file && redis-server --version";
    for runtime in [RUNTIME, ""] {
        let client = Client::connect(&rig.lazuli.path("c.sock")).unwrap().with_runtime(runtime);
        client.pull(&image, None).unwrap();
        let output = client.run(&rig.own("pod"), &image, &["sh", "-c", script]).unwrap();
        let said = String::from_utf8(output.stdout).unwrap();
        assert_eq!(output.status, 0, "{said}");
        assert!(said.starts_with("changed\nRedis server v="), "{said}");
    }
    assert_eq!(drivers(), ["fanotify", "disks"]);
    // A new worker goes on with both.
    rig.kill_worker();
    let output = machines.run(&rig.own("pod"), &image, &["sh", "-c", script]).unwrap();
    assert_eq!(output.status, 0, "{}", String::from_utf8_lossy(&output.stdout));
    rig.remove_images(&[&image]);
    wait("what was mounted is gone", || rig.mounts().is_empty());
}
