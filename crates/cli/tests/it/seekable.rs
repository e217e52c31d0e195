//! Images of eStargz and zstd:chunked start lazily as they are.

use std::fs;

use lazuli_testkit::{
    kernel::{Feature, require},
    listing,
    oci::{Compression, Image, Layer},
    odd,
    registry::{FakeRegistry, runs},
    seekable::{self, Format, Options, storable},
    tarball::{self, Entry},
};
use serde_json::Value;

use crate::{
    drivers::able,
    lazuli::Lazuli,
    mount::unpack,
    numbered::{assert_checked, files, read},
};

/// The odd image as its tables of contents can say it, each layer made by `make`.
fn odd_image(make: impl Fn(&[Entry]) -> Layer) -> Image {
    let layers = odd::layers();
    let layers = layers.map(|layer| layer.into_iter().filter_map(storable).collect::<Vec<_>>());
    Image::new(layers.map(|layer| make(&layer)))
}

#[test]
fn odd_trees_show_what_is_in_the_layers() {
    let [estargz, old, stargz, containers] =
        [Format::Estargz, Format::OldEstargz, Format::StargzChunked, Format::ContainersChunked]
            .map(Options::new);
    for (driver, options) in [
        ("fanotify", estargz),
        ("fuse", Options { chunk_size: 64 << 10, min_chunk_size: 300_000, ..estargz }),
        // Pieces that do not begin on block borders.
        ("fanotify", Options { chunk_size: 100_000, ..old }),
        ("fuse", stargz),
        ("fanotify", Options { chunk_size: 1 << 20, min_chunk_size: 3 << 20, ..stargz }),
        ("fanotify", containers),
        ("fuse", Options { chunk_size: 50_000, ..containers }),
    ] {
        if !able(driver) || !require(Feature::Program("umoci")) {
            continue;
        }
        let lazuli = Lazuli::new();
        let layout = lazuli.path("ordinary");
        let ordinary = |entries: &[Entry]| Layer::new(tarball::write(entries), Compression::Gzip);
        odd_image(ordinary).write_layout(&layout, "odd").unwrap();
        let reference = unpack(&layout, "odd", &lazuli);
        let image = odd_image(|entries| seekable::write(entries, &options));
        image.write_layout(&lazuli.path("layout"), "odd").unwrap();
        let mountpoint = lazuli.directory("mnt");
        let at = mountpoint.to_str().unwrap();
        lazuli.ok(["mount", "oci:layout:odd", at, "--driver", driver]);
        listing::assert_equal(reference, mountpoint.clone());
        lazuli.ok(["unpack", "oci:layout:odd", "unpacked"]);
        listing::assert_equal(lazuli.path("unpacked"), mountpoint.clone());
        lazuli.ok(["umount", at]);
        let checked = lazuli.ok(["check", "oci:layout:odd"]);
        assert!(checked.contains("seekable layers"), "{checked}");
    }
}

const FORMATS: [Format; 3] = [Format::Estargz, Format::StargzChunked, Format::ContainersChunked];

/// A registry with an image of these layers, and its name there.
fn pushed(lazuli: &Lazuli, layers: Vec<Layer>) -> (FakeRegistry, String) {
    let registry = FakeRegistry::start().unwrap();
    Image::new(layers).write_layout(&lazuli.path("source"), "x").unwrap();
    let name = format!("{}/app:1", registry.host());
    lazuli.ok(["copy", "oci:source:x", &name]);
    (registry, name)
}

#[test]
fn unmodified_names_start_lazily() {
    for (driver, format) in [
        ("fanotify", Format::Estargz),
        ("fuse", Format::Estargz),
        ("fanotify", Format::StargzChunked),
        ("fuse", Format::ContainersChunked),
    ] {
        if !able(driver) {
            continue;
        }
        let lazuli = Lazuli::new();
        let options = Options { chunk_size: 128 << 10, ..Options::new(format) };
        let layers = vec![seekable::write(&files(), &options)];
        let (registry, name) = pushed(&lazuli, layers);
        let mountpoint = lazuli.directory("mnt");
        let at = mountpoint.to_str().unwrap();
        for trust in ["nothing", "proven"] {
            lazuli.configure(&format!("[index]\ntrust = {trust:?}\n"));
            let error = lazuli.fails(["check", &name]);
            assert!(error.contains("not a lazy image"), "{error}");
            let mounted = lazuli.output(["mount", &name, at, "--driver", driver]);
            let said = String::from_utf8_lossy(&mounted.stderr);
            let expected = if trust == "proven" { "has no index" } else { "not a lazy image" };
            assert!(said.contains(expected), "{said}");
            // No index leads into zstd.
            let is_pulled = trust == "proven" && format == Format::Estargz;
            assert_eq!(mounted.status.success(), is_pulled, "{said}");
            let _ = lazuli.output(["stop", "--force"]);
            let _ = fs::remove_dir_all(lazuli.root());
        }
        lazuli.configure("[fetch]\namplify_bytes = 0\n");
        registry.reset_stats();
        lazuli.ok(["mount", &name, at, "--driver", driver]);
        read(&mountpoint, 11).unwrap();
        let fetched: u64 = runs(&registry.log()).iter().map(|(_, run)| run.end - run.start).sum();
        let total = lazuli.mount_status(&mountpoint)["bytes_total"].as_u64().unwrap();
        assert!(fetched < total / 6, "{fetched} of {total}");
        (0..20).for_each(|number| read(&mountpoint, number).unwrap());
        lazuli.ok(["umount", at]);
        // It is found again after a restart, without the registry.
        lazuli.ok(["mount", &name, at, "--driver", driver]);
        lazuli.kill(lazuli.worker());
        (0..20).for_each(|number| read(&mountpoint, number).unwrap());
        lazuli.ok(["umount", at]);
        lazuli.ok(["prefetch", &name, "--wait"]);
        let inspected: Value =
            serde_json::from_str(&lazuli.ok(["inspect", &name, "--json"])).unwrap();
        assert_eq!(inspected["origin"], "seekable layers", "{inspected:#}");
        let error = lazuli.fails(["check", &name, "--against", "oci:source:x"]);
        assert!(error.contains("is cut differently"), "{error}");
        let error = lazuli.fails(["optimize", &name, "oci:hot:1"]);
        assert!(error.contains("convert it with `lazuli convert`"), "{error}");
        lazuli.ok(["convert", &name, "oci:converted:1"]);
        assert_eq!(registry.violations(), Vec::<String>::new());
    }
}

/// The manifest's annotation has to match the table.
#[test]
fn another_table_of_contents_is_refused() {
    for format in FORMATS {
        let lazuli = Lazuli::new();
        let layer = seekable::write(&files(), &Options::new(format));
        let mut stored = layer.stored().unwrap();
        Image::new([layer]).write_layout(&lazuli.path("layout"), "1").unwrap();
        lazuli.ok(["check", "oci:layout:1"]);
        let digest = lazuli_image::Algorithm::Sha256.digest(&stored);
        let blob = lazuli.path("layout/blobs/sha256").join(digest.hex());
        let whole = stored.len();
        // In the table, as it is stored in each of the formats.
        let at = whole - 400;
        stored[at] ^= 1;
        fs::write(&blob, &stored).unwrap();
        let error = lazuli.fails(["check", "oci:layout:1"]);
        assert!(error.contains(&format!("table of contents of {digest}")), "{error}");
        // No footer, and no frame: the layer is shorter than the manifest says.
        fs::write(&blob, &stored[..whole - 600]).unwrap();
        lazuli.fails(["check", "oci:layout:1"]);
    }
}

/// A node never shows bytes that it could not check, wherever the layer was changed.
#[test]
fn another_layer_under_the_same_table_gives_errors() {
    for (driver, format) in [
        ("fanotify", Format::Estargz),
        ("fuse", Format::StargzChunked),
        ("fanotify", Format::ContainersChunked),
    ] {
        if !able(driver) {
            continue;
        }
        let lazuli = Lazuli::new();
        let layer = seekable::write(&files(), &Options::new(format));
        let stored = layer.stored().unwrap();
        Image::new([layer]).write_layout(&lazuli.path("layout"), "1").unwrap();
        let mountpoint = lazuli.directory("mnt");
        let at = mountpoint.to_str().unwrap();
        lazuli.ok(["mount", "oci:layout:1", at, "--driver", driver]);
        assert_checked(&mountpoint, &lazuli.path("layout"), &stored);
        lazuli.ok(["umount", at]);
    }
}

/// The image's author may lie in the table. What comes of that is an error with a name, or one for
/// the reader.
#[test]
fn tables_that_lie_show_nothing_else() {
    type Forge = fn(&mut Vec<Value>);
    let refused: [(&str, Forge, &str); 12] = [
        ("behind the layer", |toc| toc[3]["offset"] = (1_u64 << 40).into(), "no content of a file"),
        ("at no place", |toc| toc[3]["offset"] = 0.into(), "no content of a file"),
        ("a file that is too long", |toc| toc[3]["size"] = (1_u64 << 40).into(), "expected"),
        ("more than the piece", |toc| toc[3]["chunkSize"] = 900_000.into(), "a piece of 900000"),
        (
            "no digest",
            |toc| (toc[3]["digest"], toc[3]["chunkDigest"]) = ("".into(), "".into()),
            "without a digest",
        ),
        ("far inside", |toc| toc[3]["innerOffset"] = u64::MAX.into(), "a piece of"),
        ("a piece of nothing", |toc| toc[0]["type"] = "chunk".into(), "a piece of no file"),
        ("a path that leads out", |toc| toc[3]["name"] = "../x".into(), "`..`"),
        ("no type", |toc| toc[3]["type"] = "door".into(), "door"),
        ("a time", |toc| toc[3]["modtime"] = "noon".into(), "RFC 3339"),
        ("an attribute", |toc| toc[3]["xattrs"] = serde_json::json!({"user.a": "?"}), "base64"),
        (
            "a link to nothing",
            |toc| toc.push(serde_json::json!({"type": "hardlink", "name": "l", "linkName": "no"})),
            "/l",
        ),
    ];
    let options = Options::new(Format::Estargz);
    for (what, forge, expected) in refused {
        let lazuli = Lazuli::new();
        let layer = seekable::write_forged(&files(), &options, forge);
        Image::new([layer]).write_layout(&lazuli.path("layout"), "1").unwrap();
        let error = lazuli.fails(["check", "oci:layout:1"]);
        assert!(error.contains(expected), "{what}: {error}");
    }
    if !able("fuse") {
        return;
    }
    let wrong: [(&str, Forge); 4] = [
        ("a shorter file", |toc| toc[3]["size"] = 299_999.into()),
        ("another digest", |toc| {
            let other = toc[4]["digest"].clone();
            (toc[3]["digest"], toc[3]["chunkDigest"]) = (other.clone(), other);
        }),
        ("another place", |toc| toc[3]["innerOffset"] = 1.into()),
        ("in the middle of a member", |toc| {
            toc[3]["offset"] = (toc[3]["offset"].as_u64().unwrap() + 1).into();
        }),
    ];
    for (what, forge) in wrong {
        for format in FORMATS {
            let lazuli = Lazuli::new();
            let layer = seekable::write_forged(&files(), &Options::new(format), forge);
            Image::new([layer]).write_layout(&lazuli.path("layout"), "1").unwrap();
            let mountpoint = lazuli.directory("mnt");
            let at = mountpoint.to_str().unwrap();
            lazuli.ok(["mount", "oci:layout:1", at, "--driver", "fuse"]);
            let error = fs::read(mountpoint.join("file3")).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(5), "{what}, {format:?}");
            read(&mountpoint, 5).unwrap();
            lazuli.ok(["umount", at]);
        }
    }
}

/// A layer without a table makes the image what it was; so do two tables.
#[test]
fn images_with_other_layers_are_ordinary() {
    let lazuli = Lazuli::new();
    let ordinary = Layer::new(tarball::write(&[Entry::file("a", "b")]), Compression::Gzip);
    let layer = seekable::write(&files(), &Options::new(Format::Estargz));
    Image::new([ordinary, layer]).write_layout(&lazuli.path("layout"), "1").unwrap();
    let error = lazuli.fails(["check", "oci:layout:1"]);
    assert!(error.contains("not a lazy image"), "{error}");
    // An index takes them all.
    lazuli.ok(["index", "oci:layout:1"]);
    lazuli.ok(["check", "oci:layout:1", "--against", "oci:layout:1"]);
}

#[test]
fn chunks_before_the_landmark_are_hot() {
    if !able("fuse") {
        return;
    }
    for format in [Format::Estargz, Format::StargzChunked] {
        let lazuli = Lazuli::new();
        lazuli.configure_all("[prefetch]\nrest_bytes_per_second = 0\n");
        let options = Options { landmark: Some(3), ..Options::new(format) };
        let layers = vec![seekable::write(&files(), &options)];
        let (_registry, name) = pushed(&lazuli, layers);
        let mountpoint = lazuli.directory("mnt");
        let at = mountpoint.to_str().unwrap();
        lazuli.ok(["mount", &name, at, "--driver", "fuse"]);
        assert!(!mountpoint.join(".prefetch.landmark").exists());
        let ready = || lazuli.mount_status(&mountpoint)["chunks_ready"].as_u64().unwrap();
        while ready() < 3 {
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        assert_eq!(ready(), 3);
        lazuli.ok(["umount", at]);
    }
}
