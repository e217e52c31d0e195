//! Entries of archives of all kinds.

use lazuli_builder::{Entry, EntryKind, EntryPath};
use lazuli_image::tree::Device;

use crate::tarball::{Header, Tar, entries};

fn one(tar: Tar) -> (Entry, Vec<u8>) {
    let mut entries = entries(&tar.end()).unwrap();
    assert_eq!(entries.len(), 1, "{entries:?}");
    entries.remove(0)
}

fn path(bytes: &[u8]) -> EntryPath {
    EntryPath::parse(bytes).unwrap()
}

#[test]
fn every_type_of_member_becomes_its_kind_of_entry() {
    let device = |kind| {
        let mut header = Header::new(kind, b"dev", 0);
        header.octal(329..337, 259).octal(337..345, 70_000);
        one(Tar::default().member(&header, b"")).0.kind
    };
    let numbers = Device { major: 259, minor: 70_000 };
    assert_eq!(device(b'3'), EntryKind::CharDevice(numbers));
    assert_eq!(device(b'4'), EntryKind::BlockDevice(numbers));
    let member = |kind: u8, name: &str| {
        one(Tar::default().member(&Header::new(kind, name.as_bytes(), 0), b"")).0.kind
    };
    assert_eq!(member(b'6', "fifo"), EntryKind::Fifo);
    assert_eq!(member(b'5', "dir/"), EntryKind::Directory);
    assert_eq!(member(0, "v7dir/"), EntryKind::Directory);
    assert_eq!(member(b'0', "v7dir/"), EntryKind::Directory);
    assert_eq!(
        one(Tar::default().link(b'2', "s", "../x")).0.kind,
        EntryKind::Symlink((*b"../x").into())
    );
    assert_eq!(
        one(Tar::default().link(b'1', "h", "./x//y")).0.kind,
        EntryKind::HardLink(path(b"x/y"))
    );
    for kind in [0, b'0', b'7'] {
        let (entry, content) = one(Tar::default().member(&Header::new(kind, b"f", 3), b"abc"));
        assert!(matches!(entry.kind, EntryKind::Regular { size: 3, .. }));
        assert_eq!(content, b"abc");
    }
    let socket = Tar::default().pax(b'x', &[("SCHILY.filetype", b"socket")]).file("s", b"");
    assert_eq!(one(socket).0.kind, EntryKind::Socket);
    // Hard links carry the size of their target but no content.
    let link = Header::new(b'1', b"h", 4096).bytes(157, b"f").finish();
    let tar = Tar(link.to_vec()).file("g", b"x").end();
    assert_eq!(entries(&tar).unwrap().len(), 2);
    // A dump of a directory, a volume label.
    let tar = Tar::default().member(&Header::new(b'V', b"label", 0), b"");
    let tar = tar.member(&Header::new(b'D', b"d/", 6), b"Yfile\0").file("d/f", b"");
    assert_eq!(entries(&tar.end()).unwrap().len(), 2);
}

#[test]
fn long_names_of_gnu_tar_and_pax_are_read_whole() {
    let long = format!("{}/file", "directory".repeat(20));
    let long_link = "x".repeat(300);
    let gnu = Tar::default()
        .member(&Header::new(b'K', b"././@LongLink", 301), format!("{long_link}\0").as_bytes())
        .member(
            &Header::new(b'L', b"././@LongLink", long.len() as u64 + 1),
            format!("{long}\0").as_bytes(),
        )
        .link(b'2', "short", "short");
    let (entry, _) = one(gnu);
    assert_eq!((entry.path.as_bytes(), entry.offset), (long.as_bytes(), 0));
    assert_eq!(entry.kind, EntryKind::Symlink(long_link.as_bytes().into()));

    let pax = [("path", long.as_bytes()), ("linkpath", long_link.as_bytes())];
    let (entry, _) = one(Tar::default().pax(b'x', &pax).link(b'2', "short", "short"));
    assert_eq!(entry.path.as_bytes(), long.as_bytes());
    assert_eq!(entry.kind, EntryKind::Symlink(long_link.as_bytes().into()));

    let mut prefix = Header::new(b'0', b"name", 0);
    prefix.bytes(257, b"ustar\x0000").bytes(345, b"in/a/prefix");
    assert_eq!(one(Tar::default().member(&prefix, b"")).0.path, path(b"in/a/prefix/name"));
    // star keeps times behind a shorter prefix, GNU tar everything else.
    prefix.bytes(476, b"00000000000 ").bytes(508, b"tar\0");
    assert_eq!(one(Tar::default().member(&prefix, b"")).0.path, path(b"in/a/prefix/name"));
    prefix.bytes(257, b"ustar  \0");
    assert_eq!(one(Tar::default().member(&prefix, b"")).0.path, path(b"name"));

    let full = [b'n'; 100];
    assert_eq!(one(Tar::default().member(&Header::new(b'0', &full, 0), b"")).0.path, path(&full));
    let odd = b"\xff\xfe \n*";
    assert_eq!(one(Tar::default().member(&Header::new(b'0', odd, 0), b"")).0.path, path(odd));
    let v7 = Header::new(0, b"old", 1).bytes(257, &[0; 255]).finish();
    let mut v7 = Tar(v7.to_vec());
    v7.0.extend([b'x'; 512]);
    assert_eq!(one(v7).1, b"x");
}

#[test]
fn numbers_that_do_not_fit_octal_are_read() {
    let pax: &[(&str, &[u8])] =
        &[("uid", b"4000000000"), ("gid", b"3000000"), ("mtime", b"-86400.25")];
    let (entry, _) = one(Tar::default().pax(b'x', pax).file("f", b""));
    let metadata = entry.metadata;
    assert_eq!((metadata.uid, metadata.gid), (4_000_000_000, 3_000_000));
    assert_eq!((metadata.mtime.seconds, metadata.mtime.nanoseconds), (-86401, 750_000_000));

    let mut header = Header::new(b'0', b"f", 0);
    header
        .bytes(108, b"\x80\0\0\0\xee\x6b\x28\0")
        .bytes(136, b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xae\x80");
    let (entry, _) = one(Tar::default().member(&header, b""));
    assert_eq!((entry.metadata.uid, entry.metadata.mtime.seconds), (4_000_000_000, -86400));

    header.octal(100..108, 0o10_4755);
    assert_eq!(one(Tar::default().member(&header, b"")).0.metadata.permissions, 0o4755);
    let devices: &[(&str, &[u8])] =
        &[("SCHILY.devmajor", b"4095"), ("SCHILY.devminor", b"1048575")];
    let (entry, _) =
        one(Tar::default().pax(b'x', devices).member(&Header::new(b'3', b"c", 0), b""));
    assert_eq!(entry.kind, EntryKind::CharDevice(Device { major: 4095, minor: 1_048_575 }));
}

#[test]
fn extended_headers_override_and_end() {
    let tar = Tar::default()
        .pax(b'g', &[("uid", b"7"), ("comment", b"0123abc")])
        .file("a", b"")
        .pax(b'x', &[("uid", b"8")])
        .file("b", b"")
        .file("c", b"")
        .pax(b'g', &[("uid", b"")])
        .file("d", b"")
        .pax(b'x', &[("size", b"3"), ("path", b"")])
        .member(&Header::new(b'0', b"e", 0), b"abc")
        .file("f", b"");
    let found = entries(&tar.end()).unwrap();
    let uids: Vec<u32> = found.iter().map(|(entry, _)| entry.metadata.uid).collect();
    assert_eq!(uids, [7, 8, 7, 0, 0, 0]);
    assert_eq!((found[4].0.path.as_bytes(), &found[4].1[..]), (&b"e"[..], &b"abc"[..]));
}

#[test]
fn attributes_of_every_writer_become_xattrs() {
    let acl = b"user::rwx\nuser:lisa:r-x\ngroup::r-x\nmask::r-x\nother::---\n";
    let minimal = b"user::rwx,group::r-x,other::---";
    let pax: &[(&str, &[u8])] = &[
        ("SCHILY.xattr.user.text", b"two\nlines\n"),
        ("SCHILY.xattr.security.capability", b"\x01\0\0\x02\0\x20\0\0\0\0\0\0\0\0\0\0\0\0\0\0"),
        ("SCHILY.xattr.user.empty", b""),
        ("LIBARCHIVE.xattr.user.b%3D64", b"AAEC"),
        ("SCHILY.acl.access", acl),
        ("SCHILY.acl.default", minimal),
    ];
    let mut directory = Header::new(b'5', b"d/", 0);
    directory.octal(108..116, 1000).bytes(265, b"lisa");
    let xattrs = one(Tar::default().pax(b'x', pax).member(&directory, b"")).0.metadata.xattrs;
    let get = |name: &str| xattrs.get(name.as_bytes()).map(|value| &value[..]);
    assert_eq!(get("user.text"), Some(&b"two\nlines\n"[..]));
    assert_eq!(get("user.empty"), Some(&b""[..]));
    assert_eq!(get("user.b=64"), Some(&b"\0\x01\x02"[..]));
    assert_eq!(get("security.capability").map(<[u8]>::len), Some(20));
    assert_eq!(get("system.posix_acl_access").map(<[u8]>::len), Some(4 + 5 * 8));
    assert_eq!(get("system.posix_acl_default").map(<[u8]>::len), Some(4 + 3 * 8));
    // Linux stores no access ACL that only repeats the mode.
    let (file, _) = one(Tar::default().pax(b'x', &[("SCHILY.acl.access", minimal)]).file("f", b""));
    assert!(file.metadata.xattrs.is_empty());
}

/// Eight bytes of data, holes before, between and behind.
const SPARSE: &[u8] = b"\0\0\0\0abcd\0\0\0\0efgh\0\0\0\0";

#[test]
fn sparse_files_of_all_four_formats_are_read() {
    let mut old = Header::new(b'S', b"f", 8);
    old.bytes(386, b"00000000004\x0000000000004\x0000000000014\x0000000000004\0");
    old.bytes(483, b"00000000024\0");
    let numbers: &[(&str, &[u8])] = &[
        ("GNU.sparse.size", b"20"),
        ("GNU.sparse.numblocks", b"2"),
        ("GNU.sparse.offset", b"4"),
        ("GNU.sparse.numbytes", b"4"),
        ("GNU.sparse.offset", b"12"),
        ("GNU.sparse.numbytes", b"4"),
    ];
    let map: &[(&str, &[u8])] = &[
        ("GNU.sparse.size", b"20"),
        ("GNU.sparse.numblocks", b"2"),
        ("GNU.sparse.map", b"4,4,12,4"),
        ("GNU.sparse.name", b"f"),
    ];
    let in_data: &[(&str, &[u8])] = &[
        ("GNU.sparse.major", b"1"),
        ("GNU.sparse.minor", b"0"),
        ("GNU.sparse.name", b"f"),
        ("GNU.sparse.realsize", b"20"),
    ];
    let mut with_map = b"2\n4\n4\n12\n4\n".to_vec();
    with_map.resize(512, 0);
    with_map.extend(b"abcdefgh");
    for tar in [
        Tar::default().member(&old, b"abcdefgh"),
        Tar::default().pax(b'x', numbers).file("f", b"abcdefgh"),
        Tar::default().pax(b'x', map).file("GNUSparseFile.1/f", b"abcdefgh"),
        Tar::default().pax(b'x', in_data).file("GNUSparseFile.1/f", &with_map),
    ] {
        let found = entries(&tar.file("next", b"x").end()).unwrap();
        assert_eq!(found[0].0.path, path(b"f"));
        assert_eq!(found[0].1, SPARSE);
        assert_eq!(found[1].1, b"x");
    }
}

#[test]
fn an_old_sparse_map_goes_on_in_more_blocks() {
    let mut header = Header::new(b'S', b"f", 30);
    let place = |n: u64| format!("{:011o}\0{:011o}\0", n * 2, 1).into_bytes();
    let first: Vec<u8> = (0..4).flat_map(place).collect();
    header.bytes(386, &first).bytes(482, b"\x01").bytes(483, format!("{:011o}\0", 100).as_bytes());
    let mut tar = header.finish().to_vec();
    for (numbers, more) in [(4..25, 1), (25..30, 0)] {
        let mut block: Vec<u8> = numbers.flat_map(place).collect();
        block.resize(512, 0);
        block[504] = more;
        tar.extend(block);
    }
    let mut tar = Tar(tar);
    tar.0.extend([b'x'; 30]);
    tar.0.resize(tar.0.len().next_multiple_of(512), 0);
    let (_, content) = one(tar);
    assert_eq!(content.len(), 100);
    assert_eq!(content.iter().filter(|&&byte| byte == b'x').count(), 30);
    assert!(content[..60].chunks(2).all(|pair| pair == b"x\0"));
}

#[test]
fn aufs_whiteouts_become_entries_and_its_own_files_are_dropped() {
    let tar = Tar::default()
        .file("a/.wh.b", b"")
        .file("a/.wh..wh..opq", b"")
        .file(".wh..wh..opq", b"")
        .file(".wh..wh.aufs", b"")
        .file(".wh..wh.plnk/1.2", b"")
        .file("...wh.x", b"");
    let found = entries(&tar.end()).unwrap();
    let found: Vec<_> =
        found.into_iter().map(|(entry, _)| (entry.path.to_string(), entry.kind)).collect();
    assert_eq!(found[0], ("/a/b".into(), EntryKind::Whiteout));
    assert_eq!(found[1], ("/a".into(), EntryKind::Opaque));
    assert_eq!(found[2], ("/".into(), EntryKind::Opaque));
    assert_eq!(found.last().unwrap().0, "/...wh.x");
    assert!(found.iter().all(|(path, _)| !path.contains("plnk")));
}

#[test]
fn archives_may_end_early_or_late() {
    let tar = Tar::default().file("a", b"abc");
    for end in [0, 512, 1024, 10240] {
        let mut bytes = tar.0.clone();
        bytes.resize(bytes.len() + end, 0);
        assert_eq!(entries(&bytes).unwrap().len(), 1, "{end}");
    }
    assert_eq!(entries(b"").unwrap().len(), 0);
    // Data behind the end of the archive is ignored.
    let two = [tar.clone().end(), tar.end()].concat();
    assert_eq!(entries(&two).unwrap().len(), 1);
}
