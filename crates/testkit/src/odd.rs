//! An image with every oddity of real layers, and one with oddities that no other unpacker handles.
//!
//! [`image`] is for comparison with an unpacker (`umoci unpack`): the trees must be equal.
//! [`extra`] comes with the correct listing, because unpackers disagree about it or drop it.
//! Neither has sockets: tar has no type for them.

use lazuli_image::Algorithm;

use crate::{
    content,
    oci::{Compression, Image, Layer},
    tarball::{self, Body, Entry, SparseFormat},
};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// The odd image: four layers, gzip, zstd, plain and gzip.
pub fn image() -> Image {
    let compressions = [Compression::Gzip, Compression::Zstd, Compression::None, Compression::Gzip];
    let layers = layers().into_iter().zip(compressions);
    Image::new(
        layers.map(|(entries, compression)| Layer::new(tarball::write(&entries), compression)),
    )
}

/// What is in its layers, lowest first.
pub fn layers() -> [Vec<Entry>; 4] {
    [base(), changes(), more_changes(), vec![directory("metadata-only").mode(0o700).owner(3, 4)]]
}

/// A layer with one sparse file of a little over 4 GiB: reading it all takes seconds.
pub fn huge_layer() -> Layer {
    let size = (4 << 30) + 4097;
    let pieces = vec![(0, random(90, 5000)), (size - 4097, random(91, 4097))];
    let huge = Entry::new("huge", Body::Sparse { format: SparseFormat::Pax10, size, pieces });
    Layer::new(tarball::write([&huge]), Compression::Gzip)
}

/// Oddities that unpackers disagree about or refuse, and the right listing of the result.
///
/// Parents that no layer lists belong to root, have mode 0755 and the time 0; ACLs in text form are
/// the same as in binary form; an attribute may be empty; sparse files may be of GNU tar's own
/// format.
pub fn extra() -> (Image, String) {
    let mut entries = vec![
        Entry::directory("./").mtime(5, 0),
        Entry::file("implied/parents/file", "x").mtime(7, 0),
        Entry::directory("acl").mode(0o750).mtime(8, 0).record(
            "SCHILY.acl.default",
            "user::rwx,user:1000:r-x,group::r-x,mask::r-x,other::---",
        ),
        Entry::file("acl/file", "y").mode(0o664).mtime(9, 0).record(
            "SCHILY.acl.access",
            "user::rw-,user:1000:rwx:1000,group::r--,mask::rw-,other::r--",
        ),
        Entry::file("empty-attribute", "").mtime(12, 0).xattr("user.empty", ""),
        Entry::directory("sparse").mtime(10, 0),
    ];
    let mut listing = [
        "/ dir 0755 0:0 5.000000000\n",
        "/acl dir 0750 0:0 8.000000000 system.posix_acl_default=02000000",
        "01000700ffffffff02000500e803000004000500ffffffff10000500ffffffff20000000ffffffff\n",
        "/acl/file file 0664 0:0 9.000000000 size=1 ",
        "sha256:a1fce4363854ff888cff4b8e7875d600c2682390412a8cf79b37d0b11148b0fa ",
        "system.posix_acl_access=02000000",
        "01000600ffffffff02000700e803000004000400ffffffff10000600ffffffff20000400ffffffff\n",
        "/empty-attribute file 0644 0:0 12.000000000 size=0 ",
        "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855 user.empty=\n",
        "/implied dir 0755 0:0 0.000000000\n",
        "/implied/parents dir 0755 0:0 0.000000000\n",
        "/implied/parents/file file 0644 0:0 7.000000000 size=1 ",
        "sha256:2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881\n",
        "/sparse dir 0755 0:0 10.000000000\n",
    ]
    .concat();
    let mut files = sparse_pieces();
    files.sort_unstable_by_key(|(kind, _)| *kind);
    for (kind, pieces) in files {
        let mut content = vec![0; SPARSE_SIZE as usize];
        for (offset, bytes) in &pieces {
            content[*offset as usize..][..bytes.len()].copy_from_slice(bytes);
        }
        let digest = Algorithm::Sha256.digest(&content);
        listing +=
            &format!("/sparse/{kind} file 0644 0:0 11.000000000 size={SPARSE_SIZE} {digest}\n");
        let body = Body::Sparse { format: SparseFormat::Gnu, size: SPARSE_SIZE, pieces };
        entries.push(Entry::new(format!("sparse/{kind}"), body).mtime(11, 0).gnu());
    }
    (Image::new([Layer::new(tarball::write(&entries), Compression::None)]), listing)
}

fn base() -> Vec<Entry> {
    let mut entries = vec![
        directory("./").mode(0o755).mtime(1_600_000_000, 1),
        directory("./metadata-only/").owner(1, 2).mtime(1_600_000_001, 999_999_999),
        Entry::file("metadata-only/kept", "kept"),
    ];
    entries.extend(types());
    entries.extend(attributes());
    entries.extend(names());
    entries.extend(contents());
    entries.extend(sparse("base"));
    entries.extend(to_be_changed());
    entries
}

/// Devices, links, special modes, owners and times.
fn types() -> Vec<Entry> {
    vec![
        directory("types").mode(0o1777),
        Entry::new("types/block", Body::Block(259, 70_000)).mode(0o660).owner(0, 6),
        Entry::new("types/char", Body::Char(1, 3)).mode(0o666),
        Entry::new("types/fifo", Body::Fifo).mode(0o600),
        Entry::new("types/fifo-gnu", Body::Fifo).gnu(),
        Entry::file("types/setuid", "#!").mode(0o4755),
        Entry::file("types/setgid", "#!").mode(0o2755).owner(0, 42),
        Entry::file("types/no-permissions", "secret").mode(0),
        Entry::file("types/empty", ""),
        Entry::file("types/big-owner", "x").owner(4_000_000_000, 3_000_000_000),
        Entry::file("types/big-owner-gnu", "x").owner(4_000_000_000, 3_000_000_000).gnu(),
        Entry::file("types/before-1970", "x").mtime(-2, 500_000_000),
        Entry::file("types/before-1970-gnu", "x").mtime(-86_400, 0).gnu(),
        Entry::file("types/after-2038", "x").mtime(1 << 32, 123_456_789),
        Entry::symlink("types/relative", "../contents/one").mtime(1, 2),
        Entry::symlink("types/dangling", "/no/such/file").owner(7, 8),
        Entry::symlink("types/long-target", vec![b't'; 4000]),
        Entry::symlink("types/long-target-gnu", [b"g/".repeat(1999), b"g".to_vec()].concat()).gnu(),
        Entry::hard_link("types/link-to-symlink", "types/relative"),
        Entry::hard_link("types/link-to-file", "types/setuid").mode(0o4755),
        Entry::hard_link("types/link-to-fifo", "./types/fifo").mode(0o600),
        Entry::hard_link("types/link-to-block", "types/block").mode(0o660),
    ]
}

/// Extended attributes, capabilities and ACLs.
fn attributes() -> Vec<Entry> {
    // Revision 2 with the effective bit; CAP_NET_BIND_SERVICE and CAP_NET_RAW permitted.
    let mut capability = vec![0; 20];
    capability[..4].copy_from_slice(&0x0200_0001_u32.to_le_bytes());
    capability[4..8].copy_from_slice(&(1_u32 << 10 | 1 << 13).to_le_bytes());
    // Mode and mask agree, as in every ACL that a file system stored.
    let access = acl(&[
        (0x01, 6, None),
        (0x02, 4, Some(1000)),
        (0x04, 4, None),
        (0x10, 6, None),
        (0x20, 0, None),
    ]);
    let default = acl(&[
        (0x01, 7, None),
        (0x04, 5, None),
        (0x08, 7, Some(50)),
        (0x10, 7, None),
        (0x20, 5, None),
    ]);
    vec![
        directory("attributes").xattr("trusted.on-directory", "yes"),
        Entry::file("attributes/user", "x").xattr("user.note", "a value"),
        Entry::file("attributes/binary", "x").xattr("user.binary", [0, 255, b'\n', b'=', 0]),
        Entry::file("attributes/same", "x").xattr("user.note", "a value"),
        Entry::file("attributes/big", "x").xattr("user.big", vec![b'v'; 3000]),
        Entry::file("attributes/many", "x")
            .xattr("user.z", "1")
            .xattr("trusted.a", "2")
            .xattr("user.a", "3"),
        Entry::file("attributes/capable", "#!")
            .mode(0o755)
            .xattr("security.capability", capability),
        Entry::file("attributes/acl", "x").mode(0o660).xattr("system.posix_acl_access", access),
        directory("attributes/acl-default").xattr("system.posix_acl_default", default),
        Entry::symlink("attributes/symlink", "user").xattr("trusted.on-symlink", "yes"),
        Entry::new("attributes/fifo", Body::Fifo).xattr("trusted.on-fifo", "yes"),
    ]
}

/// Names that break sorting, encodings and limits.
fn names() -> Vec<Entry> {
    let mut entries = vec![directory("names")];
    let odd: [&[u8]; 12] = [
        b"!x",
        b"-x",
        b" ",
        b".hidden",
        b"..x",
        b"...",
        b"\xff\xfe",
        b"caf\xe9",
        "é".as_bytes(),
        b"new\nline",
        b"back\\slash",
        b"~",
    ];
    for name in odd {
        entries.push(Entry::file([b"names/", name].concat(), name));
    }
    entries.push(Entry::file([&b"names/"[..], &[b'p'; 255]].concat(), "pax"));
    entries.push(Entry::file([&b"names/"[..], &[b'g'; 255]].concat(), "gnu").gnu());
    entries.push(Entry::file([&b"names/"[..], &[0xf0; 255]].concat(), "not text").gnu());
    entries.push(Entry::file([&b"names/"[..], &[b'h'; 94]].concat(), "exactly 100 bytes"));
    entries.push(Entry::hard_link("names/long-link", [&b"names/"[..], &[b'p'; 255]].concat()));
    entries.push(
        Entry::hard_link("names/long-link-gnu", [&b"names/"[..], &[b'g'; 255]].concat()).gnu(),
    );

    let mut deep = "deep".to_owned();
    for level in 0..200 {
        entries.push(directory(deep.as_str()));
        deep.push_str(&format!("/{level}"));
    }
    entries.push(Entry::file(deep, "bottom"));

    entries.push(directory("many"));
    for index in 0..700 {
        let name = format!("many/an-entry-with-a-name-of-some-length-{:03}", index * 3 % 700);
        entries.push(match index % 5 {
            0 => Entry::symlink(name, "target"),
            1 => Entry::file(name, format!("{index}")),
            2 => directory(name),
            _ => Entry::file(name, ""),
        });
    }
    entries
}

/// Sizes around blocks and chunks.
fn contents() -> Vec<Entry> {
    let mut entries = vec![directory("contents"), Entry::file("contents/one", "1")];
    for size in [4095, 4096, 4097, 64 * KIB, MIB, MIB + 1, 5 * MIB] {
        entries.push(Entry::file(format!("contents/random-{size}"), random(size as u64, size)));
        entries.push(Entry::file(format!("contents/text-{size}"), text(size)));
    }
    entries.push(Entry::file("contents/zeros", vec![0; 3 * MIB + 5]));
    entries.push(Entry::file("contents/duplicate", random(MIB as u64, MIB)));
    entries
}

/// Sparse files below the directory `sparse-LAYER`; GNU tar's own format is in [`extra`].
fn sparse(layer: &str) -> Vec<Entry> {
    let mut entries = vec![directory(format!("sparse-{layer}"))];
    for (format, name) in [(SparseFormat::Pax01, "pax01"), (SparseFormat::Pax10, "pax10")] {
        for (kind, pieces) in sparse_pieces() {
            let body = Body::Sparse { format, size: SPARSE_SIZE, pieces };
            entries.push(Entry::new(format!("sparse-{layer}/{name}-{kind}"), body));
        }
    }
    entries
}

const SPARSE_SIZE: u64 = 6 * MIB as u64 + 100;

/// Data by offset, see [`Body::Sparse`].
type Pieces = Vec<(u64, Vec<u8>)>;

fn sparse_pieces() -> [(&'static str, Pieces); 4] {
    [
        ("many", (0..40).map(|piece| (piece * 100_000, random(200 + piece, 512))).collect()),
        ("few", vec![(4096, random(300, 4096)), (2 * MIB as u64, random(301, 70_000))]),
        ("to-the-end", vec![(SPARSE_SIZE - 512, random(302, 512))]),
        ("all-hole", vec![]),
    ]
}

/// Targets for removals, replacements and links of later layers.
fn to_be_changed() -> Vec<Entry> {
    vec![
        Entry::file("removed-file", "x"),
        directory("removed-directory"),
        Entry::file("removed-directory/child", "x"),
        directory("opaque"),
        Entry::file("opaque/lower", "lower"),
        directory("opaque/lower-directory"),
        Entry::file("opaque/both", "lower"),
        directory("opaque-last"),
        Entry::file("opaque-last/lower", "lower"),
        directory("owned")
            .mode(0o710)
            .owner(11, 12)
            .mtime(1_500_000_000, 5)
            .xattr("user.kept", "yes"),
        directory("owned/inner").mode(0o2750).owner(13, 14).mtime(1_500_000_001, 6),
        directory("becomes-file"),
        Entry::file("becomes-file/child", "x"),
        Entry::file("becomes-directory", "x"),
        directory("becomes-symlink"),
        Entry::symlink("becomes-real", "contents"),
        Entry::file("linked", "linked").owner(9, 9),
        Entry::hard_link("linked-again", "linked").owner(9, 9),
        Entry::hard_link("linked-and-removed", "linked").owner(9, 9),
        Entry::file("rewritten", "old"),
        Entry::hard_link("rewritten-link", "rewritten"),
    ]
}

fn changes() -> Vec<Entry> {
    let mut entries = vec![
        Entry::file(".wh.removed-file", ""),
        Entry::file(".wh.removed-directory", ""),
        Entry::file(".wh.linked-and-removed", ""),
        directory("opaque").mtime(1_650_000_000, 0),
        Entry::file("opaque/.wh..wh..opq", ""),
        Entry::file("opaque/both", "upper"),
        Entry::file("opaque/upper", "upper"),
        directory("opaque-last"),
        Entry::file("opaque-last/upper", "upper"),
        Entry::file("opaque-last/.wh..wh..opq", ""),
        // `owned` and `owned/inner` are not listed: they keep owner, mode, time and attributes.
        Entry::file("owned/inner/added", "added"),
        Entry::file("becomes-file", "now a file"),
        directory("becomes-directory").mode(0o711),
        Entry::file("becomes-directory/child", "x"),
        Entry::symlink("becomes-symlink", "owned"),
        directory("becomes-real"),
        Entry::hard_link("linked-from-above", "linked").owner(9, 9),
        Entry::hard_link("symlink-linked-from-above", "types/dangling"),
        // Only this name changes; the other one keeps the old content.
        Entry::file("rewritten", "new"),
        directory("upper"),
        Entry::file("upper/duplicate", random(MIB as u64, MIB)),
        Entry::file(
            "upper/duplicate-start",
            [random(5 * MIB as u64, 5 * MIB), b"more".to_vec()].concat(),
        ),
        Entry::file("upper/removed-next", "x"),
        Entry::file("upper/new", random(400, 300 * KIB)),
    ];
    entries.extend(sparse("upper"));
    entries
}

fn more_changes() -> Vec<Entry> {
    vec![
        directory("becomes-file").mode(0o700).mtime(-1, 1),
        Entry::file("becomes-file/again-a-directory", "x"),
        Entry::file("becomes-directory", "again a file"),
        Entry::file("removed-file", "back"),
        directory("removed-directory"),
        Entry::file("removed-directory/other", "x"),
        Entry::file("upper/.wh.removed-next", ""),
        Entry::file("upper/only-duplicates", text(MIB)),
    ]
}

fn directory(path: impl Into<Vec<u8>>) -> Entry {
    Entry::directory(path).mtime(1_550_000_000, 10)
}

/// An ACL as the kernel keeps it: version 2, then tag, permissions and id of each entry.
fn acl(entries: &[(u16, u16, Option<u32>)]) -> Vec<u8> {
    let mut value = 2_u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries {
        value.extend_from_slice(&tag.to_le_bytes());
        value.extend_from_slice(&permissions.to_le_bytes());
        value.extend_from_slice(&id.unwrap_or(u32::MAX).to_le_bytes());
    }
    value
}

/// Bytes that do not compress: the same for the same seed, always (SplitMix64).
pub fn random(seed: u64, size: usize) -> Vec<u8> {
    let mut bytes = vec![0; size];
    content::fill(seed, 0, &mut bytes);
    bytes
}

/// Bytes that compress well, and differ at every place.
pub fn text(size: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> =
        (0..).flat_map(|line| format!("line {line} of a text\n").into_bytes()).take(size).collect();
    bytes.truncate(size);
    bytes
}
