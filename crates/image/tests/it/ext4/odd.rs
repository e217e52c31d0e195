//! An image with what is odd to ext4.

use std::collections::BTreeMap;

use lazuli_image::{Codec, Kind, Metadata, Mtime, Tree, rafs::write_bootstrap};

use crate::support::{
    BlobBuilder, Sample, add, link, metadata, noise, records, sample, small_chunks,
};

/// Names and values.
type Attributes<'a> = &'a [(&'a str, &'a [u8])];

/// Names of 240 bytes that all have the same hash: in the hash's cipher, a key with the first bit
/// of its first two words flipped does the same.
fn same_hash() -> impl Iterator<Item = Vec<u8>> {
    (0..200_u32).map(|number| {
        let mut name = vec![b'h'; 240];
        for bit in (0..16).filter(|bit| number >> bit & 1 != 0) {
            for at in [bit * 8, bit * 8 + 4] {
                name[at] |= 0x80;
            }
        }
        name
    })
}

/// The sample with what is odd to ext4.
pub(super) fn odd() -> Sample {
    let Sample { mut tree, mut blobs, .. } = sample();
    let root = Tree::ROOT;
    let directory = || Kind::Directory(BTreeMap::new());

    let two = add(&mut tree, root, b"two blocks", directory());
    let three = add(&mut tree, root, b"three blocks", directory());
    for number in 0..40_u8 {
        let mut name = vec![number + 100; 255];
        if number < 30 {
            add(&mut tree, two, &name, Kind::Fifo);
        }
        name[3] = 0xff;
        add(&mut tree, three, &name, Kind::Fifo);
    }
    let short = add(&mut tree, root, b"short names", directory());
    let long = add(&mut tree, root, b"two levels", directory());
    for number in 0..20_000 {
        let id = add(&mut tree, short, format!("{number}é").as_bytes(), Kind::Fifo);
        link(&mut tree, long, format!("{number:0200}\u{fc}").as_bytes(), id);
    }
    let same = add(&mut tree, root, b"same hash", directory());
    for name in same_hash() {
        add(&mut tree, same, &name, Kind::Socket);
    }
    for number in 0..300 {
        add(&mut tree, same, format!("{number:0100}").as_bytes(), directory());
    }
    for number in 300..2000 {
        add(&mut tree, same, format!("{number:0100}").as_bytes(), Kind::Fifo);
    }

    let mut blob = BlobBuilder::new(Codec::Zstd, small_chunks());
    let Kind::Regular { chunks, .. } = blob.file(2, &noise(64 * 0x4000)) else { unreachable!() };
    for (name, count) in [("4 extents", 4), ("5 extents", 5), ("340", 340), ("1400", 1400)] {
        // The last chunk has to end with the file.
        let Kind::Regular { chunks: end, .. } = blob.file(2, &[9; 5]) else { unreachable!() };
        let scattered = (0..count - 1).map(|number| chunks[number * 37 % 64]);
        let scattered: Vec<_> = scattered.chain(end).collect();
        let size = (count as u64 - 1) * 0x4000 + 5;
        add(&mut tree, root, name.as_bytes(), Kind::Regular { size, chunks: scattered });
    }
    let whole = Kind::Regular { size: 64 * 0x4000, chunks };
    add(&mut tree, root, b"in one piece", whole);
    // No file has these blocks.
    blob.file(2, &noise(5 * 0x4000));

    for len in [1, 59, 60] {
        let name = format!("link of {len}");
        add(&mut tree, root, name.as_bytes(), Kind::Symlink(vec![b't'; len].into()));
    }
    let last = (1 << 34) - (1 << 31) - 1;
    for seconds in [-(1 << 31), -1, 0, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, last] {
        let name = format!("time {seconds}");
        let id = add(&mut tree, root, name.as_bytes(), Kind::Fifo);
        tree[id].metadata.mtime = Mtime { seconds, nanoseconds: 999_999_999 };
    }
    let id = add(&mut tree, root, b"owner", Kind::Fifo);
    tree[id].metadata =
        Metadata { uid: 4_000_000_000, gid: u32::MAX - 1, permissions: 0o7777, ..metadata(0) };

    let access = [(1, 7, !0), (2, 5, 4_000_000_000), (4, 5, !0), (8, 1, 70_000), (16, 7, !0)];
    let access = acl(&[&access[..], &[(32, 4, !0)]].concat());
    let attributes: [(&str, Attributes<'_>); 8] = [
        ("in the inode", &[("user.a", b"1"), ("trusted.b", b"22222"), ("user.c", b"")]),
        ("exactly 92", &[("user.four", &[7; 68])]),
        ("a block", &[("user.five", &[7; 69])]),
        (
            "order",
            &[
                ("user.bb", &[1; 50]),
                ("user.c", b"x"),
                ("trusted.long name", b"12345"),
                ("security.x", b"z"),
                ("user.ba", b"q"),
            ],
        ),
        ("a full block", &[("user.full", &[3; 4040])]),
        ("acl", &[("system.posix_acl_access", &access), ("user.x", b"y")]),
        (
            "smallest acl",
            &[("system.posix_acl_access", &acl(&[(1, 6, !0), (4, 4, !0), (32, 0, !0)]))],
        ),
        ("same", &[("user.a", b"1"), ("trusted.b", b"22222"), ("user.c", b"")]),
    ];
    for (name, attributes) in attributes {
        let kind = Kind::Regular { size: 0, chunks: vec![] };
        let id = add(&mut tree, root, name.as_bytes(), kind);
        tree[id].metadata.permissions = 0o674;
        let attributes =
            attributes.iter().map(|(name, value)| (name.as_bytes().into(), (*value).into()));
        tree[id].metadata.xattrs = attributes.collect();
    }
    let default = add(&mut tree, root, b"default acl", directory());
    tree[default].metadata.xattrs =
        [(b"system.posix_acl_default".as_slice().into(), access.into())].into();

    blobs.push(blob.finish());
    let bootstrap = write_bootstrap(&tree, &records(&blobs), &small_chunks()).unwrap();
    Sample { tree, blobs, bootstrap }
}

/// An ACL as the kernel shows it: tag, permissions and id of each entry.
pub(super) fn acl(entries: &[(u16, u16, u32)]) -> Vec<u8> {
    let entries = entries.iter().flat_map(|(tag, permissions, id)| {
        [&tag.to_le_bytes()[..], &permissions.to_le_bytes(), &id.to_le_bytes()].concat()
    });
    2_u32.to_le_bytes().into_iter().chain(entries).collect()
}
