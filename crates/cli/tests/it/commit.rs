//! Changes on top of a lazy image become a lazy image.

use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use lazuli_testkit::{
    kernel::{Feature, require},
    listing, odd,
    registry::FakeRegistry,
};
use serde_json::Value;

use crate::{
    lazuli::{Lazuli, corpus},
    registry::Registry,
    reuse::stored,
};

/// An overlay on a lazy image that is mounted.
struct Overlay<'a> {
    lazuli: &'a Lazuli,
    lower: PathBuf,
    upper: PathBuf,
    merged: PathBuf,
}

impl<'a> Overlay<'a> {
    fn on(lazuli: &'a Lazuli, image: &str, options: &str) -> Self {
        let [lower, upper, work, merged] =
            ["lower", "upper", "work", "merged"].map(|name| lazuli.directory(name));
        lazuli.ok(["mount", image, lower.to_str().unwrap()]);
        let options = format!(
            "lowerdir={},upperdir={},workdir={}{options}",
            lower.display(),
            upper.display(),
            work.display()
        );
        let arguments = ["-t", "overlay", "-o", &options, "overlay"];
        let mounted = Command::new("mount").args(arguments).arg(&merged).status().unwrap();
        assert!(mounted.success());
        Overlay { lazuli, lower, upper, merged }
    }

    fn sh(&self, script: &str) {
        let mut shell = Command::new("sh");
        shell.args(["-euc", script]).current_dir(&self.merged);
        let output = shell.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }

    fn commit(&self, base: &str, target: &str) -> String {
        self.lazuli.ok(["commit", self.upper.to_str().unwrap(), target, "--base", base])
    }
}

impl Drop for Overlay<'_> {
    fn drop(&mut self) {
        let unmounted = Command::new("umount").arg(&self.merged).status();
        assert!(unmounted.unwrap().success());
        self.lazuli.ok(["umount", self.lower.to_str().unwrap()]);
    }
}

/// A tree with everything that writers below change.
fn source(lazuli: &Lazuli) {
    let root = lazuli.directory("source");
    for directory in ["etc", "usr/bin", "usr/share/doc", "var/lib", "opaque/deep", "target"] {
        fs::create_dir_all(root.join(directory)).unwrap();
    }
    for (name, content) in [
        ("etc/issue", &b"issue"[..]),
        ("etc/motd", b"motd"),
        ("usr/bin/one", &odd::random(1, 3_000_000)),
        ("usr/bin/two", b"two"),
        ("usr/share/doc/readme", b"readme"),
        ("var/lib/state", b"state"),
        ("opaque/deep/file", b"hidden"),
        ("opaque/file", b"hidden"),
        ("target/kept", b"kept"),
    ] {
        fs::write(root.join(name), content).unwrap();
    }
    std::os::unix::fs::symlink("target", root.join("link")).unwrap();
    fs::hard_link(root.join("usr/bin/two"), root.join("usr/bin/three")).unwrap();
    lazuli.ok(["convert", "dir:source", "oci:lazy:base"]);
}

const WRITES: &str = "
    rm etc/issue; echo more >>etc/motd; chmod 4750 usr/bin/one; chown 5:6 usr/bin/two
    rm -r opaque; mkdir -m 1777 opaque; echo mine >opaque/own
    rm link; mkdir link; echo new >link/new
    rm -r var/lib; echo file >var/lib
    mv usr/share/doc/readme readme; mv usr/share/doc moved; rm etc/motd; mkdir etc/motd
    echo fresh >fresh; ln fresh second; ln -s nowhere etc/dangling; mknod null c 1 3; mknod disk b 8 1; mkfifo -m 600 fifo
    setfattr -n user.mine -v value readme; setfattr -n trusted.own -v x usr
    touch -d @1000000000.123456789 readme; mkdir -p a/b/c; truncate -s 5000000 a/sparse
";

#[test]
fn a_commit_equals_the_mounted_tree() {
    if !require(Feature::Root) {
        return;
    }
    let lazuli = Lazuli::new();
    source(&lazuli);
    let overlay = Overlay::on(&lazuli, "oci:lazy:base", "");
    overlay.sh(WRITES);
    let said = overlay.commit("oci:lazy:base", "oci:lazy:new");
    assert!(stored(&said) < 100_000, "{said}");
    let expected = listing::list(&overlay.merged).unwrap();
    assert!(expected.get(b"/target/kept").is_some() && expected.get(b"/link/kept").is_none());
    let mountpoint = lazuli.directory("new");
    lazuli.ok(["mount", "oci:lazy:new", mountpoint.to_str().unwrap()]);
    let found = listing::list(&mountpoint).unwrap();
    assert!(expected.paths().eq(found.paths()), "{expected}\n{found}");
    for path in expected.paths() {
        let [shown, made] = [&expected, &found].map(|tree| tree.get(path).unwrap());
        // A name that overlayfs has taken from the file with that name below still counts there.
        let shown =
            if path == b"/usr/bin/three" { shown.split(" links=").next().unwrap() } else { shown };
        assert_eq!(shown, made, "{}", path.escape_ascii());
    }
    lazuli.ok(["umount", mountpoint.to_str().unwrap()]);
    lazuli.ok(["check", "oci:lazy:new"]);

    // The same writes on the same image give the same bytes; no writes but the root's give the
    // image's tree.
    let again = overlay.commit("oci:lazy:base", "oci:lazy:again");
    assert_eq!(stored(&again), 0, "{again}");
    let digest = |image: &str| {
        let said = lazuli.ok(["inspect", image, "--json"]);
        serde_json::from_str::<Value>(&said).unwrap()["manifest_digest"].clone()
    };
    assert_eq!(digest("oci:lazy:new"), digest("oci:lazy:again"));

    // On top of that, in another place.
    let next = lazuli.directory("next");
    fs::write(next.join("next"), odd::random(7, 50_000)).unwrap();
    lazuli.ok(["commit", "next", "oci:other:next", "--base", "oci:lazy:new"]);
    lazuli.ok(["check", "oci:other:next"]);
    let config = lazuli.ok(["inspect", "oci:other:next", "--json"]);
    assert_eq!(
        serde_json::from_str::<Value>(&config).unwrap()["blobs"].as_array().unwrap().len(),
        3
    );
}

/// The upper directory doesn't have the content of the lower layers.
#[test]
fn unsupported_overlay_marks_are_refused_by_name() {
    if !require(Feature::Root) {
        return;
    }
    for (options, script, expected) in [
        (",redirect_dir=on", "mv usr/share moved", ["moved", "redirect_dir=off"]),
        (",metacopy=on,redirect_dir=on", "chmod 700 usr/bin/one", ["usr/bin/one", "metacopy=off"]),
        (",index=on", "echo x >>usr/bin/two", ["usr/bin/two", "index=off"]),
    ] {
        let lazuli = Lazuli::new();
        source(&lazuli);
        // A lower file system without file handles has no index.
        let overlay = Overlay::on(&lazuli, "oci:lazy:base", options);
        overlay.sh(script);
        let upper = overlay.upper.to_str().unwrap();
        let error = lazuli.fails(["commit", upper, "oci:lazy:new", "--base", "oci:lazy:base"]);
        assert!(expected.iter().all(|words| error.contains(words)), "{options}: {error}");
    }
}

/// The development cycle: a change of 1 MB costs 1 MB and the metadata, in the image's repository
/// and beside it.
#[test]
fn only_new_chunks_are_stored() {
    let lazuli = Lazuli::new();
    let registry = Registry::start();
    let upper = lazuli.directory("upper");
    let root = lazuli.directory("source");
    for number in 0..40 {
        fs::write(root.join(format!("{number}")), odd::random(number, 1 << 20)).unwrap();
    }
    let image = |name: &str| registry.image(name);
    lazuli.ok(["convert", "dir:source", &image("app:base")]);
    fs::write(upper.join("new"), odd::random(100, 1 << 20)).unwrap();
    fs::copy(root.join("3"), upper.join("copy")).unwrap();
    for target in ["other:new", "app:new"] {
        let said = lazuli.ok(["commit", "upper", &image(target), "--base", &image("app:base")]);
        assert!((1 << 20..1_100_000).contains(&stored(&said)), "{said}");
        lazuli.ok(["check", &image(target)]);
    }
    // Another registry has none of it.
    let fake = FakeRegistry::start().unwrap();
    let elsewhere = format!("{}/app:new", fake.host());
    let said = lazuli.ok(["commit", "upper", &elsewhere, "--base", &image("app:base")]);
    assert!(stored(&said) > 41 << 20, "{said}");
    lazuli.ok(["check", &elsewhere]);
}

#[test]
fn a_container_of_lazuli_run_is_committed() {
    if !require(Feature::Root) || !require(Feature::Program("runc")) {
        return;
    }
    let Some(layout) = corpus("busybox") else { return };
    let lazuli = Lazuli::new();
    lazuli.ok(["convert", &format!("oci:{}", layout.display()), "oci:lazy:base"]);
    let script = "echo new >/etc/new; rm /bin/vi; echo written; read end";
    let mut run = lazuli.command(["run", "oci:lazy:base", "--", "sh", "-c", script]);
    let mut container = run.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut said = String::new();
    BufReader::new(container.stdout.as_mut().unwrap()).read_line(&mut said).unwrap();
    assert_eq!(said, "written\n");
    // The tag is moved: the container's image is still the one on which it runs.
    lazuli.ok(["convert", &format!("dir:{}", empty(&lazuli).display()), "oci:lazy:base"]);
    let name = format!("lazuli-{}", container.id());
    lazuli.ok(["commit", &name, "oci:lazy:new"]);
    let error = lazuli.fails(["commit", "nobody", "oci:lazy:x"]);
    assert!(error.contains("`nobody` is not the name") && error.contains(&name), "{error}");
    container.stdin.take().unwrap().write_all(b"\n").unwrap();
    assert!(container.wait().unwrap().success());
    let script = "cat /etc/new; ls /bin/vi 2>&1";
    let output = lazuli.output(["run", "oci:lazy:new", "--", "sh", "-c", script]);
    let output = String::from_utf8(output.stdout).unwrap();
    assert!(output.starts_with("new\n") && output.contains("No such file"), "{output}");
}

fn empty(lazuli: &Lazuli) -> PathBuf {
    lazuli.directory("empty")
}

#[test]
fn bad_arguments_are_named() {
    let lazuli = Lazuli::new();
    lazuli.directory("upper");
    let error = lazuli.fails(["commit", "upper", "oci:lazy:x", "--base", "oci:lazy:none"]);
    assert!(error.contains("lazy"), "{error}");
    let error = lazuli.fails(["commit", "upper", "oci:lazy:x"]);
    assert!(error.contains("no daemon"), "{error}");
    let fixed = format!("host/app@sha256:{}", "0".repeat(64));
    let error = lazuli.fails(["commit", "upper", &fixed]);
    assert!(error.contains("for ever"), "{error}");
    assert!(!Path::new("oci:lazy").exists());
}
