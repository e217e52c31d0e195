//! Images that others have made, as upstream's converters write them.

use std::{
    env,
    io::{Read as _, Write as _},
    net::TcpStream,
    path::PathBuf,
};

use serde_json::Value;

use super::{
    programs::Containerd,
    rig::{Rig, assert_same},
};

/// The media type of manifests by docker and older converters.
const MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";

/// Images of the corpus with upstream's conversions as layouts: `LAZULI_UPSTREAM` names a directory
/// with layouts `IMAGE` or `IMAGE--VARIANT`. `make compat` makes them.
fn upstream() -> Vec<(String, PathBuf)> {
    let directory = env::var_os("LAZULI_UPSTREAM").expect("LAZULI_UPSTREAM names a directory");
    let paths = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let named = paths.map(|path| {
        let name = path.file_name().unwrap().to_str().unwrap();
        (name.split("--").next().unwrap().to_owned(), path)
    });
    named.collect()
}

/// Gives an image in the registry another name, under which it has docker's media types.
fn as_docker(rig: &Rig, image: &str) -> String {
    let (repository, _) = image.rsplit_once(':').unwrap();
    let (host, path) = repository.split_once('/').unwrap();
    rig.ctr(&["content", "fetch", "--plain-http", "--metadata-only", image]);
    let mut manifest = rig.content(&rig.manifest_digest(image));
    rig.remove_images(&[image]);
    manifest["mediaType"] = MANIFEST.into();
    manifest["config"]["mediaType"] = "application/vnd.docker.container.image.v1+json".into();
    let bootstrap = manifest["layers"].as_array_mut().unwrap().last_mut().unwrap();
    bootstrap["mediaType"] = "application/vnd.docker.image.rootfs.diff.tar.gzip".into();
    let text = manifest.to_string();
    let mut stream = TcpStream::connect(host).unwrap();
    let head = format!(
        "PUT /v2/{path}/manifests/docker HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\
         Content-Type: {MANIFEST}\r\nContent-Length: {}\r\n\r\n",
        text.len()
    );
    stream.write_all(&[head.as_bytes(), text.as_bytes()].concat()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 201"), "{answer}");
    format!("{repository}:docker")
}

/// Everything that a program reads of an image, as the image's user.
fn read_all(rig: &Rig, snapshotter: &str, image: &str) -> String {
    // Errors about files for root alone come in no certain order.
    let script = "exec 2>/dev/null; \
        find / -xdev -type f ! -path '/etc/host*' ! -path '/etc/resolv.conf' | sort | xargs cat | md5sum";
    let name = rig.own("reader");
    rig.ctr(&["run", "--rm", "--snapshotter", snapshotter, image, &name, "sh", "-c", script])
}

/// Docker's media types on an image of ours.
pub(super) fn media_types_of_docker_make_no_difference(containerd: Containerd) {
    let Some(rig) = Rig::new(containerd, "busybox") else { return };
    let ordinary = rig.push_ordinary();
    rig.ctr(&["image", "pull", "--plain-http", "--snapshotter", "overlayfs", &ordinary]);
    let theirs = rig.tree("overlayfs", &rig.chain_id(&ordinary));
    let docker = as_docker(&rig, &rig.push_lazy());
    let ours = rig.tree("lazuli", &rig.pull(&docker).unwrap());
    assert_same(&theirs, &ours);
    assert_eq!(read_all(&rig, "lazuli", &docker), read_all(&rig, "overlayfs", &ordinary));
    rig.remove_images(&[&docker, &ordinary]);
    rig.nothing_left();
}

#[test]
#[ignore = "needs LAZULI_UPSTREAM, see `make compat`"]
fn debian_images_of_upstream_are_pulled_and_run() {
    images_of_upstream_are_pulled_and_run(Containerd::Debian);
}

#[test]
#[ignore = "needs LAZULI_UPSTREAM, see `make compat`"]
fn current_images_of_upstream_are_pulled_and_run() {
    images_of_upstream_are_pulled_and_run(Containerd::Current);
}

/// Upstream's conversions of the corpus, in its media types and in docker's: every byte of every
/// file is right, and the error names a lost blob.
fn images_of_upstream_are_pulled_and_run(containerd: Containerd) {
    let images = upstream();
    assert!(!images.is_empty(), "LAZULI_UPSTREAM has no images");
    for (image, layout) in images {
        let Some(rig) = Rig::new(containerd, &image) else { return };
        let ordinary = rig.push_ordinary();
        rig.ctr(&["image", "pull", "--plain-http", "--snapshotter", "overlayfs", &ordinary]);
        let expected = read_all(&rig, "overlayfs", &ordinary);
        let made = rig.copy(&layout, "upstream:made");
        let docker = as_docker(&rig, &made);
        for image in [&made, &docker] {
            rig.pull(image).unwrap();
            assert_eq!(read_all(&rig, "lazuli", image), expected, "{}", layout.display());
            rig.remove_images(&[image]);
        }
        rig.nothing_left();
        rig.ctr(&["content", "fetch", "--plain-http", "--metadata-only", &made]);
        let manifest: Value = rig.content(&rig.manifest_digest(&made));
        let blob = manifest["layers"][0]["digest"].as_str().unwrap();
        rig.lose_blob(blob);
        let error = rig.pull(&made).unwrap_err().to_string();
        assert!(error.contains(&made) && error.contains(blob), "{error}");
        rig.remove_images(&[&made, &ordinary]);
        rig.nothing_left();
        eprintln!("{} is pulled and run by {containerd:?}", layout.display());
    }
}
