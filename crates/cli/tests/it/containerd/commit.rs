//! A container's changes become a layer.

use std::{fs, io::Read as _, path::Path, process::Command};

use lazuli_image::{Algorithm, Digest};
use lazuli_testkit::registry::FakeRegistry;
use serde_json::{Value, json};

use super::{
    programs::{Containerd, on_both},
    rig::{Rig, assert_same, unmount_free},
};
use crate::lazuli::corpus;

on_both!(
    a_running_container_is_committed_as_an_image,
    a_snapshot_is_committed_and_a_container_runs_on_it,
    an_upper_directory_becomes_a_lazy_image,
);

/// Changes get a time that a tar file can hold.
const WRITES: &str = "touch /begin; sleep 0.05; \
    rm /etc/issue; mv /usr/share/doc /doc; echo new >/etc/motd; rm -r /usr/share/perl5; \
    mkdir /usr/share/perl5; echo mine >/usr/share/perl5/own; chown 5:6 /usr/bin/wc; ln -s /etc/motd /said; \
    find / -xdev -depth -newer /begin -exec touch -h -d @1000000000 {} + 2>/dev/null; touch -d @1000000000 /begin";

const READS: &str = "export PATH=/usr/bin:/bin; cat /said /usr/share/perl5/*; ls /usr/share/doc /etc/issue 2>&1; \
    stat -c %u:%g /usr/bin/wc; head -c 4 /usr/bin/perl";

/// As builders do: a layer of the container's changes so far, on top of the image's own layers.
fn a_running_container_is_committed_as_an_image(containerd: Containerd) {
    let Some(rig) = Rig::new(containerd, "debian-slim") else { return };
    let layout = corpus("debian-slim").unwrap();
    let registry = FakeRegistry::start().unwrap();
    rig.plain_http(&registry.host());
    let ordinary = put(&registry, &layout, "ordinary");
    let lazy = format!("{}/app:lazy", registry.host());
    rig.lazuli.ok(["convert", &format!("oci:{}", layout.display()), &lazy]);
    for image in [&ordinary, &lazy] {
        rig.pull(image).unwrap();
        let name = rig.own("writer");
        rig.ctr(&["run", "-d", "--snapshotter", "lazuli", image, &name, "sleep", "1000"]);
        rig.ctr(&["task", "exec", "--exec-id", "write", &name, "sh", "-c", WRITES]);
        let layer = rig.ctr_bytes(&["snapshot", "--snapshotter", "lazuli", "diff", &name]);
        let committed = commit(&rig, &registry, image, &layer);
        rig.ctr(&["task", "kill", "--signal", "KILL", &name]);
        rig.settled(&["task", "rm", &name]);
        let written = rig.active_tree("lazuli", &name);
        rig.ctr(&["container", "rm", &name]);

        let chain = rig.pull(&committed).unwrap();
        assert_same(&written, &rig.tree("lazuli", &chain));
        let output = rig.cri.run(&format!("reader-{image}"), &committed, &["sh", "-c", READS]);
        let output = String::from_utf8(output.unwrap().stdout).unwrap();
        assert!(
            output.starts_with("new\nmine\n") && output.ends_with("5:6\n\u{7f}ELF"),
            "{output}"
        );
        rig.remove_images(&[&committed]);
    }
    // By itself Lazuli would show the lower layers only.
    let committed = format!("{}/app:committed", registry.host());
    let mountpoint = rig.lazuli.directory("mnt");
    let error = rig.lazuli.fails(["mount", &committed, mountpoint.to_str().unwrap()]);
    assert!(error.contains("ordinary layers on top"), "{error}");
    rig.remove_images(&[&lazy, &ordinary]);
    rig.nothing_left();
}

/// Puts an image into the registry.
fn put(registry: &FakeRegistry, layout: &Path, tag: &str) -> String {
    let index: Value = read(&layout.join("index.json"));
    let blobs = layout.join("blobs/sha256");
    for blob in fs::read_dir(&blobs).unwrap() {
        registry.put_blob("app", &fs::read(blob.unwrap().path()).unwrap());
    }
    let digest = index["manifests"][0]["digest"].as_str().unwrap();
    let manifest = fs::read(blobs.join(digest.strip_prefix("sha256:").unwrap())).unwrap();
    let media_type = index["manifests"][0]["mediaType"].as_str().unwrap();
    registry.put_manifest("app", tag, media_type, &manifest);
    format!("{}/app:{tag}", registry.host())
}

fn read(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// Puts an image with one more layer, a compressed tar file, into the registry.
fn commit(rig: &Rig, registry: &FakeRegistry, image: &str, layer: &[u8]) -> String {
    let mut manifest = rig.content(&rig.manifest_digest(image));
    let mut config = rig.content(manifest["config"]["digest"].as_str().unwrap());
    let mut tar = Vec::new();
    flate2::read::MultiGzDecoder::new(layer).read_to_end(&mut tar).unwrap();
    let diff_id = Algorithm::Sha256.digest(&tar);
    config["rootfs"]["diff_ids"].as_array_mut().unwrap().push(json!(diff_id.to_string()));
    // A history has an entry for each layer, or is missing.
    config.as_object_mut().unwrap().remove("history");
    let media_type = "application/vnd.oci.image.layer.v1.tar+gzip";
    let stored =
        |content: &[u8]| -> (Digest, usize) { (registry.put_blob("app", content), content.len()) };
    let (digest, size) = stored(layer);
    let described = json!({ "mediaType": media_type, "digest": digest.to_string(), "size": size });
    manifest["layers"].as_array_mut().unwrap().push(described);
    let (digest, size) = stored(config.to_string().as_bytes());
    manifest["config"]["digest"] = json!(digest.to_string());
    manifest["config"]["size"] = json!(size);
    let media_type = manifest["mediaType"].as_str().unwrap().to_owned();
    registry.put_manifest("app", "committed", &media_type, manifest.to_string().as_bytes());
    format!("{}/app:committed", registry.host())
}

/// As by hand: the container's own snapshot becomes the parent of others.
fn a_snapshot_is_committed_and_a_container_runs_on_it(containerd: Containerd) {
    let Some(rig) = Rig::new(containerd, "debian-slim") else { return };
    for image in [rig.push_ordinary(), rig.push_lazy()] {
        rig.pull(&image).unwrap();
        let [writer, reader] = ["writer", "reader"].map(|name| rig.own(name));
        rig.ctr(&["run", "--snapshotter", "lazuli", &image, &writer, "sh", "-c", WRITES]);
        let written = rig.active_tree("lazuli", &writer);
        let snapshot = |arguments: &[&str]| {
            rig.ctr(&[&["snapshot", "--snapshotter", "lazuli"], arguments].concat())
        };
        snapshot(&["commit", "committed", &writer]);
        rig.ctr(&["container", "rm", "--keep-snapshot", &writer]);
        assert_same(&written, &rig.tree("lazuli", "committed"));

        snapshot(&["prepare", "on-top", "committed"]);
        let target = rig.lazuli.directory("rootfs");
        let path = target.to_str().unwrap();
        let mount = snapshot(&["mounts", path, "on-top"]);
        assert!(Command::new("sh").args(["-c", &mount]).status().unwrap().success(), "{mount}");
        let output = rig.ctr(&["run", "--rm", "--rootfs", path, &reader, "/bin/sh", "-c", READS]);
        assert!(
            output.starts_with("new\nmine\n") && output.ends_with("5:6\n\u{7f}ELF"),
            "{output}"
        );
        unmount_free(&target);
        for name in ["on-top", "committed"] {
            snapshot(&["rm", name]);
        }
        rig.remove_images(&[&image]);
    }
    rig.nothing_left();
}

/// `lazuli commit` of a running container, and of one whose task has ended.
fn an_upper_directory_becomes_a_lazy_image(containerd: Containerd) {
    let Some(rig) = Rig::new(containerd, "debian-slim") else { return };
    let image = rig.push_lazy();
    rig.pull(&image).unwrap();
    let name = rig.own("writer");
    rig.ctr(&["run", "-d", "--snapshotter", "lazuli", &image, &name, "sleep", "1000"]);
    rig.ctr(&["task", "exec", "--exec-id", "write", &name, "sh", "-c", WRITES]);
    let [running, ended] =
        ["running", "ended"].map(|tag| image.replace(":lazy", &format!(":{tag}")));
    rig.lazuli.ok(["commit", &name, &running]);
    rig.ctr(&["task", "kill", "--signal", "KILL", &name]);
    rig.settled(&["task", "rm", &name]);
    let said = rig.lazuli.ok(["commit", &name, &ended]);
    assert!(said.contains("uploaded 0 B"), "{said}");
    let written = rig.active_tree("lazuli", &name);
    rig.ctr(&["container", "rm", &name]);

    let chain = rig.pull(&running).unwrap();
    assert_same(&written, &rig.tree("lazuli", &chain));
    let output = rig.cri.run("reader", &running, &["sh", "-c", READS]);
    let output = String::from_utf8(output.unwrap().stdout).unwrap();
    assert!(output.starts_with("new\nmine\n") && output.ends_with("5:6\n\u{7f}ELF"), "{output}");
    rig.remove_images(&[&running, &image]);
    rig.nothing_left();
}
