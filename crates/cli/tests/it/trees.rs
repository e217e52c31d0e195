//! Any tree that a file system can hold is the same once it is an image.

use std::{
    collections::BTreeSet,
    ffi::OsStr,
    fs::{self, File},
    os::unix::{
        ffi::OsStrExt as _,
        fs::{FileExt as _, symlink},
    },
    path::{Path, PathBuf},
    process::Command,
};

use lazuli_testkit::{
    kernel::{Feature, require},
    listing, odd,
};
use proptest::{collection::vec, prelude::*, sample::Index};
use rustix::fs::{
    AtFlags, CWD, FileType, Gid, Mode, Timespec, Timestamps, Uid, XattrFlags, chownat, lsetxattr,
    makedev, mknodat, utimensat,
};

use crate::lazuli::Lazuli;

#[derive(Clone, Debug)]
struct Node {
    parent: Index,
    name: Vec<u8>,
    kind: Kind,
    mode: u32,
    owner: (u32, u32),
    modified: (i64, i64),
    attributes: Vec<(String, Vec<u8>)>,
}

#[derive(Clone, Debug)]
enum Kind {
    Directory,
    /// Its size, and its data segments, with holes between them.
    File(u64, Vec<(u64, Vec<u8>)>),
    Symlink(Vec<u8>),
    HardLink(Index),
    Fifo,
    Device(FileType, u32, u32),
}

fn name() -> impl Strategy<Value = Vec<u8>> {
    let byte = || prop_oneof![any::<u8>(), b'a'..=b'c'];
    let name = prop_oneof![9 => vec(byte(), 1..12), 1 => vec(byte(), 200..=255)];
    name.prop_filter("is a name, and no whiteout", |name| {
        !name.contains(&0)
            && !name.contains(&b'/')
            && !matches!(&name[..], b"." | b"..")
            && !name.starts_with(b".wh.")
    })
}

fn content() -> impl Strategy<Value = Vec<u8>> {
    let size = prop_oneof![4 => 0..5000_usize, 1 => 0..300_000_usize];
    (any::<bool>(), 0..8_u64, size).prop_map(|(dense, seed, size)| match dense {
        true => odd::random(seed, size),
        false => format!("{seed} times ").bytes().cycle().take(size).collect(),
    })
}

fn kind() -> impl Strategy<Value = Kind> {
    let pieces = prop_oneof![
        3 => content().prop_map(|content| (content.len() as u64, vec![(0, content)])),
        1 => (vec((0..3_000_000_u64, content()), 0..4), 0..3_500_000_u64).prop_map(|(pieces, size)| {
            (pieces.iter().map(|(at, bytes)| at + bytes.len() as u64).max().unwrap_or(0).max(size), pieces)
        }),
    ];
    let device = prop_oneof![Just(FileType::CharacterDevice), Just(FileType::BlockDevice)];
    // 0:0 would be a whiteout of overlayfs.
    let device = (device, 1..4096_u32, 0..1_u32 << 20);
    let target = prop_oneof![9 => vec(1..=255_u8, 1..100), 1 => vec(1..=255_u8, 1000..=4095)];
    prop_oneof![
        4 => Just(Kind::Directory),
        8 => pieces.prop_map(|(size, pieces)| Kind::File(size, pieces)),
        2 => target.prop_map(Kind::Symlink),
        2 => any::<Index>().prop_map(Kind::HardLink),
        1 => Just(Kind::Fifo),
        1 => device.prop_map(|(kind, major, minor)| Kind::Device(kind, major, minor)),
    ]
}

fn node() -> impl Strategy<Value = Node> {
    let id = || prop_oneof![0..1000_u32, 0..u32::MAX];
    // The range of ext4: 1901 to 2446.
    let modified = (-(1_i64 << 31)..1 << 33, 0..1_000_000_000_i64);
    let attributes = vec(("[a-z]{1,20}", vec(any::<u8>(), 0..300)), 0..3);
    let place = (any::<Index>(), name(), kind());
    (place, 0..0o10000_u32, (id(), id()), modified, attributes).prop_map(
        |((parent, name, kind), mode, owner, modified, attributes)| Node {
            parent,
            name,
            kind,
            mode,
            owner,
            modified,
            attributes,
        },
    )
}

/// Makes a tree; names that are taken are left out.
fn write(root: &Path, nodes: &[Node]) {
    let (mut directories, mut linkable) = (vec![root.to_owned()], Vec::<PathBuf>::new());
    let mut made: Vec<(PathBuf, &Node)> = Vec::new();
    let mut taken = BTreeSet::new();
    for node in nodes {
        let path = node.parent.get(&directories).join(OsStr::from_bytes(&node.name));
        // PATH_MAX, with room for where the image is mounted.
        if path.as_os_str().len() > 3800 || !taken.insert(path.clone()) {
            continue;
        }
        match &node.kind {
            Kind::Directory => {
                fs::create_dir(&path).unwrap();
                directories.push(path.clone());
            }
            Kind::File(size, pieces) => {
                let file = File::create(&path).unwrap();
                file.set_len(*size).unwrap();
                for (at, bytes) in pieces {
                    file.write_all_at(bytes, *at).unwrap();
                }
            }
            Kind::Symlink(target) => symlink(OsStr::from_bytes(target), &path).unwrap(),
            Kind::HardLink(to) => {
                if !linkable.is_empty() {
                    fs::hard_link(to.get(&linkable), &path).unwrap();
                }
                continue;
            }
            Kind::Fifo => mknodat(CWD, &path, FileType::Fifo, Mode::empty(), 0).unwrap(),
            Kind::Device(kind, major, minor) => {
                mknodat(CWD, &path, *kind, Mode::empty(), makedev(*major, *minor)).unwrap();
            }
        }
        // GNU tar makes two of a fifo or device with two names.
        if matches!(node.kind, Kind::File(..) | Kind::Symlink(_)) {
            linkable.push(path.clone());
        }
        made.push((path, node));
    }
    // Children first: making an entry changes its directory's time.
    for (path, node) in made.into_iter().rev() {
        dress(&path, node);
    }
}

fn dress(path: &Path, node: &Node) {
    let is_link = matches!(node.kind, Kind::Symlink(_));
    // Users' attributes are for files and directories; a block of ext4 holds them all.
    let space = match node.kind {
        Kind::File(..) | Kind::Directory => "user",
        _ => "trusted",
    };
    for (name, value) in &node.attributes {
        lsetxattr(path, format!("{space}.{name}"), value, XattrFlags::empty()).unwrap();
    }
    let (uid, gid) = (Uid::from_raw(node.owner.0), Gid::from_raw(node.owner.1));
    chownat(CWD, path, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW).unwrap();
    if !is_link {
        rustix::fs::chmod(path, Mode::from_raw_mode(node.mode)).unwrap();
    }
    let time = Timespec { tv_sec: node.modified.0, tv_nsec: node.modified.1 };
    let times = Timestamps { last_access: time, last_modification: time };
    utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 24,
        failure_persistence: None,
        max_shrink_iters: 200,
        ..ProptestConfig::default()
    })]

    #[test]
    fn any_tree_is_mounted_as_it_was_written(nodes in vec(node(), 0..60), driver in prop::sample::select(vec!["fanotify", "fuse"])) {
        if !require(Feature::Root) || !require(Feature::Fanotify) || !require(Feature::Fuse) {
            return Ok(());
        }
        let lazuli = Lazuli::new();
        let tree = lazuli.directory("tree");
        write(&tree, &nodes);
        let tar = Command::new("tar")
            .args(["c", "--format=pax", "--xattrs", "--xattrs-include=*", "--numeric-owner"])
            .args(["-S", "-f", "tree.tar", "-C", "tree", "."])
            .current_dir(lazuli.path(""))
            .output()
            .unwrap();
        assert!(tar.status.success(), "{}", String::from_utf8_lossy(&tar.stderr));
        let mountpoint = lazuli.directory("mnt");
        for source in ["dir:tree", "tar:tree.tar"] {
            lazuli.ok(["convert", source, "oci:lazy:x"]);
            lazuli.ok(["mount", "--driver", driver, "oci:lazy:x", mountpoint.to_str().unwrap()]);
            listing::assert_equal(&tree, &mountpoint);
            lazuli.ok(["umount", mountpoint.to_str().unwrap()]);
        }
    }
}
