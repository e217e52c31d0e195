//! Docker archives.

use std::{
    fs::File,
    io::{self, Read as _, Write as _},
    path::Path,
};

use lazuli_registry::DockerArchive;
use serde_json::json;

use crate::support::{noise, sha256};

/// A member: a file, or a symbolic link.
enum Member<'a> {
    File(&'a [u8]),
    Link(&'a str),
}

fn write(path: &Path, members: &[(&str, Member<'_>)]) {
    let mut builder = tar::Builder::new(File::create(path).unwrap());
    for (name, member) in members {
        let mut header = tar::Header::new_gnu();
        header.set_mode(0o644);
        match member {
            Member::File(content) => {
                header.set_size(content.len() as u64);
                builder.append_data(&mut header, name, *content).unwrap();
            }
            Member::Link(target) => {
                header.set_entry_type(tar::EntryType::Symlink);
                header.set_size(0);
                builder.append_link(&mut header, name, target).unwrap();
            }
        }
    }
    builder.finish().unwrap();
}

fn gzip(content: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(content).unwrap();
    encoder.finish().unwrap()
}

fn content(layer: &lazuli_registry::docker_archive::ArchiveLayer) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    layer.reader().read_to_end(&mut content).map(|_| content)
}

#[test]
fn layers_are_found_read_and_checked() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("image.tar");
    let (plain, packed) = (noise(100_000, 1), noise(70_000, 2));
    let (gzipped, zstd) = (gzip(&packed), zstd::encode_all(&packed[..], 1).unwrap());
    let config = |diff_ids: &[&[u8]]| {
        let ids: Vec<_> = diff_ids.iter().map(|content| sha256(content)).collect();
        json!({"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": ids}}).to_string()
    };
    let right = config(&[&plain, &packed, &packed, &plain]);
    let wrong = config(&[&packed, &plain]);
    let manifest = json!([
        {"Config": "c.json", "RepoTags": ["app:1", "app:latest"],
         "Layers": ["a/layer.tar", "b.tar.gz", "blobs/z", "./d/layer.tar"]},
        {"Config": "w.json", "RepoTags": ["quay.io/wrong:1"], "Layers": ["a/layer.tar", "b.tar.gz"]},
        {"Config": "c.json", "RepoTags": ["few:1"], "Layers": ["a/layer.tar"]},
        {"Config": "c.json", "RepoTags": null, "Layers": ["a/layer.tar", "gone", "loop", "up"]},
    ])
    .to_string();
    write(
        &path,
        &[
            ("a/layer.tar", Member::File(&plain)),
            ("b.tar.gz", Member::File(&gzipped)),
            ("blobs/z", Member::File(&zstd)),
            ("d/layer.tar", Member::Link("../a/layer.tar")),
            ("loop", Member::Link("loop")),
            ("up", Member::Link("../../etc/passwd")),
            ("c.json", Member::File(right.as_bytes())),
            ("w.json", Member::File(wrong.as_bytes())),
            ("manifest.json", Member::File(manifest.as_bytes())),
        ],
    );

    let archive = DockerArchive::open(&path, Some("docker.io/library/app")).unwrap();
    assert_eq!(archive.config(), right.as_bytes());
    let expected = [&plain, &gzipped, &zstd, &plain];
    assert_eq!(archive.layers().len(), expected.len());
    for (layer, expected) in archive.layers().iter().zip(expected) {
        assert_eq!(layer.size(), expected.len() as u64);
        assert!(content(layer).unwrap() == *expected);
    }
    let archive = DockerArchive::open(&path, Some("quay.io/wrong:1")).unwrap();
    for layer in archive.layers() {
        let error = content(layer).unwrap_err().to_string();
        assert!(error.contains("it is corrupt") && error.contains("image.tar"), "{error}");
    }
    for (reference, text) in [
        (None, "several images (app:1, app:latest, quay.io/wrong:1, few:1)"),
        (Some("other"), "no image other (images: app:1"),
        (Some("few:1"), "lists 1 layers, but the configuration 4 diff_ids"),
        (Some("UPPER"), "lower case"),
    ] {
        let error = DockerArchive::open(&path, reference).unwrap_err().to_string();
        assert!(error.contains(text), "{reference:?}: {error}");
    }
}

#[test]
fn a_file_that_is_no_archive_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("x.tar");
    std::fs::write(&path, gzip(&noise(3000, 1))).unwrap();
    let error = DockerArchive::open(&path, None).unwrap_err().to_string();
    assert!(error.contains("uncompressed tar"), "{error}");
    let image =
        |layer: &str| json!([{"Config": "c", "RepoTags": [], "Layers": [layer]}]).to_string();
    let config = json!({"rootfs": {"type": "layers", "diff_ids": [sha256(b"")]}}).to_string();
    for layer in ["gone", "loop", "up", "/abs"] {
        write(
            &path,
            &[
                ("loop", Member::Link("loop")),
                ("up", Member::Link("../../etc/passwd")),
                ("c", Member::File(config.as_bytes())),
                ("manifest.json", Member::File(image(layer).as_bytes())),
            ],
        );
        let error = DockerArchive::open(&path, None).unwrap_err().to_string();
        assert!(error.contains("has no file") || error.contains("links"), "{layer}: {error}");
    }
    write(&path, &[]);
    assert!(
        DockerArchive::open(&path, None).unwrap_err().to_string().contains("no file manifest.json")
    );
    assert!(DockerArchive::open(&directory.path().join("none"), None).is_err());
}
