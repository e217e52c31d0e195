//! Images that are damaged somewhere: found or harmless, without a panic, a hang or much memory.

use std::{
    fs,
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use lazuli_image::rafs::Bootstrap;
use lazuli_testkit::{
    content::Choices,
    mutation::mutate,
    oci::{Compression, Image, Layer},
    odd,
    tarball::{self, Entry},
};
use serde_json::{Value, json};

use super::{
    alone,
    forge::{Forge, replace},
    image::built,
    processes::pids,
    report, soak,
};
use crate::{drivers::able, lazuli::Lazuli};

/// Address space of the process that reads damaged images, in KiB.
const ADDRESS_SPACE: u64 = 1 << 20;
/// Memory that it may ever have used on top of the image itself, in KiB.
const MEMORY: u64 = 64 << 10;
/// How long a reader of wrong bytes waits, in seconds.
const DEADLINE: u64 = 2;
/// Time limit for one image, in ms: a hundred times that of a sound one.
const TIME: u64 = 2000;

/// Files of every size up to some chunks, and one file of each other type.
fn files() -> Vec<(String, Vec<u8>)> {
    let mut files = vec![
        ("empty".to_owned(), Vec::new()),
        ("chunks".to_owned(), odd::text((1 << 20) + 300_000)),
        ("noise".to_owned(), odd::random(5, 70_000)),
    ];
    files.extend((0..40).map(|index| {
        let content =
            if index % 2 == 0 { odd::text(97 * index) } else { odd::random(7, 53 * index) };
        (format!("dir/{index}"), content)
    }));
    files
}

/// The image in a layout, `lazy:x`.
fn image(lazuli: &Lazuli) -> Forge {
    let mut entries = vec![Entry::directory("dir")];
    entries.extend(files().into_iter().map(|(name, content)| Entry::file(name, content)));
    let (lower, upper) = entries.split_at(20);
    let layers =
        [lower, upper].map(|entries| Layer::new(tarball::write(entries), Compression::None));
    Image::new(layers).write_layout(&lazuli.path("source"), "x").unwrap();
    lazuli.ok(["convert", "oci:source:x", "oci:lazy:x"]);
    Forge::new(lazuli.path("lazy"))
}

#[test]
fn damage_is_found_or_harmless() {
    let lazuli = Lazuli::new();
    let forge = image(&lazuli);
    let parts = lazuli.directory("parts");
    fs::write(parts.join("bootstrap"), forge.bootstrap()).unwrap();
    for blob in Bootstrap::open(&forge.bootstrap()[..]).unwrap().blobs() {
        fs::copy(forge.blob_path(&blob.id.to_string()), parts.join(blob.id.hex())).unwrap();
    }
    let count = if soak() { "10000" } else { "600" };
    let mut limited = Command::new("sh");
    limited.args(["-c", &format!(r#"ulimit -v {ADDRESS_SPACE}; exec "$@""#), "sh"]);
    let output = limited.arg(built("mutate")).arg(&parts).args(["1", count]).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {error}", output.status);
    let figures: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(figures["problems"], json!([]), "{figures:#}");
    assert!(figures["longest_ms"].as_u64().unwrap() < TIME, "{figures:#}");
    assert!(figures["peak_rss_growth_kib"].as_u64().unwrap() < MEMORY, "{figures:#}");
    report("mutations", &figures);
}

/// With the daemon: it mounts the images that it does not refuse, and survives.
#[test]
fn the_daemon_survives_damaged_images() {
    if !able("fanotify") || !able("fuse") {
        return;
    }
    let _alone = alone();
    let count = if soak() { 300 } else { 30 };
    let mut choices = Choices::new(2);
    let (mut refused, mut errors, mut equal) = (0, 0, 0);
    let (mut longest, mut longest_read) = (Duration::ZERO, Duration::ZERO);
    let lazuli = Lazuli::new();
    // Readers of wrong bytes wait until the deadline, file by file.
    lazuli.configure(&format!("[fetch]\ndeadline_seconds = {DEADLINE}\n"));
    image(&lazuli);
    fs::rename(lazuli.path("lazy"), lazuli.path("sound")).unwrap();
    let mountpoint = lazuli.directory("mnt");
    for number in 0..count {
        copy(&lazuli.path("sound"), &lazuli.path("lazy"));
        let forge = Forge::new(lazuli.path("lazy"));
        let target = ["bootstrap", "meta", "blob"][number % 3];
        damage(&forge, target, &mut choices);
        // The kernel never gets a bootstrap that its digests do not vouch for; FUSE reads it
        // itself.
        let driver = if target != "bootstrap" && number % 2 == 0 { "fanotify" } else { "fuse" };
        let began = Instant::now();
        let arguments = ["mount", "oci:lazy:x", mountpoint.to_str().unwrap(), "--driver", driver];
        if lazuli.output(arguments).status.success() {
            let before = pids(&lazuli.status());
            let (wrong, read) = read_all(&mountpoint, target == "bootstrap");
            longest_read = longest_read.max(read);
            if wrong {
                errors += 1
            } else {
                equal += 1
            }
            assert_eq!(pids(&lazuli.status()), before, "{target}");
            lazuli.ok(["umount", mountpoint.to_str().unwrap()]);
        } else {
            refused += 1;
        }
        longest = longest.max(began.elapsed());
        assert!(!lazuli.log().contains("panicked"), "{target}");
        lazuli.ok(["stop"]);
        for directory in ["lazy", "root/cache", "root/images"] {
            let _ = fs::remove_dir_all(lazuli.path(directory));
        }
    }
    let figures = json!({
        "mutations": count,
        "not_mounted": refused,
        "readers_got_errors_or_another_image": errors,
        "equal": equal,
        "longest_ms": longest.as_millis() as u64,
        "longest_read_ms": longest_read.as_millis() as u64,
    });
    // More than one chunk of a file may be wrong, and a busy machine adds to it.
    assert!(longest_read < Duration::from_secs(5 * DEADLINE), "{figures:#}");
    report("mutations-mounted", &figures);
}

fn damage(forge: &Forge, target: &str, choices: &mut Choices) {
    match target {
        "bootstrap" => forge.change_bootstrap(|bytes| {
            mutate(bytes, choices);
        }),
        "meta" => forge.change_members(|members| {
            let metas: Vec<_> =
                members.iter_mut().filter(|(name, _)| name.ends_with(".blob.meta")).collect();
            let which = choices.below(metas.len() as u64) as usize;
            mutate(&mut metas.into_iter().nth(which).unwrap().1, choices);
        }),
        _ => {
            let bootstrap = forge.bootstrap();
            let bootstrap = Bootstrap::open(&bootstrap[..]).unwrap();
            let which = choices.below(bootstrap.blobs().len() as u64) as usize;
            let id = bootstrap.blobs()[which].id.to_string();
            replace(&forge.blob_path(&id), |bytes| {
                mutate(bytes, choices);
            });
        }
    }
}

/// Reads every file of the image. Returns whether anything was not as in the sound image, and how
/// long it took to read the slowest file; wrong bytes in a file fail the test unless the bootstrap
/// itself may describe others.
fn read_all(mountpoint: &Path, another_image: bool) -> (bool, Duration) {
    let (mut differs, mut longest) = (false, Duration::ZERO);
    for (name, content) in files() {
        let began = Instant::now();
        let read = fs::read(mountpoint.join(&name));
        longest = longest.max(began.elapsed());
        match read {
            Ok(bytes) if bytes == content => {}
            Err(error) if another_image || error.raw_os_error() == Some(5) => differs = true,
            Ok(_) if another_image => differs = true,
            Ok(_) => panic!("{name} has wrong bytes"),
            Err(error) => panic!("{name}: {error}"),
        }
    }
    (differs, longest)
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let to = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &to);
        } else {
            fs::copy(entry.path(), to).unwrap();
        }
    }
}
