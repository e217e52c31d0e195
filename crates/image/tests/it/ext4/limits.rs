//! What is refused, and what damaged bootstraps lead to.

use std::{
    collections::BTreeMap,
    io::{self, Write},
};

use lazuli_image::{
    BLOCK_SIZE, Codec, InodeId, Kind, Tree,
    ext4::{Refused, Unfit, plan},
    rafs::{Bootstrap, BootstrapOptions, check, write_bootstrap},
};
use lazuli_testkit::{content::Choices, mutation::mutate};

use super::{UUID, odd::acl};
use crate::support::{BlobBuilder, add, metadata, records, small_chunks, small_sample};

/// The refusal of a root directory with one file.
fn refusal(change: impl FnOnce(&mut Tree)) -> Refused {
    let mut tree = Tree::new(metadata(0o755));
    let parent = add(&mut tree, Tree::ROOT, b"a", Kind::Directory(BTreeMap::new()));
    add(&mut tree, parent, b"\xff", Kind::Fifo);
    change(&mut tree);
    let image = write_bootstrap(&tree, &[], &small_chunks()).unwrap();
    let bootstrap = Bootstrap::open(image).unwrap();
    plan(&bootstrap).map(drop).unwrap_err()
}

#[test]
fn what_ext4_cannot_hold_is_refused_by_path() {
    let file = InodeId(2);
    let with = |name: &str, value: &[u8]| {
        refusal(|tree| {
            tree[file].metadata.xattrs.insert(name.as_bytes().into(), value.into());
        })
    };
    let unfit = |why| Refused::Unfit { path: r"/a/\xff".into(), why };
    assert_eq!(with("user.full", &[3; 4041]), unfit(Unfit::Attributes { size: 4068 }));
    let name = "system.posix_acl_access";
    for bad in [
        &b""[..],
        b"\x01\0\0\0",
        b"\x02\0\0\0\x01",
        &acl(&[(3, 7, 0)]),
        &acl(&[(1, 7, 0), (2, 7, 0)]),
        &acl(&[(1, 7, 0); 5]),
    ] {
        assert_eq!(with(name, bad), unfit(Unfit::Acl(name.into())), "{bad:?}");
    }
    for seconds in [-(1 << 31) - 1, (1 << 34) - (1 << 31)] {
        let refused = refusal(|tree| tree[file].metadata.mtime.seconds = seconds);
        assert_eq!(refused, unfit(Unfit::Time(seconds)));
    }
    let refused = refusal(|tree| tree[Tree::ROOT].metadata.mtime.seconds = i64::MAX);
    assert_eq!(refused, Refused::Unfit { path: "/".into(), why: Unfit::Time(i64::MAX) });
    assert_eq!(refused.to_string(), "ext4 cannot hold `/`: the time 9223372036854775807");
}

#[test]
fn a_file_of_as_many_blocks_as_there_are_numbers_is_refused() {
    let options = BootstrapOptions { chunk_size: 16 << 20, ..BootstrapOptions::default() };
    let mut blob = BlobBuilder::new(Codec::Zstd, options);
    let Kind::Regular { chunks, .. } = blob.file(0, &vec![1; 16 << 20]) else { unreachable!() };
    let blobs = [blob.finish()];
    for count in [(1 << 20) - 1, 1 << 20] {
        let size = count as u64 * (16 << 20);
        let mut tree = Tree::new(metadata(0o755));
        let chunks = chunks.repeat(count);
        add(&mut tree, Tree::ROOT, b"huge", Kind::Regular { size, chunks });
        let image = write_bootstrap(&tree, &records(&blobs), &options).unwrap();
        let bootstrap = Bootstrap::open(image).unwrap();
        let refused = plan(&bootstrap).map(drop);
        match count {
            0x10_0000 => {
                let why = Unfit::Size(size);
                assert_eq!(refused.unwrap_err(), Refused::Unfit { path: "/huge".into(), why });
            }
            _ => refused.unwrap(),
        }
    }
}

#[test]
fn directories_in_circles_and_with_two_parents_are_refused() {
    let mut tree = Tree::new(metadata(0o755));
    for name in [b"a", b"b"] {
        add(&mut tree, Tree::ROOT, name, Kind::Directory(BTreeMap::new()));
    }
    let image = write_bootstrap(&tree, &[], &small_chunks()).unwrap();
    let sound = Bootstrap::open(&image[..]).unwrap();
    let nid = |name: &[u8]| sound.lookup(sound.root(), name).unwrap().unwrap().0.to_le_bytes();
    // The root's entries come before those of the directories.
    let at = image.windows(8).position(|bytes| bytes == nid(b"b")).unwrap();
    for (target, expected) in [(b"a", "more than one parent"), (b".", "overlap")] {
        let mut image = image.clone();
        image[at..at + 8].copy_from_slice(&nid(target));
        let refused = plan(&Bootstrap::open(image).unwrap()).map(drop).unwrap_err();
        assert!(matches!(refused, Refused::Broken(_)), "{refused}");
        assert!(refused.to_string().contains(expected), "{refused}");
    }
}

/// Counts, and has no room for more than `limit`.
struct Counter {
    written: u64,
    limit: u64,
}

impl Write for Counter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.written += bytes.len() as u64;
        assert!(self.written <= self.limit, "more than {} bytes", self.limit);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Returns whether it has an ext4 file system.
fn write_all(bytes: &[u8]) -> bool {
    let Ok(bootstrap) = Bootstrap::open(bytes) else { return false };
    let plan = match plan(&bootstrap) {
        Ok(plan) => plan,
        Err(Refused::Broken(error)) => {
            assert!(check(&bootstrap).is_err(), "a sound image is refused: {error}");
            return false;
        }
        Err(_) => return false,
    };
    let layout = plan.layout();
    // The smallest inode with a block of its own is a link of 60 bytes; and each group of 128 MiB
    // has two bitmaps and a block of inodes.
    let most = 60 * bytes.len() as u64 + layout.blobs.iter().sum::<u64>() / 2 + (64 << 10);
    let mut out = Counter { written: 0, limit: most };
    plan.write(UUID, &mut out).unwrap();
    assert_eq!(out.written, layout.metadata * BLOCK_SIZE);
    true
}

#[test]
fn damaged_bootstraps_are_written_or_refused() {
    let sound = small_sample().bootstrap;
    assert!(write_all(&sound));
    let mut image = sound.clone();
    for at in 0..image.len() {
        let old = image[at];
        let values: &[u8] = if old == 0 { &[0xff] } else { &[0xff, 0, old ^ 1] };
        for value in values {
            image[at] = *value;
            write_all(&image);
        }
        image[at] = old;
    }
    let mut choices = Choices::new(4);
    for _ in 0..5000 {
        let mut image = sound.clone();
        for _ in 0..=choices.below(3) {
            if !image.is_empty() {
                mutate(&mut image, &mut choices);
            }
        }
        write_all(&image);
    }
}
