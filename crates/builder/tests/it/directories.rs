//! Directory trees as layers.

use std::{
    fs::{self, File},
    os::unix::fs::{PermissionsExt as _, symlink},
    path::Path,
    process::Command,
};

use lazuli_builder::{Layer, LayerSource, Merged, merge};
use lazuli_image::{Algorithm, Inode, Kind, Tree, compare::Content as _};

pub(crate) fn read(root: &Path) -> Merged {
    let layer = Layer {
        name: root.display().to_string(),
        stored_size: None,
        source: LayerSource::Directory(root.into()),
    };
    merge(vec![layer], 4096, Algorithm::Blake3, 2, &()).unwrap()
}

fn inode<'a>(tree: &'a Tree, path: &str) -> &'a Inode {
    &tree[tree.find(path.split('/').map(str::as_bytes)).unwrap_or_else(|| panic!("{path}"))]
}

#[test]
fn every_kind_of_file_in_a_directory_becomes_an_entry() {
    let scratch = tempfile::tempdir().unwrap();
    let root = scratch.path();
    fs::create_dir_all(root.join("d/e")).unwrap();
    fs::write(root.join("d/file"), b"content").unwrap();
    fs::set_permissions(root.join("d/file"), fs::Permissions::from_mode(0o4750)).unwrap();
    fs::hard_link(root.join("d/file"), root.join("second")).unwrap();
    symlink("/etc/passwd", root.join("link")).unwrap();
    symlink("d", root.join("dirlink")).unwrap();
    fs::write(root.join(".wh.not-a-whiteout"), b"").unwrap();
    let sparse = File::create(root.join("sparse")).unwrap();
    sparse.set_len(10_000).unwrap();
    let time = std::time::UNIX_EPOCH - std::time::Duration::from_millis(1500);
    sparse.set_modified(time).unwrap();
    std::os::unix::net::UnixListener::bind(root.join("socket")).unwrap();
    assert!(Command::new("mkfifo").arg(root.join("fifo")).status().unwrap().success());
    let labelled = xattr::set(root.join("d/file"), "user.text", b"two\nlines").is_ok();

    let merged = read(root);
    let tree = &merged.tree;
    assert_eq!(tree.find([&b"d"[..], b"file"]), tree.find([&b"second"[..]]));
    let file = inode(tree, "d/file");
    assert_eq!(file.metadata.permissions, 0o4750);
    if labelled {
        assert_eq!(&file.metadata.xattrs[&b"user.text"[..]][..], b"two\nlines");
    }
    let Kind::Regular { size: 7, chunks } = &file.kind else { panic!("{file:?}") };
    assert_eq!(merged.chunk(chunks[0]), Some((Algorithm::Blake3.digest(b"content"), 7)));
    assert_eq!(inode(tree, "link").kind, Kind::Symlink((*b"/etc/passwd").into()));
    assert_eq!(inode(tree, "dirlink").kind, Kind::Symlink((*b"d").into()));
    assert_eq!(inode(tree, "fifo").kind, Kind::Fifo);
    assert_eq!(inode(tree, "socket").kind, Kind::Socket);
    assert!(matches!(inode(tree, ".wh.not-a-whiteout").kind, Kind::Regular { size: 0, .. }));
    let sparse = inode(tree, "sparse");
    assert_eq!(
        (sparse.metadata.mtime.seconds, sparse.metadata.mtime.nanoseconds),
        (-2, 500_000_000)
    );
    let Kind::Regular { size: 10_000, chunks } = &sparse.kind else { panic!("{sparse:?}") };
    assert_eq!(merged.chunk(chunks[0]), Some((Algorithm::Blake3.digest(&[0; 4096]), 4096)));
    assert_eq!(merged.chunk(chunks[2]), Some((Algorithm::Blake3.digest(&[0; 1808]), 1808)));
}

#[test]
fn errors_name_the_unreadable_file() {
    let scratch = tempfile::tempdir().unwrap();
    let file = scratch.path().join("file");
    fs::write(&file, b"").unwrap();
    for path in [file, scratch.path().join("nowhere")] {
        let source = LayerSource::Directory(path.clone());
        let layer = Layer { name: "tree".into(), stored_size: None, source };
        let error = merge(vec![layer], 4096, Algorithm::Blake3, 2, &()).unwrap_err().to_string();
        assert!(
            error.starts_with(&format!("layer tree: cannot read {}", path.display())),
            "{error}"
        );
    }
}
