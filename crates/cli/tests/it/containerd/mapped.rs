//! Containers in user namespaces of their own.

use std::{fs, os::unix::fs::MetadataExt};

use super::{programs::Containerd, rig::Rig};

/// With the image's mount shown under other ids, and with a copy of the image whose files
/// containerd changes one by one: the container's root owns them, and has another id outside.
#[test]
fn files_belong_to_the_users_of_the_container() {
    let Some(rig) = Rig::new(Containerd::Current, "busybox") else { return };
    let images = [rig.push_lazy(), rig.push_ordinary()];
    for image in &images {
        rig.pull(image).unwrap();
        for labels in [&["--remap-labels"][..], &[]] {
            let name = rig.own("mapped");
            let script = "echo mine > /new && chown 33:34 /new && exec sleep 1000";
            let ids = ["--uidmap", "0:100000:65536", "--gidmap", "0:200000:65536"];
            let run = ["run", "-d", "--snapshotter", "lazuli"];
            let command = [&**image, &name, "sh", "-c", script];
            rig.ctr(&[&run, labels, &ids, &command].concat());
            let exec = ["task", "exec", "--exec-id", "e", &name, "stat", "-c", "%u:%g"];
            rig.settled(&["task", "exec", "--exec-id", "e", &name, "grep", "-q", "mine", "/new"]);
            for (path, owner) in [("/", "0:0"), ("/bin/sh", "0:0"), ("/new", "33:34")] {
                assert_eq!(rig.ctr(&[&exec[..], &[path]].concat()), format!("{owner}\n"), "{path}");
            }
            let tasks = rig.ctr(&["task", "ls"]);
            let task = tasks.lines().find(|line| line.starts_with(&name)).unwrap();
            let root = format!("/proc/{}/root", task.split_whitespace().nth(1).unwrap());
            for (path, ids) in [("bin/sh", (100_000, 200_000)), ("new", (100_033, 200_034))] {
                let metadata = fs::symlink_metadata(format!("{root}/{path}")).unwrap();
                assert_eq!((metadata.uid(), metadata.gid()), ids, "{path} {labels:?}");
            }
            rig.end(&name);
        }
    }
    rig.remove_images(&[&images[0], &images[1]]);
    rig.nothing_left();
}
