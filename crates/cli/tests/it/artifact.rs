//! Artifacts whose layers are files, such as models: mounted by their own names with an index, and
//! as the images that `convert` makes of them.

use std::{fs, io::Cursor, os::unix::fs::PermissionsExt as _, path::Path};

use lazuli_builder::index::{IndexLayer, index};
use lazuli_image::{
    Algorithm, Digest,
    oci::{BlobLayer, ImageConfig, IndexedLayer, LazyImage, Platform},
};
use lazuli_testkit::{
    kernel::{Feature, require},
    odd,
    registry::{FakeRegistry, runs},
    tarball::{self, Body, Entry, SparseFormat},
};
use serde_json::{Value, json};

use crate::{drivers, lazuli::Lazuli, loop_devices::until, policy::signer::Signer};

const TRUST: &str = "[index]\ntrust = \"repository\"\n[fetch]\namplify_bytes = 0\n";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

/// The file of weights, which no codec makes smaller.
fn weights() -> Vec<u8> {
    odd::random(1, (5 << 20) + 123)
}

/// A layer: its media type, one annotation, and its bytes.
type Layer = (&'static str, Option<(&'static str, &'static str)>, Vec<u8>);

/// A model as ModelPack's tools store one, with the layers of others.
fn model() -> Vec<Layer> {
    let raw = "application/vnd.cncf.model.weight.v1.raw";
    let path = "org.cncf.model.filepath";
    let title = "org.opencontainers.image.title";
    let files =
        [Entry::directory("tokenizer"), Entry::file("tokenizer/vocab.txt", odd::text(9999))];
    let tar = tarball::write(&files);
    let config = "application/vnd.cncf.model.weight.config.v1.tar+gzip";
    vec![
        (raw, Some((path, "weights/model-1.safetensors")), weights()),
        (raw, Some((path, "weights/empty")), Vec::new()),
        (config, Some((path, "tokenizer")), gzip_of(&tar)),
        ("application/vnd.kitops.modelkit.code.v1.tar", None, tarball::write(&[sparse()])),
        // A file that looks like a compressed layer, and is none.
        ("application/vnd.oci.image.layer.v1.tar", Some((title, "data.gz")), gzip_of(b"text")),
        ("application/vnd.example.weights", None, b"unnamed".to_vec()),
    ]
}

/// A file that no index can lead to: it is stored once more.
fn sparse() -> Entry {
    let (format, pieces) = (SparseFormat::Pax10, vec![(5000, b"data".to_vec())]);
    Entry::new("sparse", Body::Sparse { format, size: 9000, pieces })
}

fn gzip_of(text: &[u8]) -> Vec<u8> {
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    std::io::Write::write_all(&mut gzip, text).unwrap();
    gzip.finish().unwrap()
}

/// Stores the artifact `model:1`, and returns its name.
fn store(registry: &FakeRegistry, layers: &[Layer]) -> String {
    let layer = |(media_type, note, content): &Layer| {
        let digest = registry.put_blob("model", content).to_string();
        let size = content.len();
        let mut layer = json!({ "mediaType": media_type, "digest": digest, "size": size });
        if let Some((name, value)) = note {
            layer["annotations"] = json!({ *name: value });
        }
        layer
    };
    let config = registry.put_blob("model", b"{}").to_string();
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "artifactType": "application/vnd.cncf.model.manifest.v1+json",
        "config": {
            "mediaType": "application/vnd.cncf.model.config.v1+json", "digest": config, "size": 2
        },
        "layers": layers.iter().map(layer).collect::<Vec<Value>>(),
    });
    registry.put_manifest("model", "1", MANIFEST, manifest.to_string().as_bytes());
    format!("{}/model:1", registry.host())
}

fn assert_model(directory: &Path) {
    let read = |path: &str| fs::read(directory.join(path)).unwrap();
    assert!(read("weights/model-1.safetensors") == weights());
    assert_eq!(read("weights/empty"), b"");
    assert!(read("tokenizer/vocab.txt") == odd::text(9999));
    assert_eq!(read("data.gz"), gzip_of(b"text"));
    let unnamed = Algorithm::Sha256.digest(b"unnamed").hex();
    assert_eq!(read(&format!("sha256-{unnamed}")), b"unnamed");
    assert_eq!(read("sparse").len(), 9000);
    assert_eq!(read("sparse")[5000..5004], *b"data");
    let mode = fs::metadata(directory.join("data.gz")).unwrap().permissions().mode();
    assert_eq!(mode & 0o7777, 0o644);
    assert_eq!(fs::read_dir(directory).unwrap().count(), 5);
}

/// Reads a few bytes of the weights, and checks how much of them was fetched.
fn assert_read_in_parts(registry: &FakeRegistry, directory: &Path) {
    registry.reset_stats();
    let file = fs::File::open(directory.join("weights/model-1.safetensors")).unwrap();
    let mut bytes = [0; 100];
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut bytes, 3 << 20).unwrap();
    assert!(bytes[..] == weights()[3 << 20..][..100]);
    let fetched: u64 = runs(&registry.log()).iter().map(|(_, run)| run.end - run.start).sum();
    assert!((1 << 20..4 << 20).contains(&fetched), "{fetched}");
}

#[test]
fn an_artifact_is_mounted_by_its_own_name_with_an_index() {
    for driver in drivers::here() {
        let lazuli = Lazuli::new();
        lazuli.configure(TRUST);
        let registry = FakeRegistry::start().unwrap();
        let name = store(&registry, &model());
        let before = registry.manifest("model", "1").unwrap();
        let mountpoint = lazuli.directory("mnt");
        let at = mountpoint.to_str().unwrap();
        lazuli.ok(["index", &name]);
        assert_eq!(registry.manifest("model", "1").unwrap(), before);
        lazuli.ok(["mount", &name, at, "--driver", driver]);
        assert_read_in_parts(&registry, &mountpoint);
        assert_model(&mountpoint);
        lazuli.kill(lazuli.worker());
        assert_model(&mountpoint);
        lazuli.ok(["umount", at]);
        lazuli.ok(["check", &name, "--against", &name]);
        assert_eq!(registry.violations(), Vec::<String>::new());
    }
}

#[test]
fn an_artifact_without_an_index_is_pulled_once() {
    for driver in drivers::here() {
        let lazuli = Lazuli::new();
        let registry = FakeRegistry::start().unwrap();
        let mut layers = model();
        layers.retain(|(media_type, ..)| !media_type.ends_with("code.v1.tar"));
        // A tar that is shown as a file, and elsewhere as what is in it.
        let title = Some(("org.opencontainers.image.title", "tokenizer.tar.gz"));
        let tokenizer = layers[2].2.clone();
        let file = [("application/vnd.example.archive", title, tokenizer.clone())];
        let archive = store(&registry, &file).replace("model:1", "model:archive");
        let manifest = registry.manifest("model", "1").unwrap();
        registry.put_manifest("model", "archive", MANIFEST, &manifest);
        let name = store(&registry, &layers);
        let [model, other] = ["model", "other"].map(|directory| lazuli.directory(directory));
        let mount = |name: &str, at: &Path| {
            let at = at.to_str().unwrap();
            let output = lazuli.output(["mount", name, at, "--driver", driver]);
            assert!(output.status.success(), "{output:?}");
            String::from_utf8_lossy(&output.stderr).contains("has no index")
        };
        assert!(mount(&name, &model));
        let shown = || {
            assert!(fs::read(model.join("weights/model-1.safetensors")).unwrap() == weights());
            assert_eq!(fs::read(model.join("weights/empty")).unwrap(), b"");
            assert!(fs::read(model.join("tokenizer/vocab.txt")).unwrap() == odd::text(9999));
            assert_eq!(fs::read(model.join("data.gz")).unwrap(), gzip_of(b"text"));
        };
        shown();
        lazuli.ok(["umount", model.to_str().unwrap()]);
        assert!(mount(&archive, &other));
        assert!(fs::read(other.join("tokenizer.tar.gz")).unwrap() == tokenizer);
        lazuli.ok(["umount", other.to_str().unwrap()]);
        lazuli.kill(lazuli.worker());
        registry.reset_stats();
        assert!(!mount(&name, &model) && !mount(&archive, &other));
        shown();
        assert!(registry.log().iter().all(|request| request.bytes().is_none()));
        for at in [model.to_str().unwrap(), other.to_str().unwrap()] {
            lazuli.ok(["umount", at]);
        }
        assert_eq!(registry.violations(), Vec::<String>::new());
    }
}

#[test]
fn a_signed_index_of_an_artifact_is_used_by_default() {
    if !drivers::able("fuse") || !require(Feature::Program("openssl")) {
        return;
    }
    let lazuli = Lazuli::new();
    let registry = FakeRegistry::start().unwrap();
    let name = store(&registry, &model());
    let [good, evil] = ["good", "evil"].map(|key| Signer::new(&lazuli.directory(""), key));
    let policy = lazuli.path("policy.toml");
    let rule = format!("default = {{ accept = true, statements = [{:?}] }}", good.public());
    fs::write(&policy, rule).unwrap();
    lazuli.configure_all(&format!("policy = {policy:?}"));
    let mountpoint = lazuli.directory("mnt");
    let at = mountpoint.to_str().unwrap();
    lazuli.ok(["index", &name, "--sign", evil.private().to_str().unwrap()]);
    // That one does not count, and the node itself can make none of a layer with a sparse file.
    let error = lazuli.fails(["mount", &name, at, "--driver", "fuse"]);
    assert!(error.contains("sparse") && error.contains("by `lazuli index`"), "{error}");
    lazuli.ok(["index", &name, "--sign", good.private().to_str().unwrap()]);
    lazuli.ok(["mount", &name, at, "--driver", "fuse"]);
    assert_model(&mountpoint);
    lazuli.ok(["umount", at]);
}

#[test]
fn an_artifact_becomes_an_image_whose_data_is_its_layers() {
    for driver in drivers::here() {
        let lazuli = Lazuli::new();
        let registry = FakeRegistry::start().unwrap();
        let name = store(&registry, &model());
        let images =
            [format!("{}/model:volume", registry.host()), format!("{}/other:1", registry.host())];
        for image in &images {
            let uploaded = lazuli.ok(["convert", &name, image]);
            assert!(uploaded.contains("which stay as they are"), "{uploaded}");
            let mountpoint = lazuli.directory("mnt");
            let at = mountpoint.to_str().unwrap();
            lazuli.ok(["mount", image, at, "--driver", driver]);
            let total = lazuli.mount_status(&mountpoint)["bytes_total"].as_u64().unwrap();
            assert!((5 << 20..6 << 20).contains(&total), "{total}");
            if image == &images[0] {
                assert_read_in_parts(&registry, &mountpoint);
            }
            assert_model(&mountpoint);
            lazuli.ok(["umount", at]);
            lazuli.ok(["check", image, "--against", &name]);
            lazuli.ok(["unpack", image, "unpacked"]);
            assert_model(&lazuli.path("unpacked"));
            fs::remove_dir_all(lazuli.path("unpacked")).unwrap();
        }
        // A registry keeps what manifests list.
        let manifest: Value =
            serde_json::from_slice(&registry.manifest("other", "1").unwrap()).unwrap();
        let listed = manifest["layers"].as_array().unwrap().iter();
        let listed: Vec<_> = listed.map(|layer| layer["digest"].as_str().unwrap()).collect();
        let weights = Algorithm::Sha256.digest(&weights()).to_string();
        assert!(listed.contains(&weights.as_str()), "{listed:?}");
        // The image is complete elsewhere.
        let copy = format!("{}/copy:1", registry.host());
        lazuli.ok(["copy", &images[1], &copy]);
        let mountpoint = lazuli.directory("mnt");
        lazuli.ok(["mount", &copy, mountpoint.to_str().unwrap(), "--driver", driver]);
        assert_model(&mountpoint);
        lazuli.ok(["umount", mountpoint.to_str().unwrap()]);
        assert_eq!(registry.violations(), Vec::<String>::new());
    }
}

#[test]
fn bad_names_and_options_without_effect_are_refused() {
    let lazuli = Lazuli::new();
    let registry = FakeRegistry::start().unwrap();
    let raw = "application/vnd.cncf.model.weight.v1.raw";
    let target = format!("{}/lazy:1", registry.host());
    for (path, expected) in [
        ("../../etc/passwd", "`..` component"),
        ("./", "names no file"),
        ("a\0b", "is not allowed"),
    ] {
        let layer = (raw, Some(("org.cncf.model.filepath", path)), b"content".to_vec());
        let name = store(&registry, &[layer]);
        for verb in [vec!["index", &name], vec!["convert", &name, &target]] {
            let error = lazuli.fails(verb);
            assert!(error.contains(expected) && error.contains("layer sha256:"), "{error}");
        }
    }
    let name = store(&registry, &model());
    for option in [&["--keep-oci"][..], &["--batch", "64"]] {
        let error = lazuli.fails([&["convert", &name, &target], option].concat());
        assert!(error.contains("an artifact") && error.contains(option[0]), "{error}");
    }
    let to = format!("{}/indexes", registry.host());
    let error = lazuli.fails(["index", &name, "--to", &to]);
    assert!(error.contains("leave out --to"), "{error}");
}

/// Stores an image in a layout whose index leads to other bytes than those of the layer `digest`.
fn forge(layout: &Path, digest: Digest, other: &[u8]) {
    let layer = IndexLayer {
        digest,
        stored_size: other.len() as u64,
        file: Some("model".to_owned()),
        source: Box::new(Cursor::new(other.to_vec())),
    };
    let scratch = tempfile::tempdir().unwrap();
    let forged = index(vec![layer], scratch.path(), 1, &()).unwrap();
    let bootstrap = forged.bootstrap_layer();
    let indexed = IndexedLayer::of(&forged.layers[0]).unwrap();
    let image = LazyImage::with_indexes(
        &ImageConfig::new(&Platform::host()),
        std::slice::from_ref(&indexed),
        &[BlobLayer::new(digest, other.len() as u64)],
        BlobLayer::new(bootstrap.digest, bootstrap.size()),
        bootstrap.diff_id,
        Default::default(),
    );
    let image = image.unwrap();
    let blobs = layout.join("blobs/sha256");
    fs::create_dir_all(&blobs).unwrap();
    let write = |digest: Digest, bytes: &[u8]| fs::write(blobs.join(digest.hex()), bytes).unwrap();
    write(digest, other);
    write(indexed.digest, &forged.layers[0].bytes);
    write(bootstrap.digest, &bootstrap.bytes);
    write(image.config_digest, &image.config);
    write(image.digest, &image.manifest);
    let entry = json!({
        "mediaType": MANIFEST, "digest": image.digest.to_string(), "size": image.manifest.len(),
        "annotations": { "org.opencontainers.image.ref.name": "1" },
    });
    let index = json!({ "schemaVersion": 2, "manifests": [entry] });
    fs::write(layout.join("index.json"), index.to_string()).unwrap();
    fs::write(layout.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
}

/// The layer's own digest is checked when all of the file is here, and what is found out concerns
/// no other image that has the layer.
#[test]
fn a_file_that_is_not_its_layer_is_found_out() {
    for driver in drivers::here() {
        let lazuli = Lazuli::new();
        let (right, other) = (weights(), odd::random(2, weights().len()));
        let digest = Algorithm::Sha256.digest(&right);
        forge(&lazuli.path("right"), digest, &right);
        forge(&lazuli.path("wrong"), digest, &other);
        let mount = |layout: &str, directory: &str| {
            let (image, at) = (format!("oci:{layout}:1"), lazuli.directory(directory));
            lazuli.ok(["mount", &image, at.to_str().unwrap(), "--driver", driver]);
            at
        };
        let [honest, lying] = [mount("right", "a"), mount("wrong", "b")];
        assert!(fs::read(honest.join("model")).unwrap() == right);
        let file = lying.join("model");
        assert!(fs::read(&file).unwrap() == other);
        until("reads fail", || fs::read(&file).is_err_and(|e| e.raw_os_error() == Some(5)));
        let refused = || {
            let at = lazuli.directory("c");
            let error =
                lazuli.fails(["mount", "oci:wrong:1", at.to_str().unwrap(), "--driver", driver]);
            assert!(error.contains("not those of layer"), "{error}");
        };
        refused();
        lazuli.kill(lazuli.worker());
        refused();
        assert!(fs::read(&file).is_err_and(|error| error.raw_os_error() == Some(5)));
        assert!(fs::read(honest.join("model")).unwrap() == right);
        let again = mount("right", "d");
        assert!(fs::read(again.join("model")).unwrap() == right);
        for at in [honest, lying, again] {
            lazuli.ok(["umount", at.to_str().unwrap()]);
        }
    }
}
