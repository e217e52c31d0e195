//! Damaged and hostile archives, and their errors.

use std::io::Write as _;

use lazuli_builder::merge;
use lazuli_image::Algorithm;

use crate::tarball::{Header, Tar, entries, layer};

fn message(tar: &[u8]) -> String {
    match entries(tar) {
        Ok(entries) => format!("no error but {} entries", entries.len()),
        Err(error) => error.to_string(),
    }
}

#[test]
fn members_inherit_no_more_than_a_tar_may_give_them() {
    let attribute = [("SCHILY.xattr.user.a", &[b'x'; 60_000][..])];
    let members = |count: usize| {
        let tar = Tar::default().pax(b'g', &attribute);
        (0..count).fold(tar, |tar, number| tar.file(&number.to_string(), b"")).end()
    };
    assert_eq!(entries(&members(1000)).unwrap().len(), 1000);
    let error = message(&members(2000));
    assert!(error.contains("inherit more than 67108864 bytes"), "{error}");
    // What a member says itself is bounded by its own size.
    let own = (0..2000).fold(Tar::default(), |tar, number| {
        tar.pax(b'x', &[("SCHILY.xattr.user.a", &[b'x'; 1000])]).file(&number.to_string(), b"")
    });
    assert_eq!(entries(&own.end()).unwrap().len(), 2000);
}

#[test]
fn errors_name_entry_place_and_expectation() {
    let file = |name: &str| Tar::default().file("first", b"x").file(name, b"").end();
    let pax =
        |key: &str, value: &[u8]| Tar::default().pax(b'x', &[(key, value)]).file("f", b"").end();
    let header = |change: fn(&mut Header)| {
        let mut header = Header::new(b'0', b"f", 0);
        change(&mut header);
        Tar::default().member(&header, b"").end()
    };
    let link = |kind, target: &str| Tar::default().link(kind, "l", target).end();
    let long = "n/".repeat(2100);
    let sparse = |size: &[u8], map: &[u8]| {
        let keys: &[(&str, &[u8])] = &[("GNU.sparse.size", size), ("GNU.sparse.map", map)];
        Tar::default().pax(b'x', keys).file("f", b"12345678").end()
    };
    let in_data = |map: &[u8]| {
        let keys: &[(&str, &[u8])] =
            &[("GNU.sparse.major", b"1"), ("GNU.sparse.realsize", b"9"), ("GNU.sparse.name", b"f")];
        Tar::default().pax(b'x', keys).file("f", map).end()
    };
    let table: Vec<(Vec<u8>, &str)> = vec![
        (file("../x"), "entry `../x` at byte 1024: the name has a `..` component"),
        (file("a/../../x"), "entry `a/../../x` at byte 1024: the name has a `..` component"),
        (file(""), "entry `` at byte 1024: the name is empty"),
        (file("a/.wh."), "a whiteout that hides no name"),
        (file("a/.wh..."), "a whiteout that hides no name"),
        (pax("path", long.as_bytes()), "the name has 4200 bytes, expected at most 4096"),
        (pax("path", "d/".repeat(300).as_bytes()), "the name is more than 256 directories deep"),
        (pax("path", &[b'x'; 256]), "a file name of 256 bytes: the limit is 255"),
        (pax("path", b"a\0b"), "is not allowed"),
        (
            pax("uid", b"4294967296"),
            "entry `f` at byte 0: uid is 4294967296, expected less than 2^32",
        ),
        (pax("size", b"9223372036854775807"), "expected less than 2^63"),
        (pax("size", b"5000"), "cut off"),
        (
            pax("mtime", b"yesterday"),
            "byte 0: PAX key mtime has the value `yesterday`, expected seconds",
        ),
        (
            pax("SCHILY.xattr.user.x", &[b'x'; 65536]),
            "extended attribute user.x has 65536 bytes, expected at most 65535",
        ),
        (pax("SCHILY.xattr.", b"x"), "an extended attribute name of 0 bytes"),
        (
            pax("SCHILY.acl.access", b"user::rwx"),
            "entry `f` at byte 0: the ACL `user::rwx` is not complete",
        ),
        (pax("GNU.sparse.major", b"2"), "GNU sparse format 2, expected 0 or 1"),
        (pax("GNU.sparse.map", b"0,0"), "a sparse member without GNU.sparse.size"),
        (sparse(b"100", b"0,4,2,4"), "segment 1 of the sparse map (4 bytes at 2) is out of order"),
        (sparse(b"100", b"99,8"), "outside the file of 100 bytes"),
        (sparse(b"100", b"0,4"), "the sparse map has 4 bytes of data, the archive 8"),
        (sparse(b"100", b"0,4,4"), "half a segment"),
        (in_data(b""), "the sparse map does not end before the data does"),
        (in_data(&[b'9'; 512]), "the sparse map holds `99999999999999999999`"),
        (in_data(&[&b"2000000\n"[..], &[b'1'; 504]].concat()), "more than 1048576 segments"),
        (
            header(|h| {
                h.bytes(124, b"what?\0");
            }),
            "the size field holds `what?",
        ),
        (
            header(|h| {
                h.bytes(100, b"rwxrwxr\0");
            }),
            "the mode field holds `rwxrwxr",
        ),
        (
            header(|h| {
                h.bytes(108, &[0xff; 8]);
            }),
            "the uid field holds",
        ),
        (
            header(|h| {
                h.bytes(0, b"f/").octal(124..136, 5);
            }),
            "a directory (its name ends in /) with 5 bytes",
        ),
        (
            header(|h| {
                h.bytes(156, b"M");
            }),
            "from another volume",
        ),
        (
            header(|h| {
                h.bytes(156, b"?");
            }),
            "members of type `?` are not known",
        ),
        (
            header(|h| {
                h.bytes(156, b"3").octal(329..337, 4096);
            }),
            "major device number is 4096, expected less than 4096",
        ),
        (
            header(|h| {
                h.bytes(156, b"4").octal(337..345, 1 << 20);
            }),
            "minor device number is 1048576",
        ),
        (
            link(b'1', "/../etc/passwd"),
            "entry `l` at byte 0: hard link target `/../etc/passwd`: the name has a `..` component",
        ),
        (link(b'1', ""), "hard link target ``: the name is empty"),
        (link(b'2', ""), "a symbolic link to 0 bytes, expected 1 to 4095"),
        (
            Tar::default().member(&Header::new(b'x', b"h", (1 << 20) + 1), b"").end(),
            "a PAX header of 1048577 bytes, expected at most 1048576",
        ),
        (
            Tar::default().member(&Header::new(b'g', b"h", (64 << 10) + 1), b"").end(),
            "a global PAX header of 65537 bytes, expected at most 65536",
        ),
        (
            Tar::default().member(&Header::new(b'L', b"h", 5000), b"").end(),
            "a GNU long name of 5000 bytes, expected at most 4097",
        ),
        (
            Tar::default().member(&Header::new(b'x', b"h", 5), b"hello").end(),
            "`LENGTH KEY=VALUE` was expected in a PAX header, found `hello`",
        ),
        (
            Tar::default().pax(b'x', &[("path", b"a")]).end(),
            "the archive ends after an extended header",
        ),
        (b"not a tar archive".repeat(100), "byte 0: a tar header with checksum"),
        (vec![b'x'; 100], "byte 0: the archive ends 100 bytes into a header of 512"),
    ];
    for (tar, expected) in table {
        let message = message(&tar);
        assert!(message.contains(expected), "expected `{expected}`, got `{message}`");
    }
}

#[test]
fn a_cut_archive_is_an_error_wherever_it_is_cut() {
    let tar = Tar::default()
        .pax(b'x', &[("path", b"some/name"), ("SCHILY.xattr.user.a", b"b")])
        .file("f", &[b'x'; 700])
        .link(b'1', "h", "some/name")
        .0;
    let boundaries = [0, tar.len() - 512, tar.len()];
    for length in 0..tar.len() {
        assert_eq!(entries(&tar[..length]).is_ok(), boundaries.contains(&length), "{length}");
    }
    let mut wrong = tar.clone();
    wrong[1024 + 5] ^= 1;
    assert!(
        message(&wrong).starts_with("byte 1024: a tar header with checksum"),
        "{}",
        message(&wrong)
    );
}

#[test]
fn errors_name_the_layer() {
    let good = Tar::default().file("a", b"x").end();
    let bad = Tar::default().file("../b", b"x").end();
    let layers = vec![layer("sha256:low", good), layer("sha256:high", bad)];
    let error = merge(layers, 4096, Algorithm::Blake3, 2, &()).unwrap_err().to_string();
    assert_eq!(
        error,
        "layer sha256:high: entry `../b` at byte 0: the name has a `..` component, which could lead out of the image"
    );
}

#[test]
fn bombs_are_refused() {
    let keys: &[(&str, &[u8])] =
        &[("GNU.sparse.size", b"1099511627776"), ("GNU.sparse.map", b"1099511627775,1")];
    let sparse = Tar::default().pax(b'x', keys).file("tib", b"x").end();
    let mut zstd = zstd::stream::write::Encoder::new(Vec::new(), 1).unwrap();
    zstd.write_all(&Header::new(b'0', b"zeros", 4 << 30).finish()).unwrap();
    for _ in 0..1300 {
        zstd.write_all(&[0; 1 << 20]).unwrap();
    }
    let packed = zstd.finish().unwrap();
    for (name, bytes) in [("tib", sparse), ("zeros", packed)] {
        assert!(bytes.len() < 200_000, "{}", bytes.len());
        let error = merge(vec![layer("bomb", bytes)], 1 << 20, Algorithm::Blake3, 2, &())
            .unwrap_err()
            .to_string();
        assert!(error.contains(&format!("layer bomb: entry `/{name}` at byte 0")), "{error}");
        assert!(error.contains("decompression bomb"), "{error}");
    }
}
