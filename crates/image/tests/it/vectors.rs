//! Bytes that upstream's images have, compared with ours.

use lazuli_image::{
    Codec, Kind, Metadata, Mtime, Tree,
    rafs::{Bootstrap, BootstrapOptions, write_bootstrap},
};

use crate::support::{BlobBuilder, add, link, noise};

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(|byte| !byte.is_ascii_whitespace()).collect();
    let pair = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    digits.chunks_exact(2).map(pair).collect()
}

fn assert_bytes(image: &[u8], at: u64, expected: &str) {
    let expected = hex(expected);
    let found = &image[at as usize..at as usize + expected.len()];
    let shown = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
    assert_eq!(shown(found), shown(&expected), "at {at:#x}");
}

#[test]
fn superblocks_files_and_directories_have_upstreams_bytes() {
    let options = BootstrapOptions::default();
    let mut blob = BlobBuilder::new(Codec::Zstd, options);
    // Two chunks before the file, as in the image that the vectors are from.
    let small = blob.file(0, b"six by");
    let single = blob.file(0, b"b");
    let file = blob.file(0, &noise(5 << 20));
    let mut tree = Tree::new(Metadata { permissions: 0o755, ..Metadata::default() });
    let id = add(&mut tree, Tree::ROOT, b"big5m", file);
    tree[id].metadata = Metadata {
        permissions: 0o644,
        mtime: Mtime { seconds: 0x6b_dd57, nanoseconds: 0x1820_477e },
        ..Metadata::default()
    };
    let id = add(&mut tree, Tree::ROOT, b"acl", small);
    let acl: Vec<u8> = (0..28).collect();
    tree[id].metadata.xattrs.insert(b"system.posix_acl_default".as_slice().into(), acl.into());
    tree[id].metadata.xattrs.insert(b"trusted.foo".as_slice().into(), b"bar".as_slice().into());
    add(&mut tree, Tree::ROOT, b"b", single);
    let empty = add(&mut tree, Tree::ROOT, b"empty", Kind::Directory(Default::default()));
    let blob = blob.finish();
    let image = write_bootstrap(&tree, &[blob.record], &options).unwrap();

    assert_bytes(&image, 0x400, "e2e1f5e0 00000000 00000040 0c 00 8000 0500000000000000");
    assert_bytes(&image, 0x400 + 40, "02000000 00000000");
    assert_bytes(&image, 0x400 + 80, "0c000000 0000 0100 0b00");
    assert_bytes(&image, 0x480, "b401000100000000 0010000000000000 00010000 00001000");

    let bootstrap = Bootstrap::open(&image[..]).unwrap();
    let inode = |name: &[u8]| {
        let nid = bootstrap.lookup(bootstrap.root(), name).unwrap().unwrap();
        bootstrap.inode(nid).unwrap()
    };
    let at = inode(b"big5m").offset;
    assert_bytes(
        &image,
        at,
        "0900 0000 a481 0000 0000500000000000 2b000000 04000000 00000000 00000000",
    );
    assert_bytes(
        &image,
        at + 32,
        "57dd6b0000000000 7e472018 01000000 00000000000000000000000000000000",
    );
    assert_bytes(&image, at + 64, "0200 0100 02000000 0300 0100 02010000");

    let acl = inode(b"acl");
    assert_bytes(&image, acl.offset + 2, "0c00");
    assert_bytes(&image, acl.offset + 64, "000000000000000000000000 00031c00 000102");
    assert_bytes(&image, acl.offset + 64 + 12 + 32, "03040300 666f6f 626172 0000");

    let directory = inode(b"empty");
    assert_eq!(tree[empty].kind.mode(), 0o040_000);
    assert_bytes(&image, directory.offset, "0500");
    assert_bytes(&image, directory.offset + 8, "1b00000000000000");
    let nid = format!("{:02x}00000000000000", directory.nid.0);
    assert!(directory.nid.0 < 256);
    let entries = format!("{nid} 1800 0200 8000000000000000 1900 0200 2e 2e2e");
    assert_bytes(&image, directory.offset + 64, &entries);
}

#[test]
fn chunk_numbers_have_24_bits_and_bad_trees_are_refused() {
    let options = BootstrapOptions { chunk_size: 4096, ..BootstrapOptions::default() };
    let mut blob = BlobBuilder::new(Codec::None, options);
    for _ in 0..0x1_0002 {
        blob.file(0, b"x");
    }
    let file = blob.file(0, b"y");
    let blob = blob.finish();
    let tree_with = |kind: Kind| {
        let mut tree = Tree::new(Metadata::default());
        let id = add(&mut tree, Tree::ROOT, b"file", kind);
        (tree, id)
    };
    let write = |tree: &Tree| write_bootstrap(tree, std::slice::from_ref(&blob.record), &options);
    let (mut tree, id) = tree_with(file.clone());
    let image = write(&tree).unwrap();
    let bootstrap = Bootstrap::open(&image[..]).unwrap();
    let nid = bootstrap.lookup(bootstrap.root(), b"file").unwrap().unwrap();
    assert_bytes(&image, bootstrap.inode(nid).unwrap().offset + 64, "0200 0101 02000100");
    let chunk = bootstrap.chunks(nid).unwrap().next().unwrap().unwrap().0;
    assert_eq!(chunk.number, 0x1_0002);

    let Kind::Regular { chunks, .. } = file else { unreachable!() };
    let mut refused = |kind: Kind| {
        tree[id].kind = kind;
        assert!(write(&tree).is_err(), "{:?}", tree[id].kind);
    };
    refused(Kind::Regular { size: 2, chunks: chunks.clone() });
    refused(Kind::Regular { size: 4097, chunks: chunks.clone() });
    refused(Kind::Regular { size: 0, chunks });
    refused(Kind::Symlink(Box::default()));
    refused(Kind::Symlink(vec![b'x'; 4096].into()));
    let (mut tree, id) = tree_with(Kind::Fifo);
    tree[id].metadata.xattrs.insert(b"system.nfs4_acl".as_slice().into(), Box::default());
    assert!(write(&tree).is_err());
    let (mut tree, id) = tree_with(Kind::Directory(Default::default()));
    link(&mut tree, Tree::ROOT, b"hard link to a directory", id);
    let error = write(&tree).unwrap_err().to_string();
    assert!(error.contains("file `/hard link to a directory`"), "{error}");
    let (mut tree, id) = tree_with(Kind::Directory(Default::default()));
    link(&mut tree, id, b"cycle", Tree::ROOT);
    let error = write(&tree).unwrap_err().to_string();
    assert!(error.contains("file `/file/cycle`"), "{error}");
}
