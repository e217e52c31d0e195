//! Changes in a container give the same tree as with overlayfs.

use lazuli_testkit::listing::Listing;

use super::{
    programs::{Containerd, on_both},
    rig::{Rig, assert_same},
};

on_both!(writes_of_a_container_are_as_on_overlayfs);

/// Writes of all kinds, each with its result: copy-up, deletion, directories that are renamed,
/// replaced and emptied, links. Changed files get the same time everywhere.
const SCRIPT: &str = r#"
export LC_ALL=C
touch /begin; sleep 0.05
do_() { "$@" >/tmp/said 2>&1; echo "$? $*"; cat /tmp/said; }
do_ rm /etc/issue
do_ rm -r /usr/share/doc/tar
do_ sh -c 'echo more >>/etc/passwd'
do_ chmod 700 /usr/bin/wc
do_ chown 1:2 /usr/bin/head
do_ touch -d @1 /usr/bin/cut
do_ ln /usr/bin/tac /root/hard
do_ mv /usr/bin/sort /root/sorted
do_ truncate -s 10 /etc/bash.bashrc
do_ dd if=/dev/zero of=/usr/bin/find bs=1 seek=1000 count=10 conv=notrunc status=none
do_ perl -e 'rename("/usr/share/common-licenses", "/licenses") or print "$!\n"'
do_ perl -e 'rename("/etc/apt", "/etc/tpa") or print "$!\n"'
do_ mv /usr/share/doc /moved
do_ mkdir /usr/share/doc
do_ touch /usr/share/doc/new
do_ mv /moved/dpkg /usr/share/doc
do_ rm -r /var/cache
do_ mkdir -m 1777 /var/cache
do_ perl -e 'rename("/usr/share/doc", "/renamed") or print "$!\n"'
do_ ln -s nowhere /usr/bin/wc-link
do_ mkfifo -m 600 /fifo
do_ mknod /root/null c 1 3
do_ rm /bin/../usr/bin/yes
do_ mkdir /usr/bin/yes
do_ cp -a /usr/lib/apt /root
do_ find /usr/share/zoneinfo -delete
do_ rmdir /usr/share
find / -xdev -depth -newer /begin -exec touch -h -d @1000000000 {} + 2>/dev/null
touch -d @1000000000 /begin /
"#;

fn writes_of_a_container_are_as_on_overlayfs(containerd: Containerd) {
    let Some(rig) = Rig::new(containerd, "debian-slim") else { return };
    let (ordinary, lazy) = (rig.push_ordinary(), rig.push_lazy());
    rig.ctr(&["image", "pull", "--plain-http", "--snapshotter", "overlayfs", &ordinary]);
    rig.pull(&ordinary).unwrap();
    rig.pull(&lazy).unwrap();
    let run = |snapshotter: &str, image: &str| -> (String, Listing) {
        let name = rig.own("writer");
        let said =
            rig.ctr(&["run", "--snapshotter", snapshotter, image, &name, "sh", "-c", SCRIPT]);
        let tree = rig.active_tree(snapshotter, &name);
        rig.ctr(&["container", "rm", &name]);
        (said, tree)
    };
    let (said, tree) = run("overlayfs", &ordinary);
    // It did something.
    assert!(said.contains("0 rm /etc/issue") && said.contains("0 cp -a"), "{said}");
    assert!(tree.get(b"/root/sorted").is_some() && tree.get(b"/etc/issue").is_none(), "{tree}");
    for image in [&ordinary, &lazy] {
        let (same, other) = run("lazuli", image);
        assert_eq!(said, same, "{image}");
        assert_same(&tree, &other);
    }
    rig.remove_images(&[&lazy, &ordinary]);
    rig.nothing_left();
}
