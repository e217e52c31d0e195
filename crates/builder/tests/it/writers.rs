//! Archives that real programs write, compared with the directory that they were made from.

use std::{
    fs::{self, File},
    os::unix::{
        ffi::OsStrExt as _,
        fs::{FileExt as _, PermissionsExt as _, symlink},
    },
    path::Path,
    process::Command,
};

use lazuli_builder::merge;
use lazuli_image::{Algorithm, compare::compare};
use lazuli_testkit::kernel::{Feature, require};

use crate::{directories::read, tarball::layer};

/// A tree with difficult cases for archives.
fn odd_tree(root: &Path) {
    fs::create_dir_all(root.join("dir")).unwrap();
    fs::set_permissions(root.join("dir"), fs::Permissions::from_mode(0o1770)).unwrap();
    fs::write(root.join("dir/file"), b"content").unwrap();
    fs::write(root.join("empty"), b"").unwrap();
    fs::write(root.join("a long name ".repeat(20)), b"long").unwrap();
    let deep = format!("{}/file", ["component"; 30].join("/"));
    fs::create_dir_all(root.join(&deep).parent().unwrap()).unwrap();
    fs::write(root.join(&deep), b"deep").unwrap();
    fs::write(root.join(std::ffi::OsStr::from_bytes(b"latin-\xe4\xff")), b"bytes").unwrap();
    symlink("x".repeat(1000), root.join("long link")).unwrap();
    symlink("dir/file", root.join("link")).unwrap();
    fs::hard_link(root.join("dir/file"), root.join("hard")).unwrap();
    fs::hard_link(root.join("link"), root.join("hard to link")).unwrap();
    let sparse = File::create(root.join("sparse")).unwrap();
    sparse.set_len(3 << 20).unwrap();
    for start in [0u64, 70_000, 1 << 20, (3 << 20) - 5] {
        sparse.write_all_at(b"data!", start).unwrap();
    }
    let holes = File::create(root.join("holes only")).unwrap();
    holes.set_len(100_000).unwrap();
    assert!(Command::new("mkfifo").arg(root.join("fifo")).status().unwrap().success());
    // Real devices need rights; without them the rest is still compared.
    let _ = Command::new("mknod").arg(root.join("null")).args(["c", "259", "70000"]).status();
    let time = std::time::UNIX_EPOCH - std::time::Duration::new(86_400, 0);
    File::open(root.join("empty")).unwrap().set_modified(time).unwrap();
}

/// Adds attributes that need file system support, and times with nanoseconds.
fn attributes(root: &Path) {
    let file = root.join("dir/file");
    xattr::set(&file, "user.text", b"two\nlines\0=%").unwrap();
    xattr::set(&file, "user.big", &[b'x'; 2000]).unwrap();
    let acl = ["-m", "u:1234:r-x,g:77:rwx"];
    assert!(Command::new("setfacl").args(acl).arg(&file).status().unwrap().success());
    let default = ["-d", "-m", "u:1234:r-x"];
    assert!(
        Command::new("setfacl").args(default).arg(root.join("dir")).status().unwrap().success()
    );
}

/// Sets one time everywhere, in whole seconds after 1970, as the oldest formats require.
fn same_time(root: &Path) {
    let mut find = Command::new("find");
    find.arg(root).args(["-depth", "-exec", "touch", "-h", "-d", "@1700000000", "{}", "+"]);
    assert!(find.status().unwrap().success());
}

/// The same, with one file from before 1970.
fn whole_seconds(root: &Path) {
    same_time(root);
    let time = std::time::UNIX_EPOCH - std::time::Duration::new(86_400, 0);
    File::open(root.join("empty")).unwrap().set_modified(time).unwrap();
}

/// Archives `root` with a command that writes to its output, and compares.
fn round_trip(root: &Path, command: &[&str]) {
    let output = Command::new(command[0]).args(&command[1..]).current_dir(root).output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    let archive = merge(vec![layer("tar", output.stdout)], 4096, Algorithm::Blake3, 2, &());
    let archive = archive.unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let differences = compare(&archive, &read(root), 10);
    assert!(differences.is_empty(), "{command:?}: {differences:?}");
}

#[test]
fn tars_of_gnu_tar_are_read() {
    let scratch = tempfile::tempdir().unwrap();
    odd_tree(scratch.path());
    whole_seconds(scratch.path());
    round_trip(scratch.path(), &["tar", "c", "--format=gnu", "--sort=name", "."]);
    round_trip(scratch.path(), &["tar", "c", "--format=gnu", "--sparse", "."]);
    round_trip(scratch.path(), &["tar", "cz", "--format=oldgnu", "--sparse", "."]);
    round_trip(scratch.path(), &["tar", "c", "--format=pax", "--numeric-owner", "."]);
    // ustar and V7 cannot hold long names.
    fs::remove_dir_all(scratch.path().join("component")).unwrap();
    for link in ["long link", &"a long name ".repeat(20)] {
        fs::remove_file(scratch.path().join(link)).unwrap();
    }
    // Nor a time before 1970.
    same_time(scratch.path());
    round_trip(scratch.path(), &["tar", "c", "--format=ustar", "."]);
    for special in ["fifo", "null"] {
        let _ = fs::remove_file(scratch.path().join(special));
    }
    same_time(scratch.path());
    round_trip(scratch.path(), &["tar", "c", "--format=v7", "."]);
}

#[test]
fn attributes_in_tars_of_gnu_tar_are_read() {
    if !require(Feature::Program("setfacl")) {
        return;
    }
    let scratch = tempfile::tempdir().unwrap();
    odd_tree(scratch.path());
    attributes(scratch.path());
    let common =
        ["tar", "c", "--format=pax", "--xattrs", "--xattrs-include=*", "--acls", "--numeric-owner"];
    for sparse in [
        &["."][..],
        &["--sparse-version=0.0", "-S", "."],
        &["--sparse-version=0.1", "-S", "."],
        &["--sparse-version=1.0", "-S", "."],
    ] {
        round_trip(scratch.path(), &[&common[..], sparse].concat());
    }
}

#[test]
fn tars_of_bsdtar_are_read() {
    if !require(Feature::Program("bsdtar")) || !require(Feature::Program("setfacl")) {
        return;
    }
    let scratch = tempfile::tempdir().unwrap();
    odd_tree(scratch.path());
    attributes(scratch.path());
    round_trip(
        scratch.path(),
        &["bsdtar", "-c", "--format=pax", "--xattrs", "--acls", "-f", "-", "."],
    );
    round_trip(
        scratch.path(),
        &[
            "bsdtar",
            "-c",
            "--format=pax",
            "--numeric-owner",
            "--acls",
            "--xattrs",
            "--zstd",
            "-f",
            "-",
            ".",
        ],
    );
}

#[test]
fn tars_of_python_are_read() {
    if !require(Feature::Program("python3")) {
        return;
    }
    let scratch = tempfile::tempdir().unwrap();
    odd_tree(scratch.path());
    // It archives every name of a symbolic link as a link of its own.
    fs::remove_file(scratch.path().join("hard to link")).unwrap();
    whole_seconds(scratch.path());
    for format in ["GNU_FORMAT", "PAX_FORMAT"] {
        let script = format!(
            "import sys, tarfile\nwith tarfile.open(fileobj=sys.stdout.buffer, mode='w|gz', format=tarfile.{format}) as t: t.add('.')"
        );
        round_trip(scratch.path(), &["python3", "-c", &script]);
    }
}
