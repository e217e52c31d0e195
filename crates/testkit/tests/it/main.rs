//! Foreign readers of the testkit's output.

mod attacks;
mod circles;
mod paths;
mod widths;

use std::{fs, path::Path, process::Command};

use lazuli_testkit::{
    kernel::{Feature, require},
    listing,
    oci::Compression,
    odd,
};

fn run(program: &str, arguments: &[&str], dir: &Path) -> String {
    let output = Command::new(program).args(arguments).current_dir(dir).output().expect(program);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {text}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn umoci_unpacks_the_odd_image_as_meant() {
    if !require(Feature::Root) || !require(Feature::Program("umoci")) {
        return;
    }
    let scratch = tempfile::tempdir().unwrap();
    // The oldest umoci in use supports only gzip.
    let image = odd::image().compressed_with(Compression::Gzip);
    image.write_layout(&scratch.path().join("layout"), "odd").unwrap();
    run("umoci", &["unpack", "--image", "layout:odd", "bundle"], scratch.path());
    let tree = listing::list(&scratch.path().join("bundle/rootfs")).unwrap();
    assert_eq!(tree.len(), 1020);
    for (path, expected) in [
        ("/", "dir 0755 0:0 1600000000.000000001"),
        ("/becomes-file", "dir 0700 0:0 -1.000000001"),
        ("/linked-from-above", "links=3 of /linked"),
        ("/metadata-only", "dir 0700 3:4 1550000000.000000010"),
        ("/names/..x", "file 0644"),
        ("/opaque/upper", "file 0644"),
        ("/owned", "dir 0710 11:12 1500000000.000000005 user.kept=796573"),
        ("/owned/inner", "dir 2750 13:14 1500000001.000000006"),
        ("/types/before-1970", "-2.500000000 size=1"),
        ("/types/big-owner-gnu", "4000000000:3000000000"),
        (
            "/types/dangling",
            "symlink 0777 7:8 1700000000.000000000 size=13 -> /no/such/file links=2",
        ),
        ("/types/link-to-block", "block 0660 0:6 1700000000.000000000 259:70000 links=2"),
    ] {
        let found = tree.get(path.as_bytes());
        assert!(found.is_some_and(|found| found.contains(expected)), "{path}: {found:?}");
    }
    for path in
        ["/opaque/lower", "/opaque-last/lower", "/linked-and-removed", "/removed-directory/child"]
    {
        assert_eq!(tree.get(path.as_bytes()), None, "{path}");
    }
}

#[test]
fn gnu_tar_unpacks_the_extra_image_as_listed() {
    if !require(Feature::Root) || !require(Feature::Program("tar")) {
        return;
    }
    let scratch = tempfile::tempdir().unwrap();
    let (image, expected) = odd::extra();
    fs::write(scratch.path().join("extra.tar"), &image.layers[0].tar).unwrap();
    fs::create_dir(scratch.path().join("tree")).unwrap();
    let options = ["-xpf", "../extra.tar", "--acls", "--xattrs", "--xattrs-include=*"];
    run("tar", &options, &scratch.path().join("tree"));
    let tree = listing::list(&scratch.path().join("tree")).unwrap().to_string();
    // It gives implied parents the time at which it made them.
    let explicit = |text: &str| -> Vec<String> {
        text.lines().filter(|line| !line.starts_with("/implied")).map(str::to_owned).collect()
    };
    assert_eq!(explicit(&tree), explicit(&expected));
}

#[test]
fn gnu_tar_sees_the_size_of_the_huge_file() {
    let scratch = tempfile::tempdir().unwrap();
    fs::write(scratch.path().join("huge.tar"), odd::huge_layer().tar).unwrap();
    let listed = run("tar", &["-tvf", "huge.tar"], scratch.path());
    assert!(listed.contains(" 4294971393 ") && listed.ends_with(" huge\n"), "{listed}");
}
