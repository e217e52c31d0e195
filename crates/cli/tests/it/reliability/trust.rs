//! Manifest digest → bootstrap → chunk table → chunk: a forgery anywhere on the way is found and
//! named, and no byte of it is read.

use std::{fs, path::Path};

use lazuli_image::{BLOCK_SIZE, Codec, codec::Encoder, rafs::Bootstrap};
use lazuli_testkit::{odd, registry::FakeRegistry};

use super::{
    forge::{DEVICE_SLOTS, Forge, Tables, crc32c, exchange, force_crc32c, replace},
    processes::{Pids, kill, pids},
};
use crate::{drivers::able, lazuli::Lazuli};

const DRIVERS: [&str; 2] = ["fanotify", "fuse"];

/// A lazy image of two layers: `one/…` and `two/…`, each with a compressible and an incompressible
/// file.
fn image() -> (Lazuli, Forge) {
    use lazuli_testkit::oci::{Compression, Image, Layer};
    let lazuli = Lazuli::new();
    // These tests wait for errors.
    lazuli.configure("[fetch]\ndeadline_seconds = 2\n");
    let layers = ["one", "two"].map(|layer| {
        let mut tar = tar::Builder::new(Vec::new());
        for name in ["text", "noise"] {
            let content = content(layer, name);
            let mut header = tar::Header::new_ustar();
            header.set_size(content.len() as u64);
            header.set_mode(0o644);
            tar.append_data(&mut header, format!("{layer}/{name}"), &content[..]).unwrap();
        }
        Layer::new(tar.into_inner().unwrap(), Compression::None)
    });
    Image::new(layers).write_layout(&lazuli.path("source"), "x").unwrap();
    lazuli.ok(["convert", "oci:source:x", "oci:lazy:x"]);
    let forge = Forge::new(lazuli.path("lazy"));
    (lazuli, forge)
}

fn content(layer: &str, name: &str) -> Vec<u8> {
    let size = if layer == "one" { 300_000 } else { 200_000 };
    match name {
        "text" => [layer.as_bytes(), &odd::text(size)].concat(),
        _ => odd::random(size as u64, size),
    }
}

/// Returns those of the four files that read correctly; an error has to be EIO, other bytes fail
/// the test.
fn readable(mountpoint: &Path) -> Vec<String> {
    let names = ["one/text", "one/noise", "two/text", "two/noise"];
    let right = names.into_iter().filter(|path| {
        let (layer, name) = path.split_once('/').unwrap();
        match fs::read(mountpoint.join(path)) {
            Ok(bytes) => {
                assert!(bytes == content(layer, name), "{path} has wrong bytes");
                true
            }
            Err(error) => {
                assert_eq!(error.raw_os_error(), Some(5), "{path}: {error}");
                false
            }
        }
    });
    right.map(str::to_owned).collect()
}

/// The image must not be mounted, and the error must have these words.
#[track_caller]
fn refused(lazuli: &Lazuli, image: &str, words: &[&str]) {
    let mountpoint = lazuli.directory("mnt");
    for driver in DRIVERS {
        let error =
            lazuli.fails(["mount", image, mountpoint.to_str().unwrap(), "--driver", driver]);
        for word in words {
            assert!(error.contains(word), "`{word}` is not in: {error}");
        }
        assert_eq!(lazuli.status()["mounts"].as_array().unwrap().len(), 0);
        let images = lazuli.root().join("images");
        let kept = fs::read_dir(images).map_or(0, |images| images.count());
        assert_eq!(kept, 0, "a forged image was kept");
    }
}

/// Mounts the image with each driver in turn, on an empty cache.
fn mounted(lazuli: &Lazuli, look: impl Fn(&Path)) {
    let mountpoint = lazuli.directory("mnt");
    for driver in DRIVERS {
        lazuli.ok(["mount", "oci:lazy:x", mountpoint.to_str().unwrap(), "--driver", driver]);
        look(&mountpoint);
        lazuli.ok(["umount", mountpoint.to_str().unwrap()]);
        lazuli.ok(["stop"]);
        fs::remove_dir_all(lazuli.root().join("cache")).unwrap();
    }
}

fn able_to_mount() -> bool {
    DRIVERS.iter().all(|driver| able(driver))
}

#[test]
fn a_forged_chunk_is_refused_despite_the_right_crc() {
    if !able_to_mount() {
        return;
    }
    let (lazuli, forge) = image();
    let original = content("one", "text");
    let crc = crc32c(&original);
    // As upstream's newer builders do, the chunk table names the CRC of the chunk.
    forge.change_bootstrap(|bootstrap| {
        let (start, rows) = Tables::of(bootstrap).chunks;
        let row = bootstrap[start..start + rows * 80].chunks_exact_mut(80).find(|row| {
            u32::from_le_bytes(row[44..48].try_into().unwrap()) == original.len() as u32
        });
        let row = row.expect("a chunk of that size");
        row[36] |= 0x10;
        row[76..80].copy_from_slice(&crc.to_le_bytes());
    });
    let bootstrap = forge.bootstrap();
    let bootstrap = Bootstrap::open(&bootstrap[..]).unwrap();
    let blob = bootstrap.blobs().iter().find_map(|blob| {
        let chunk =
            blob.chunks.iter().find(|chunk| chunk.decoded_size as usize == original.len())?;
        Some((blob.id, *chunk))
    });
    let (blob, chunk) = blob.unwrap();

    let mut forged = odd::text(original.len());
    let end = forged.len();
    forged[end - 5_000..].fill(b'z');
    force_crc32c(&mut forged, crc);
    assert!(forged != original && crc32c(&forged) == crc);
    let mut encoder = Encoder::new(Codec::Zstd, 19).unwrap();
    let mut stored = encoder.encode(&forged).expect("text compresses").to_vec();
    // A frame that decoders skip makes up for the difference.
    let padding = (chunk.stored_size as usize).checked_sub(stored.len() + 8);
    let padding = padding.expect("the forged chunk is smaller") as u32;
    stored.extend([0x184d_2a50_u32.to_le_bytes(), padding.to_le_bytes()].concat());
    stored.resize(chunk.stored_size as usize, 0);
    let mut decoded = vec![0; forged.len()];
    Codec::Zstd.decode(&stored, &mut decoded).expect("valid compressed data");
    forge.replace(&blob.to_string(), |bytes| {
        bytes[chunk.stored.0 as usize..][..stored.len()].copy_from_slice(&stored);
    });

    mounted(&lazuli, |mountpoint| {
        assert_eq!(readable(mountpoint), ["one/noise", "two/text", "two/noise"]);
    });
    let wanted = format!("digest is {}", chunk.digest.algorithm.digest(&forged));
    for word in [&wanted[..], &blob.hex(), &format!("chunk {}", chunk.number)] {
        assert!(lazuli.log().contains(word), "`{word}` is not in the log");
    }
    let error = lazuli.fails(["check", "oci:lazy:x"]);
    assert!(error.contains("digest") && error.contains(&blob.hex()), "{error}");
}

#[test]
fn a_forged_blob_meta_is_refused() {
    if !able_to_mount() {
        return;
    }
    for (at, words) in [(9, ["blob.meta", "entry 0"]), (4096 + 16, ["blob.meta", "bad offset"])] {
        let (lazuli, forge) = image();
        mounted(&lazuli, |mountpoint| assert_eq!(readable(mountpoint).len(), 4));
        fs::remove_dir_all(lazuli.root().join("images")).unwrap();
        forge.change_members(|members| {
            let meta = members.iter_mut().find(|(name, _)| name.ends_with(".blob.meta")).unwrap();
            assert_eq!(meta.1.len() as u64, 2 * BLOCK_SIZE);
            meta.1[at] ^= 1;
        });
        refused(&lazuli, "oci:lazy:x", &words);
        assert!(lazuli.fails(["check", "oci:lazy:x"]).contains(words[1]));
    }
}

#[test]
fn device_slots_in_another_order_are_refused() {
    if !able_to_mount() {
        return;
    }
    // The slots alone: they no longer fit the blob table.
    let (lazuli, forge) = image();
    forge.change_bootstrap(|bootstrap| {
        exchange(bootstrap, DEVICE_SLOTS, DEVICE_SLOTS + 128, 128);
    });
    refused(&lazuli, "oci:lazy:x", &["blob table entry 0", "device tag"]);

    // Slots and blob table are exchanged, with or without the chunk table rows: chunks are read
    // from the other blob.
    let both = |bootstrap: &mut Vec<u8>| {
        exchange(bootstrap, DEVICE_SLOTS, DEVICE_SLOTS + 128, 128);
        let (start, rows) = Tables::of(bootstrap).blobs;
        assert_eq!(rows, 2);
        exchange(bootstrap, start, start + 256, 256);
        // The index in each row is its place.
        exchange(bootstrap, start + 64, start + 256 + 64, 4);
    };
    let (lazuli, forge) = image();
    forge.change_bootstrap(both);
    refused(&lazuli, "oci:lazy:x", &["chunk"]);

    let (lazuli, forge) = image();
    forge.change_bootstrap(|bootstrap| {
        both(bootstrap);
        let (start, rows) = Tables::of(bootstrap).chunks;
        for row in bootstrap[start..start + rows * 80].chunks_exact_mut(80) {
            row[32] ^= 1;
        }
    });
    refused(&lazuli, "oci:lazy:x", &["inode", "chunk"]);
}

#[test]
fn a_chunk_without_a_digest_is_refused() {
    if !able_to_mount() {
        return;
    }
    let (lazuli, forge) = image();
    forge.change_bootstrap(|bootstrap| {
        let start = Tables::of(bootstrap).chunks.0;
        bootstrap[start..start + 32].fill(0);
    });
    refused(&lazuli, "oci:lazy:x", &["chunk table entry 0", "no digest"]);
}

#[test]
fn a_bootstrap_layer_with_another_digest_is_refused() {
    if !able_to_mount() {
        return;
    }
    let (lazuli, forge) = image();
    let layer = forge.bootstrap_layer();
    let good = fs::read(forge.blob_path(&layer)).unwrap();
    // A sound one, but of another image: the same size, or not.
    for change in [0, 1] {
        forge.replace(&layer, |bytes| {
            let at = bytes.len() / 2;
            bytes[at] ^= 1;
            bytes.truncate(bytes.len() - change);
        });
        refused(&lazuli, "oci:lazy:x", &[&layer]);
        fs::write(forge.blob_path(&layer), &good).unwrap();
    }
    mounted(&lazuli, |mountpoint| assert_eq!(readable(mountpoint).len(), 4));
}

/// The files of an image on this node.
fn stored(lazuli: &Lazuli) -> std::path::PathBuf {
    let images = fs::read_dir(lazuli.root().join("images")).unwrap();
    images.map(|image| image.unwrap().path()).next().expect("an image")
}

#[test]
fn changed_files_of_an_image_are_fetched_again() {
    if !able_to_mount() {
        return;
    }
    let (lazuli, _) = image();
    let mountpoint = lazuli.directory("mnt");
    let mount = |driver: &str| {
        lazuli.ok(["mount", "oci:lazy:x", mountpoint.to_str().unwrap(), "--driver", driver]);
    };
    for name in ["bootstrap", "bootstrap.digest", "manifest.json", "config.json"] {
        for driver in DRIVERS {
            mount(driver);
            lazuli.ok(["umount", mountpoint.to_str().unwrap()]);
            lazuli.ok(["stop"]);
            // In the middle of a bootstrap are its inodes.
            replace(&stored(&lazuli).join(name), |bytes| {
                let at = bytes.len() / 2;
                bytes[at] ^= 1;
            });
            let known = lazuli.log().len();
            mount(driver);
            let log = lazuli.log();
            let said = &log[known..];
            let named = if name == "bootstrap.digest" { "bootstrap" } else { name };
            assert!(said.contains("again") && said.contains(named), "{said}");
            assert_eq!(readable(&mountpoint).len(), 4, "{name} was fetched again");
            lazuli.ok(["umount", mountpoint.to_str().unwrap()]);
        }
    }
}

/// The kernel reads a mounted bootstrap by itself, so a mount is given up if its bootstrap changed.
#[test]
fn a_mount_ends_if_its_bootstrap_changed_while_no_daemon_ran() {
    if !able_to_mount() {
        return;
    }
    let (lazuli, _) = image();
    let mountpoint = lazuli.directory("mnt");
    lazuli.ok(["mount", "oci:lazy:x", mountpoint.to_str().unwrap(), "--driver", "fanotify"]);
    let Pids { keeper, worker } = pids(&lazuli.status());
    [keeper, worker].into_iter().filter(|pid| *pid != 0).for_each(kill);
    replace(&stored(&lazuli).join("bootstrap"), |bytes| {
        let at = bytes.len() / 2;
        bytes[at] ^= 1;
    });
    let nothing = lazuli.directory("nothing");
    lazuli.fails(["umount", nothing.to_str().unwrap()]);
    assert_eq!(lazuli.status()["mounts"].as_array().unwrap().len(), 0);
    assert!(lazuli.log().contains("bootstrap: its content is not what was unpacked"));
    assert_eq!(fs::read_dir(&mountpoint).unwrap().count(), 0, "still mounted");
}

#[test]
fn a_manifest_with_another_digest_is_refused() {
    if !able_to_mount() {
        return;
    }
    let registry = FakeRegistry::start().unwrap();
    let (lazuli, _) = image();
    let host = registry.host();
    for tag in ["good", "evil"] {
        if tag == "evil" {
            fs::write(lazuli.path("evil"), odd::random(9, 100_000)).unwrap();
            fs::create_dir(lazuli.path("tree")).unwrap();
            fs::rename(lazuli.path("evil"), lazuli.path("tree/evil")).unwrap();
        }
        let source = if tag == "good" { "oci:source:x" } else { "dir:tree" };
        lazuli.ok(["convert", source, &format!("{host}/app:{tag}")]);
    }
    let evil = registry.manifest("app", "evil").unwrap();
    let good = registry.manifest("app", "good").unwrap();
    let digest = lazuli_image::Algorithm::Sha256.digest(&good);
    let media_type = "application/vnd.oci.image.manifest.v1+json";
    registry.put_manifest("app", &digest.to_string(), media_type, &evil);
    let expected = lazuli_image::Algorithm::Sha256.digest(&evil);
    let words = [&digest.to_string()[..], &expected.to_string(), "manifest"];
    refused(&lazuli, &format!("{host}/app@{digest}"), &words);
    refused(&lazuli, &format!("{host}/app:evil@{digest}"), &words);
}
