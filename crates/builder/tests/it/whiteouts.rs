//! Deletions as the programs write them that make layers.

use lazuli_builder::merge;
use lazuli_image::{Algorithm, InodeId, Kind, Tree};

use crate::tarball::{Header, Tar, layer};

/// `a/x a/y b/f b/g c d/deep/e`
fn base() -> Tar {
    let names = ["a/x", "a/y", "b/f", "b/g", "c", "d/deep/e"];
    let dirs = ["a/", "b/", "d/", "d/deep/"];
    let tar = dirs.into_iter().fold(Tar::default(), |tar, dir| {
        tar.member(Header::new(b'5', dir.as_bytes(), 0).octal(100..108, 0o2750), b"")
    });
    names.into_iter().fold(tar, |tar, name| tar.file(name, b"old"))
}

/// Paths with the modes of directories and the sizes of files, in order.
fn paths(upper: Tar) -> Vec<String> {
    fn visit(tree: &Tree, at: InodeId, path: &str, found: &mut Vec<String>) {
        for (name, id) in tree.children(at).unwrap() {
            let path = format!("{path}/{name}");
            match &tree[*id].kind {
                Kind::Directory(_) => {
                    found.push(format!("{path} {:o}", tree[*id].metadata.permissions));
                    visit(tree, *id, &path, found);
                }
                Kind::Regular { size, .. } => found.push(format!("{path} {size}")),
                other => panic!("{path}: {other:?}"),
            }
        }
    }
    let layers = vec![layer("base", base().end()), layer("upper", upper.end())];
    let image = merge(layers, 4096, Algorithm::Blake3, 1, &()).unwrap();
    let mut found = Vec::new();
    visit(&image.tree, Tree::ROOT, "", &mut found);
    found
}

/// BuildKit and containerd: names without `./`, parent directories before a change, whiteouts as
/// empty files of mode 0, and an opaque marker inside a directory that was made anew.
#[test]
fn buildkits_whiteouts_remove_what_they_name() {
    let whiteout = |name: &str| {
        let mut header = Header::new(b'0', name.as_bytes(), 0);
        header.octal(100..108, 0);
        header
    };
    let upper = Tar::default()
        .dir("a/")
        .member(&whiteout("a/.wh.x"), b"")
        .dir("b/")
        .member(&whiteout("b/.wh..wh..opq"), b"")
        .file("b/new", b"new!")
        .dir("c/")
        .file("c/in", b"")
        .member(&whiteout(".wh.d"), b"");
    assert_eq!(paths(upper), ["/a 644", "/a/y 3", "/b 644", "/b/new 4", "/c 644", "/c/in 0"]);
}

/// Kaniko: whiteouts come first, without a type and without parent directories, even for entries
/// that the same layer makes again; names may begin with a slash.
#[test]
fn kanikos_whiteouts_spare_entries_of_their_own_layer() {
    let whiteout = |name: &str| {
        let mut header = Header::new(0, name.as_bytes(), 0);
        header.octal(100..108, 0);
        header
    };
    let upper = Tar::default()
        .member(&whiteout("a/.wh.y"), b"")
        .member(&whiteout("d/deep/.wh.e"), b"")
        .member(&whiteout(".wh.c"), b"")
        .member(&whiteout(".wh.b"), b"")
        .member(&whiteout(".wh.never-was"), b"")
        .dir("/b/")
        .file("/b/f", b"new!")
        .file("/c", b"new!");
    assert_eq!(
        paths(upper),
        ["/a 2750", "/a/x 3", "/b 644", "/b/f 4", "/c 4", "/d 2750", "/d/deep 2750"]
    );
}
