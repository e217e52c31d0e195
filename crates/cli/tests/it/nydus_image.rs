//! The command under the name `nydus-image`, called as upstream's converter calls it.

use std::{
    collections::BTreeMap,
    fs,
    io::{Read as _, Write as _},
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    thread,
};

use lazuli_builder::pack_bootstrap;
use lazuli_image::{
    Algorithm, Digest,
    oci::{BlobLayer, ImageConfig, LazyImage, Platform},
};
use lazuli_testkit::{
    oci::{Compression, Image, Layer},
    odd,
    tarball::{self, Entry},
};
use serde_json::{Value, json};

use crate::lazuli::Lazuli;

/// Calls the command in the test's directory.
fn call(lazuli: &Lazuli, arguments: &[&str], input: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lazuli"));
    command.arg0("/usr/bin/nydus-image").args(arguments).current_dir(lazuli.path(""));
    command.env("TMPDIR", lazuli.path(""));
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    // A command that fails before it reads closes its end.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    child.wait_with_output().unwrap()
}

#[track_caller]
fn ok(lazuli: &Lazuli, arguments: &[&str], input: &str) -> String {
    let output = call(lazuli, arguments, input);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[track_caller]
fn fails(lazuli: &Lazuli, arguments: &[&str]) -> (Option<i32>, String) {
    let output = call(lazuli, arguments, "");
    assert!(!output.status.success(), "succeeded: {arguments:?}");
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(!error.contains("panicked"), "{error}");
    (output.status.code(), error)
}

/// Runs the converter's command for a layer, with these further options.
fn create(lazuli: &Lazuli, tar: &str, blob: &str, more: &[&str]) {
    let converter = [
        "create",
        "--log-level",
        "warn",
        "--prefetch-policy",
        "fs",
        "--blob",
        blob,
        "--whiteout-spec",
        "none",
        "--fs-version",
        "6",
        "--type",
        "tar-rafs",
        "--blob-inline-meta",
        "--features",
        "blob-toc",
    ];
    ok(lazuli, &[&converter[..], more, &[tar]].concat(), "/");
}

/// A section of a blob, found as the converter does it: by the table of contents at its end.
fn section(blob: &[u8], wanted: &str) -> Option<Vec<u8>> {
    let (rest, footer) = blob.split_at(blob.len() - 512);
    assert!(footer.starts_with(b"rafs.blob.toc\0"));
    let size = std::str::from_utf8(&footer[124..135]).unwrap();
    let size = usize::from_str_radix(size, 8).unwrap();
    let number = |entry: &[u8], at: usize| {
        u64::from_le_bytes(entry[at..at + 8].try_into().unwrap()) as usize
    };
    let mut entries = rest[rest.len() - size..].chunks_exact(128);
    let entry = entries
        .find(|entry| entry[8..24].split(|byte| *byte == 0).next() == Some(wanted.as_bytes()))?;
    let stored = &blob[number(entry, 56)..][..number(entry, 64)];
    let content = match entry[0] {
        1 => stored.to_vec(),
        2 => zstd::decode_all(stored).unwrap(),
        flags => panic!("flags {flags}"),
    };
    // The entry of the chunks has their decoded size, and its digest covers their footer.
    if wanted != "image.blob" {
        assert_eq!(content.len(), number(entry, 72));
        assert_eq!(Algorithm::Sha256.digest(&content).hash[..], entry[24..56]);
    }
    Some(content)
}

/// Makes a layer of each tar, with their bootstraps in the files that the converter names; returns
/// both.
fn layers(lazuli: &Lazuli, tars: &[Vec<u8>]) -> (Vec<Digest>, Vec<String>) {
    layers_with(lazuli, tars, &[])
}

/// The same with options more.
fn layers_with(lazuli: &Lazuli, tars: &[Vec<u8>], more: &[&str]) -> (Vec<Digest>, Vec<String>) {
    let directory = lazuli.directory("layers");
    let layer = |(number, tar): (usize, &Vec<u8>)| {
        let name = format!("{number}.tar");
        fs::write(lazuli.path(&name), tar).unwrap();
        create(lazuli, &name, "blob", more);
        let blob = fs::read(lazuli.path("blob")).unwrap();
        let digest = Algorithm::Sha256.digest(&blob);
        fs::rename(lazuli.path("blob"), directory.join(format!("{}.blob", digest.hex()))).unwrap();
        fs::write(directory.join(digest.hex()), section(&blob, "image.boot").unwrap()).unwrap();
        (digest, format!("layers/{}", digest.hex()))
    };
    tars.iter().enumerate().map(layer).unzip()
}

fn merge(lazuli: &Lazuli, sources: &[String], more: &[&str]) -> Value {
    let converter = [
        "merge",
        "--log-level",
        "warn",
        "--prefetch-policy",
        "fs",
        "--output-json",
        "out.json",
        "--bootstrap",
        "out.boot",
    ];
    let sources: Vec<_> = sources.iter().map(String::as_str).collect();
    ok(lazuli, &[&converter[..], more, &sources].concat(), "/");
    serde_json::from_slice(&fs::read(lazuli.path("out.json")).unwrap()).unwrap()
}

/// Writes an image with the blobs of these layers and the bootstrap `out.boot` as `oci:made:x`.
fn image(lazuli: &Lazuli, blobs: &[Digest]) {
    let store = |content: &[u8]| {
        let digest = Algorithm::Sha256.digest(content);
        fs::write(lazuli.directory("made/blobs/sha256").join(digest.hex()), content).unwrap();
        BlobLayer::new(digest, content.len() as u64)
    };
    let blob =
        |id: &Digest| store(&fs::read(lazuli.path(&format!("layers/{}.blob", id.hex()))).unwrap());
    let blobs: Vec<_> = blobs.iter().map(blob).collect();
    let packed = pack_bootstrap(&fs::read(lazuli.path("out.boot")).unwrap(), []);
    let config = ImageConfig::new(&Platform::host());
    let bootstrap = store(&packed.bytes);
    let made = LazyImage::new(&config, &blobs, bootstrap, packed.diff_id, BTreeMap::new()).unwrap();
    store(&made.config);
    let manifest = store(&made.manifest);
    let index = json!({ "schemaVersion": 2, "manifests": [{
        "mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": manifest.digest,
        "size": manifest.size, "annotations": { "org.opencontainers.image.ref.name": "x" },
    }] });
    fs::write(lazuli.path("made/index.json"), index.to_string()).unwrap();
    fs::write(lazuli.path("made/oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
}

/// Whiteouts, opaque directories, directories and links that upper layers go through without
/// listing them, a layer without content.
fn tars() -> Vec<Vec<u8>> {
    let directory = Entry::directory;
    let lower = [
        directory("./").mode(0o711).owner(3, 4).mtime(1_600_000_000, 5),
        directory("kept").mode(0o700).owner(5, 6).mtime(1_500_000_000, 7).xattr("user.kept", "yes"),
        Entry::file("kept/removed", "x"),
        Entry::file("kept/stays", odd::random(1, 3 << 20)),
        directory("opaque"),
        Entry::file("opaque/lower", "lower"),
        Entry::file("removed", "x"),
        directory("usr"),
        directory("usr/lib").mode(0o750),
        Entry::file("usr/lib/lower", "lower"),
        Entry::symlink("lib", "usr/lib"),
        Entry::file("a", "linked").owner(9, 9),
        Entry::hard_link("b", "a").owner(9, 9),
    ];
    let middle = [
        Entry::file("kept/.wh.removed", ""),
        Entry::file("kept/added", "added"),
        Entry::file(".wh.removed", ""),
        directory("opaque").mode(0o711),
        Entry::file("opaque/.wh..wh..opq", ""),
        Entry::file("opaque/upper", "upper"),
        Entry::file("lib/upper", "upper"),
        Entry::file("deep/er/file", odd::random(2, 5000)),
        Entry::file("a", "not linked any more"),
    ];
    let upper = [Entry::symlink("usr/link", "x"), Entry::file("deep/er/.wh.file", "")];
    [tarball::write(&lower), tarball::write(&middle), tarball::write(&upper)].to_vec()
}

#[test]
fn layers_merge_to_the_tree_of_the_image() {
    let lazuli = Lazuli::new();
    let tars = tars();
    let source = tars.iter().map(|tar| Layer::new(tar.clone(), Compression::None));
    Image::new(source).write_layout(&lazuli.path("source"), "x").unwrap();
    let (blobs, sources) = layers(&lazuli, &tars);
    let output = merge(&lazuli, &sources, &[]);
    // The third layer has no content, and the second file of the middle one is hidden.
    assert_eq!(output["blobs"], json!([blobs[0].hex(), blobs[1].hex()]));
    image(&lazuli, &blobs[..2]);
    lazuli.ok(["check", "oci:made:x", "--against", "oci:source:x"]);

    // A parent and the layers above it.
    fs::rename(lazuli.path("out.boot"), lazuli.path("whole.boot")).unwrap();
    merge(&lazuli, &sources[..1], &[]);
    fs::rename(lazuli.path("out.boot"), lazuli.path("parent.boot")).unwrap();
    merge(&lazuli, &sources[1..], &["--parent-bootstrap", "parent.boot"]);
    let whole = fs::read(lazuli.path("whole.boot")).unwrap();
    assert!(whole == fs::read(lazuli.path("out.boot")).unwrap(), "not the same bytes");
}

#[test]
fn small_files_of_a_layer_share_batches() {
    let lazuli = Lazuli::new();
    let tar = |from: usize| {
        let text = |number| format!("file number {number} of a program in small pieces\n");
        let file = |number| Entry::file(format!("f{number}"), text(number).repeat(1 + number % 40));
        tarball::write(&(from..from + 200).map(file).collect::<Vec<_>>())
    };
    // The second layer has half of the first one's files again, from the same batches.
    let tars = [tar(0), tar(100)];
    let source = tars.iter().map(|tar| Layer::new(tar.clone(), Compression::None));
    Image::new(source).write_layout(&lazuli.path("source"), "x").unwrap();
    let size = |more: &[&str]| {
        let (blobs, sources) = layers_with(&lazuli, &tars, more);
        merge(&lazuli, &sources, &[]);
        image(&lazuli, &blobs);
        lazuli.ok(["check", "oci:made:x", "--against", "oci:source:x"]);
        let size = |id: &Digest| fs::metadata(lazuli.path(&format!("layers/{}.blob", id.hex())));
        blobs.iter().map(|id| size(id).unwrap().len()).sum::<u64>()
    };
    let (alone, batched) = (size(&[]), size(&["--batch-size", "0x10000"]));
    assert!(batched + 10_000 < alone, "{batched} {alone}");
}

#[test]
fn a_layer_comes_back_as_its_tar() {
    let lazuli = Lazuli::new();
    for tar in tars() {
        let (blobs, bootstraps) = layers(&lazuli, &[tar]);
        let blob = fs::read(lazuli.path(&format!("{}.blob", bootstraps[0]))).unwrap();
        // The converter passes the chunks alone, in a file with another name.
        let content = section(&blob, "image.blob");
        fs::write(lazuli.path("image.blob"), content.clone().unwrap_or_default()).unwrap();
        fs::rename(lazuli.path(&bootstraps[0]), lazuli.path("image.boot")).unwrap();
        let unpack =
            ["unpack", "--log-level", "warn", "--bootstrap", "image.boot", "--output", "x.tar"];
        ok(&lazuli, &[&unpack[..], &["--blob", "image.blob"]].concat(), "");
        let names = |path: PathBuf| {
            let mut archive = tar::Archive::new(fs::File::open(path).unwrap());
            let entries = archive.entries().unwrap();
            let mut names: Vec<_> =
                entries.map(|entry| entry.unwrap().path().unwrap().into_owned()).collect();
            names.sort();
            names
        };
        assert_eq!(names(lazuli.path("x.tar")), names(lazuli.path("0.tar")));
        ok(&lazuli, &["check", "--bootstrap", "image.boot"], "");
        if content.is_some() {
            let (_, error) = fails(&lazuli, &unpack);
            assert!(error.contains("--blob"), "{error}");
            fs::write(lazuli.path("image.blob"), vec![0; blob.len()]).unwrap();
            let (_, error) = fails(&lazuli, &[&unpack[..], &["--blob", "image.blob"]].concat());
            assert!(error.contains("chunk "), "{error}");
        }
        assert_eq!(blobs.len(), 1);
    }
}

#[test]
fn a_chunk_dictionary_is_used() {
    let lazuli = Lazuli::new();
    let content = odd::random(7, 2 << 20);
    let tar = |name: &str| tarball::write(&[Entry::file(name, content.clone())]);
    let (blobs, sources) = layers(&lazuli, &[tar("one")]);
    merge(&lazuli, &sources, &[]);
    fs::rename(lazuli.path("out.boot"), lazuli.path("dict.boot")).unwrap();
    fs::write(lazuli.path("two.tar"), tar("two")).unwrap();
    create(&lazuli, "two.tar", "blob", &["--chunk-dict", "bootstrap=dict.boot"]);
    let blob = fs::read(lazuli.path("blob")).unwrap();
    assert!(blob.len() < 64 << 10 && section(&blob, "image.blob").is_none(), "{}", blob.len());
    let name = format!("layers/{}", Algorithm::Sha256.digest(&blob).hex());
    fs::write(lazuli.path(&name), section(&blob, "image.boot").unwrap()).unwrap();
    let output = merge(&lazuli, &[name], &["--chunk-dict", "bootstrap=dict.boot"]);
    assert_eq!(output["blobs"], json!([blobs[0].hex()]));
    image(&lazuli, &blobs);
    lazuli.ok(["check", "oci:made:x", "--against", "tar:two.tar"]);
}

#[test]
fn a_directory_is_created_checked_and_inspected() {
    let lazuli = Lazuli::new();
    fs::write(lazuli.directory("tree").join("file"), odd::random(1, 5000)).unwrap();
    fs::write(lazuli.path("tree/.wh.name"), "a name like others").unwrap();
    let options =
        ["create", "--bootstrap", "boot", "--log-level", "warn", "--whiteout-spec", "oci"];
    let more = ["--output-json", "create.json", "--blob", "blob", "--fs-version", "6", "tree"];
    ok(&lazuli, &[options, more].concat(), "");
    let blob = Algorithm::Sha256.digest(&fs::read(lazuli.path("blob")).unwrap());
    let json = |name: &str| -> Value {
        serde_json::from_slice(&fs::read(lazuli.path(name)).unwrap()).unwrap()
    };
    assert_eq!(json("create.json")["blobs"], json!([blob.hex()]));
    ok(
        &lazuli,
        &["check", "--log-level", "warn", "--output-json", "c.json", "--bootstrap", "boot"],
        "",
    );
    let checked = json("c.json");
    assert_eq!(checked["blobs"], json!([blob.hex()]));
    assert_eq!((&checked["fs_version"], &checked["compressor"]), (&json!("6"), &json!("zstd")));
    let said: Value =
        serde_json::from_str(&ok(&lazuli, &["inspect", "boot", "--request", "blobs"], "")).unwrap();
    assert_eq!(said[0]["blob_id"], blob.hex());
    assert_eq!(said[0]["compressed_size"], fs::metadata(lazuli.path("blob")).unwrap().len());
    ok(&lazuli, &["unpack", "-B", "boot", "--blob", "blob", "--output", "x.tar"], "");
    fs::write(lazuli.path("boot"), b"not a bootstrap").unwrap();
    for verb in ["check", "inspect"] {
        let request = if verb == "inspect" { &["-R", "blobs"][..] } else { &[] };
        let (code, error) = fails(&lazuli, &[&[verb, "boot"], request].concat());
        assert!(code == Some(1) && error.contains("boot"), "{error}");
    }
}

/// What upstream's manual has people type.
#[test]
fn a_directory_receives_blobs_and_bootstraps_by_their_digests() {
    let lazuli = Lazuli::new();
    fs::write(lazuli.directory("tree").join("file"), odd::random(1, 5000)).unwrap();
    let images = lazuli.directory("images");
    let file = || images.read_dir().unwrap().map(|entry| entry.unwrap().path());
    let digest = |path: &Path| Algorithm::Sha256.digest(&fs::read(path).unwrap()).hex();
    ok(&lazuli, &["create", "-t", "dir-rafs", "-D", "images", "-J", "made.json", "tree"], "");
    let made: Value = serde_json::from_slice(&fs::read(lazuli.path("made.json")).unwrap()).unwrap();
    let bootstrap = made["bootstrap"].as_str().unwrap();
    let mut names: Vec<_> = file().map(|path| digest(&path)).collect();
    let mut expected =
        vec![digest(&lazuli.path(bootstrap)), made["blobs"][0].as_str().unwrap().to_owned()];
    names.sort();
    expected.sort();
    assert_eq!(names, expected);
    assert!(file().all(|path| path.file_name().unwrap().to_str() == Some(&digest(&path))));
    ok(&lazuli, &["check", bootstrap], "");
    ok(&lazuli, &["unpack", "--blob-dir=images", bootstrap, "--output", "x.tar"], "");

    fs::write(lazuli.directory("upper").join("more"), odd::random(2, 5000)).unwrap();
    let before: Vec<_> = file().collect();
    ok(&lazuli, &["create", "--blob-inline-meta", "-D", "images", "upper"], "");
    let layer = file().find(|path| !before.contains(path)).unwrap();
    assert_eq!(layer.file_name().unwrap().to_str(), Some(&*digest(&layer)));
    let upper = lazuli.directory("layers").join(digest(&layer));
    fs::write(&upper, section(&fs::read(&layer).unwrap(), "image.boot").unwrap()).unwrap();
    let upper = upper.to_str().unwrap();
    ok(
        &lazuli,
        &["merge", "--parent-bootstrap", bootstrap, "-D", "images", "-J", "m.json", upper],
        "",
    );
    let merged: Value = serde_json::from_slice(&fs::read(lazuli.path("m.json")).unwrap()).unwrap();
    let merged = merged["bootstrap"].as_str().unwrap();
    let (_, error) = fails(&lazuli, &["unpack", merged, "--output", "y.tar"]);
    assert!(error.contains("2 blobs") && error.contains("--blob-dir"), "{error}");
    ok(&lazuli, &["unpack", "-D", "images", merged, "--output", "y.tar"], "");
    let tar = fs::read(lazuli.path("y.tar")).unwrap();
    for (seed, name) in [(1, "file"), (2, "more")] {
        let content = odd::random(seed, 5000);
        assert!(tar.windows(5000).any(|window| window == content), "{name}");
    }
    let (_, error) = fails(&lazuli, &["create", "-D", "nowhere", "tree"]);
    assert!(error.contains("nowhere/"), "{error}");
}

#[test]
fn the_help_lists_exactly_the_supported_options() {
    let lazuli = Lazuli::new();
    let help = ok(&lazuli, &["create", "-h"], "");
    assert!(help.contains("--type") && help.contains("tar-rafs"), "{help}");
    assert!(help.contains("--batch-size") && !help.contains("--encrypt"), "{help}");
    assert!(
        ok(&lazuli, &["--version"], "")
            .contains(concat!("Version: \tv", env!("CARGO_PKG_VERSION")))
    );
    fs::write(lazuli.path("x"), "").unwrap();
    let create = ["create", "x", "--blob", "blob", "--blob-inline-meta"];
    for refused in [
        &["--encrypt"][..],
        &["--type", "targz-ref"],
        &["--fs-version", "5"],
        &["--whiteout-spec", "overlayfs"],
        &["--parent-bootstrap", "x"],
        &["--features", "encryption"],
        &["--chunk-size", "0xx"],
    ] {
        let (code, error) = fails(&lazuli, &[&create, refused].concat());
        assert!(code == Some(2) && error.contains(refused[0]), "{refused:?}: {error}");
    }
    for (arguments, word) in [
        (&["merge", "x", "-B", "out", "--blob-digests", "0"][..], "--blob-digests"),
        (&["unpack", "x", "--output", "y", "--backend-type", "http-proxy"], "--backend-type"),
        (&["compact", "x"], "compact"),
        (&["create", "x", "--blob", "blob"], "--bootstrap"),
        (&["create", "x", "--blob", "blob", "-D", "."], "--blob-dir"),
        (&["create", "x"], "--blob"),
    ] {
        let (code, error) = fails(&lazuli, arguments);
        assert!(code == Some(2) && error.contains(word), "{arguments:?}: {error}");
    }
}

#[test]
fn bad_input_is_named() {
    let lazuli = Lazuli::new();
    let tar = tarball::write(&[Entry::file("file", "content")]);
    let (_, sources) = layers(&lazuli, &[tar]);
    for (more, word) in [
        (&["--chunk-size", "5000", "0.tar"][..], "chunk_size"),
        (&["--batch-size", "5000", "0.tar"], "batch_size"),
        (&["no/such.tar"], "no/such.tar"),
        (&["--chunk-dict", "bootstrap=0.tar", "0.tar"], "0.tar"),
    ] {
        let create = ["create", "--type", "tar-rafs", "--blob", "blob", "--blob-inline-meta"];
        let (code, error) = fails(&lazuli, &[&create, more].concat());
        assert!(code == Some(1) && error.contains(word), "{more:?}: {error}");
    }
    // A bootstrap that was extracted from its blob and doesn't name it.
    fs::copy(lazuli.path(&sources[0]), lazuli.path("layers/image.boot")).unwrap();
    let (_, error) = fails(&lazuli, &["merge", "-B", "out", "layers/image.boot"]);
    assert!(error.contains("layers/image.boot") && error.contains("id"), "{error}");
    // Layers that no image can have together.
    create(&lazuli, "0.tar", "blob", &["--chunk-size", "0x10000"]);
    let blob = fs::read(lazuli.path("blob")).unwrap();
    let other = format!("layers/{}", Algorithm::Sha256.digest(&blob).hex());
    fs::write(lazuli.path(&other), section(&blob, "image.boot").unwrap()).unwrap();
    let (_, error) = fails(&lazuli, &["merge", "-B", "out", &sources[0], &other]);
    assert!(error.contains("chunk size") && error.contains(&other), "{error}");
    assert!(!lazuli.path("out").exists());
}

#[test]
fn a_reader_of_a_pipe_gets_its_end() {
    let lazuli = Lazuli::new();
    let pipe = lazuli.path("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let read = |pipe: &Path| {
        let pipe = pipe.to_owned();
        thread::spawn(move || {
            let mut bytes = Vec::new();
            fs::File::open(pipe).unwrap().read_to_end(&mut bytes).unwrap();
            bytes
        })
    };
    let tar = tarball::write(&[Entry::file("file", "content")]);
    fs::write(lazuli.path("good.tar"), &tar).unwrap();
    fs::write(lazuli.path("bad.tar"), &tar[..600]).unwrap();
    let reader = read(&pipe);
    fails(
        &lazuli,
        &["create", "--type", "tar-rafs", "--blob", "pipe", "--blob-inline-meta", "bad.tar"],
    );
    assert!(reader.join().unwrap().is_empty());
    let reader = read(&pipe);
    create(&lazuli, "good.tar", "pipe", &[]);
    assert!(section(&reader.join().unwrap(), "image.boot").is_some());
}
