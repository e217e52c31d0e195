//! Prefetching: by traces, and the rest of an image. For traces of other nodes see
//! [`crate::nodes`].

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    ops::Range,
    path::{Path, PathBuf},
    process::{Child, Stdio},
    thread,
    time::{Duration, Instant},
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use lazuli_image::{Trace, oci::annotation};
use lazuli_testkit::{
    kernel::{Feature, require},
    odd,
    registry::{FakeRegistry, Fault, Logged, runs},
};
use serde_json::Value;

use crate::lazuli::{Lazuli, corpus};

/// Files of the image; each is one chunk, and they lie one behind the other.
const FILES: usize = 40;

/// Decoded bytes of a file, which do not compress.
const SIZE: usize = 200_000;

/// The reads of starts, in this order: too far apart to be fetched together by chance.
const READ: [usize; 5] = [31, 3, 12, 22, 7];

/// Without neighbours, so that only requested data arrives.
pub(crate) const LEARN: &str = "[fetch]\namplify_bytes = 0\ndeadline_seconds = 20\n\
                     [prefetch]\nrest_bytes_per_second = 0\n";

/// The distance from which a registry counts as far: more than the first answer of a near one
/// takes.
pub(crate) const FAR: Duration = Duration::from_millis(20);

/// A registry with an image, as its name.
fn registry(lazuli: &Lazuli) -> (FakeRegistry, String) {
    let registry = FakeRegistry::start().unwrap();
    fill(&lazuli.directory("source"), FILES, SIZE);
    let image = format!("{}/app:1", registry.host());
    lazuli.ok(["convert", "dir:source", &image]);
    registry.reset_stats();
    (registry, image)
}

/// Fills a directory with `files` files of `size` bytes.
pub(crate) fn fill(directory: &Path, files: usize, size: usize) {
    for number in 0..files {
        fs::write(directory.join(name(number)), odd::random(number as u64, size)).unwrap();
    }
}

fn name(number: usize) -> String {
    format!("file-{number:02}")
}

/// A node with this configuration, and a place for mounts.
fn node(config: &str) -> (Lazuli, PathBuf) {
    let lazuli = Lazuli::new();
    lazuli.configure_all(config);
    let mountpoint = lazuli.directory("mnt");
    (lazuli, mountpoint)
}

fn mount(lazuli: &Lazuli, image: &str) {
    lazuli.ok(["mount", image, lazuli.path("mnt").to_str().unwrap()]);
}

/// The same, without waiting for it.
pub(crate) fn mounting(lazuli: &Lazuli, image: &str) -> Child {
    let mut mount = lazuli.command(["mount", image, lazuli.path("mnt").to_str().unwrap()]);
    mount.stdout(Stdio::null()).spawn().unwrap()
}

fn umount(lazuli: &Lazuli) {
    lazuli.ok(["umount", lazuli.path("mnt").to_str().unwrap()]);
}

/// Reads a file of `size` bytes that [`fill`] wrote.
pub(crate) fn read(lazuli: &Lazuli, number: usize, size: usize) {
    let content = fs::read(lazuli.path("mnt").join(name(number))).unwrap();
    assert!(content == odd::random(number as u64, size), "file {number} has wrong bytes");
}

/// Waits until `condition` holds.
#[track_caller]
pub(crate) fn wait(what: &str, condition: impl Fn() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < Duration::from_secs(30), "{what}: not within 30 s");
        thread::sleep(Duration::from_millis(20));
    }
}

fn chunks_ready(lazuli: &Lazuli) -> u64 {
    lazuli.mount_status(&lazuli.path("mnt"))["chunks_ready"].as_u64().unwrap()
}

/// The number of ready chunks, once none has arrived for two seconds.
fn settled(lazuli: &Lazuli) -> u64 {
    let mut ready = chunks_ready(lazuli);
    loop {
        thread::sleep(Duration::from_secs(2));
        match chunks_ready(lazuli) {
            same if same == ready => return ready,
            more => ready = more,
        }
    }
}

/// Deletes everything but traces and lessons.
pub(crate) fn forget(lazuli: &Lazuli) {
    lazuli.ok(["stop"]);
    fs::remove_dir_all(lazuli.root().join("cache")).unwrap();
    fs::remove_dir_all(lazuli.root().join("images")).unwrap();
}

/// `trace show --json`.
fn trace(lazuli: &Lazuli, image: &str) -> Value {
    serde_json::from_str(&lazuli.ok(["trace", "show", image, "--json"])).unwrap()
}

fn files(trace: &Value) -> Vec<String> {
    let touches = trace["touches"].as_array().unwrap();
    touches.iter().map(|touch| touch["files"][0].as_str().unwrap().to_owned()).collect()
}

fn needs() -> bool {
    require(Feature::Root) && require(Feature::Fanotify) && require(Feature::ErofsFileBacked)
}

/// A first start, whose trace is kept.
fn teach(lazuli: &Lazuli, image: &str) {
    teach_reading(lazuli, image, || READ.into_iter().for_each(|number| read(lazuli, number, SIZE)));
}

pub(crate) fn teach_reading(lazuli: &Lazuli, image: &str, read: impl FnOnce()) {
    mount(lazuli, image);
    read();
    umount(lazuli);
    let traces = lazuli.root().join("traces");
    let is_whole = |entry: fs::DirEntry| entry.path().extension().is_none();
    wait("a trace", || {
        fs::read_dir(&traces).is_ok_and(|mut all| all.any(|e| e.is_ok_and(is_whole)))
    });
}

/// The blob with the files' chunks, and the layer with the bootstrap.
fn layers(registry: &FakeRegistry) -> [String; 2] {
    let manifest: Value = serde_json::from_slice(&registry.manifest("app", "1").unwrap()).unwrap();
    [0, 1].map(|layer| manifest["layers"][layer]["digest"].as_str().unwrap().to_owned())
}

#[test]
fn a_traced_start_is_fetched_with_the_metadata() {
    if !needs() {
        return;
    }
    let (lazuli, _) = node(LEARN);
    let (registry, image) = registry(&lazuli);
    teach(&lazuli, &image);
    forget(&lazuli);
    registry.reset_stats();
    registry.set_latency(FAR);
    let [data, bootstrap] = layers(&registry);
    registry.fault("GET", &bootstrap, 1, Fault::Latency(Duration::from_secs(2)));
    let mut mount = mounting(&lazuli, &image);
    let asked = || {
        let log = registry.log();
        let data: Vec<_> = log.into_iter().filter(|it| it.target.contains(&data)).collect();
        runs(&data)
    };
    let bytes = || asked().iter().map(|(_, run)| run.end - run.start).sum::<u64>();
    wait("what was learned", || bytes() == (READ.len() * SIZE) as u64);
    assert!(mount.try_wait().unwrap().is_none(), "the bootstrap was not waited for");
    assert!(mount.wait().unwrap().success());
    wait("chunks", || chunks_ready(&lazuli) == READ.len() as u64);
    let before = registry.stats().requests;
    READ.into_iter().for_each(|number| read(&lazuli, number, SIZE));
    assert_eq!(registry.stats().requests, before, "nothing was asked for twice");
    umount(&lazuli);
}

#[test]
fn what_the_converter_guessed_is_fetched_with_the_metadata() {
    let Some(redis) = corpus("redis").filter(|_| needs()) else { return };
    let (lazuli, mountpoint) = node(LEARN);
    let registry = FakeRegistry::start().unwrap();
    let image = format!("{}/app:1", registry.host());
    let convert = || lazuli.ok(["convert", &format!("oci:{}:latest", redis.display()), &image]);
    convert();
    let manifest: Value = serde_json::from_slice(&registry.manifest("app", "1").unwrap()).unwrap();
    let layers = manifest["layers"].as_array().unwrap();
    let bootstrap = layers.last().unwrap();
    let guessed = guessed(&manifest);
    let expected: u64 = guessed.values().sum();
    assert!((1 << 20..16 << 20).contains(&expected), "{expected} bytes are guessed");
    // From the blobs that the target has by now, the same is guessed.
    convert();
    let again: Value = serde_json::from_slice(&registry.manifest("app", "1").unwrap()).unwrap();
    assert_eq!(again, manifest);
    registry.reset_stats();
    registry.set_latency(FAR);
    let digest = bootstrap["digest"].as_str().unwrap();
    registry.fault("GET", digest, 1, Fault::Latency(Duration::from_secs(2)));
    let mut mount = mounting(&lazuli, &image);
    let asked = || guessed.keys().map(|blob| asked(&registry, blob)).sum::<u64>();
    wait("what was guessed", || asked() == expected);
    assert!(mount.try_wait().unwrap().is_none(), "the bootstrap was not waited for");
    assert!(mount.wait().unwrap().success());
    settled(&lazuli);
    let before = registry.stats().requests;
    let server = fs::read(mountpoint.join("usr/bin/redis-server")).unwrap();
    assert!(server.starts_with(b"\x7fELF"));
    assert_eq!(registry.stats().requests, before, "it had arrived");
    umount(&lazuli);
}

/// Stored bytes of each blob or layer, by digest, in the spans of the noted guess.
pub(crate) fn guessed(manifest: &Value) -> BTreeMap<String, u64> {
    let noted = manifest["annotations"][annotation::GUESS].as_str().unwrap();
    let mut bytes = BTreeMap::new();
    for (blob, range) in Trace::decode(&STANDARD.decode(noted).unwrap()).unwrap().spans() {
        *bytes.entry(blob.to_string()).or_default() += range.end.0 - range.start.0;
    }
    bytes
}

/// Bytes of a blob that were asked for.
pub(crate) fn asked(registry: &FakeRegistry, digest: &str) -> u64 {
    let log = registry.log();
    let of_blob: Vec<_> = log.into_iter().filter(|it| it.target.contains(digest)).collect();
    runs(&of_blob).iter().map(|(_, run)| run.end - run.start).sum()
}

#[test]
fn all_that_a_manifest_guesses_is_fetched_within_the_limit() {
    if !needs() {
        return;
    }
    // Of 200 kB each, ten files fit.
    for (limit, expected) in [(0, FILES as u64), (2_000_000, 10)] {
        let (lazuli, _) = node(&format!("{LEARN}escalate_bytes = {limit}\n"));
        let (registry, image) = registry(&lazuli);
        let mut manifest: Value =
            serde_json::from_slice(&registry.manifest("app", "1").unwrap()).unwrap();
        assert!(manifest["annotations"][annotation::GUESS].is_null(), "it runs nothing");
        let blob = manifest["layers"][0]["digest"].as_str().unwrap().parse().unwrap();
        // Without places, nothing is asked for before the bootstrap is here.
        let guess = Trace::of_start(vec![blob], (0..FILES as u32).map(|number| (0, number, 0)));
        manifest["annotations"][annotation::GUESS] = STANDARD.encode(guess.encode()).into();
        let media_type = manifest["mediaType"].as_str().unwrap().to_owned();
        registry.put_manifest("app", "1", &media_type, manifest.to_string().as_bytes());
        mount(&lazuli, &image);
        wait("what is guessed", || chunks_ready(&lazuli) >= expected);
        assert_eq!(settled(&lazuli), expected, "{limit}");
        umount(&lazuli);
    }
}

#[test]
fn what_the_indexer_guessed_is_fetched_at_once() {
    let Some(redis) = corpus("redis").filter(|_| needs()) else { return };
    let trust = format!("{LEARN}[index]\ntrust = \"repository\"\n");
    let (lazuli, _) = node(&trust);
    let registry = FakeRegistry::start().unwrap();
    let image = format!("{}/app:1", registry.host());
    lazuli.ok(["copy", &format!("oci:{}:latest", redis.display()), &image]);
    let index = || {
        let printed = lazuli.ok(["index", &image]);
        let digest = printed.split_whitespace().find(|word| word.starts_with("sha256:"));
        registry.manifest("app", digest.unwrap()).unwrap()
    };
    let first = index();
    assert_eq!(index(), first);
    let index: Value = serde_json::from_slice(&first).unwrap();
    let guessed = guessed(&index);
    let expected: u64 = guessed.values().sum();
    assert!((1 << 20..16 << 20).contains(&expected), "{expected} bytes are guessed");
    registry.reset_stats();
    // Nothing of the layers arrives from which more could be guessed.
    for layer in guessed.keys() {
        registry.fault("GET", layer, 1000, Fault::Latency(Duration::from_secs(60)));
    }
    mount(&lazuli, &image);
    // What hangs is asked for again.
    let asked = |layer: &String| {
        let log = registry.log();
        let of_layer = log.iter().filter(|it| it.target.contains(layer));
        let mut ranges: Vec<_> = of_layer.filter_map(Logged::bytes).collect();
        ranges.sort_by_key(|range| (range.start, range.end));
        let mut end = 0;
        let new = |range: &Range<u64>| {
            let new = range.end.saturating_sub(end.max(range.start));
            end = end.max(range.end);
            new
        };
        ranges.iter().map(new).sum::<u64>()
    };
    let all = || guessed.keys().map(asked).sum::<u64>();
    wait("what was guessed", || all() >= expected / 2);
    umount(&lazuli);
}

#[test]
fn a_near_registry_is_asked_for_the_metadata_first() {
    if !needs() {
        return;
    }
    let (lazuli, _) = node(LEARN);
    let (registry, image) = registry(&lazuli);
    teach(&lazuli, &image);
    let [data, bootstrap] = layers(&registry);
    // On a busy machine it does not answer like a near one every time.
    let metadata_first = |_| {
        forget(&lazuli);
        registry.reset_stats();
        registry.fault("GET", &bootstrap, 1, Fault::Latency(Duration::from_secs(1)));
        let mut mount = mounting(&lazuli, &image);
        let asked = |part: &str| registry.log().iter().any(|it| it.target.contains(part));
        wait("a question for the bootstrap", || asked(&bootstrap));
        thread::sleep(Duration::from_millis(500));
        let is_alone = !asked(&data);
        assert!(mount.wait().unwrap().success());
        wait("chunks", || chunks_ready(&lazuli) == READ.len() as u64);
        umount(&lazuli);
        is_alone
    };
    assert!((0..5).any(metadata_first));
}

#[test]
fn baked_chunks_do_not_wait_for_the_registrys_trace() {
    if !needs() {
        return;
    }
    let (lazuli, _) = node(LEARN);
    let (registry, image) = registry(&lazuli);
    teach(&lazuli, &image);
    let optimized = format!("{}/app:optimized", registry.host());
    lazuli.ok(["optimize", &image, &optimized]);
    forget(&lazuli);
    fs::remove_dir_all(lazuli.root().join("traces")).unwrap();
    registry.reset_stats();
    registry.set_latency(FAR);
    registry.fault("GET", "/referrers/", 1, Fault::Latency(Duration::from_secs(20)));
    mount(&lazuli, &optimized);
    READ.into_iter().for_each(|number| read(&lazuli, number, SIZE));
    let asked = runs(&registry.log());
    let longest = asked.iter().map(|(_, run)| run.end - run.start).max();
    assert_eq!(longest, Some((READ.len() * SIZE) as u64), "all of the hot blob, once: {asked:?}");
    umount(&lazuli);
}

#[test]
fn the_first_chunks_do_not_wait_for_larger_ones() {
    if !needs() {
        return;
    }
    let (lazuli, mountpoint) = node(LEARN);
    let registry = FakeRegistry::start().unwrap();
    // Asked for in one request, since they lie side by side.
    let [little, much] = [("little", 1000), ("much", 50_000)];
    let source = lazuli.directory("source");
    let content = |(_, size): (&str, usize)| odd::random(size as u64, size);
    [little, much].into_iter().for_each(|it| fs::write(source.join(it.0), content(it)).unwrap());
    let image = format!("{}/app:1", registry.host());
    lazuli.ok(["convert", "dir:source", &image]);
    let read = |it: (&str, usize)| assert!(fs::read(mountpoint.join(it.0)).unwrap() == content(it));
    teach_reading(&lazuli, &image, || [little, much].into_iter().for_each(read));
    forget(&lazuli);
    registry.reset_stats();
    let [data, _] = layers(&registry);
    registry.set_latency(FAR);
    registry.fault("GET", &data, 1, Fault::Latency(Duration::from_secs(4)));
    let begun = Instant::now();
    mount(&lazuli, &image);
    read(little);
    assert!(begun.elapsed() < Duration::from_secs(3), "waited for all: {:?}", begun.elapsed());
    read(much);
    let asked = registry.log().into_iter().filter(|it| it.target.contains(&data));
    let asked: Vec<_> = asked.map(|it| it.bytes().map(|bytes| bytes.end - bytes.start)).collect();
    assert_eq!(asked, [Some(51_000), Some(1000)]);
    umount(&lazuli);
}

#[test]
fn wrong_bytes_that_came_early_are_fetched_again() {
    if !needs() {
        return;
    }
    let (lazuli, _) = node(LEARN);
    let (registry, image) = registry(&lazuli);
    teach(&lazuli, &image);
    registry.set_latency(FAR);
    for fault in [Fault::WrongBytes, Fault::Status(503)] {
        forget(&lazuli);
        let [data, _] = layers(&registry);
        registry.fault("GET", &data, 2, fault);
        mount(&lazuli, &image);
        READ.into_iter().for_each(|number| read(&lazuli, number, SIZE));
        umount(&lazuli);
    }
}

#[test]
fn the_second_start_uses_the_trace_of_the_first() {
    if !needs() {
        return;
    }
    let (lazuli, _) = node(LEARN);
    let (registry, image) = registry(&lazuli);
    registry.set_latency(FAR);
    teach(&lazuli, &image);
    assert!(registry.stats().pings > 0, "connections were opened ahead");
    let shown = trace(&lazuli, &image);
    let expected: Vec<_> = READ.iter().map(|number| format!("/{}", name(*number))).collect();
    assert_eq!((files(&shown), &shown["starts"]), (expected, &1.into()));
    forget(&lazuli);
    registry.reset_stats();
    mount(&lazuli, &image);
    wait("what was learned", || chunks_ready(&lazuli) == READ.len() as u64);
    let before = registry.stats().requests;
    READ.into_iter().for_each(|number| read(&lazuli, number, SIZE));
    assert_eq!(registry.stats().requests, before, "no reader had to wait");
    // Another start reads something else as well: both are known afterwards.
    read(&lazuli, 17, SIZE);
    umount(&lazuli);
    wait("both starts", || trace(&lazuli, &image)["starts"] == 2);
    let both: BTreeSet<_> = files(&trace(&lazuli, &image)).into_iter().collect();
    assert_eq!(both.len(), READ.len() + 1);
    assert!(both.contains("/file-17"));
}

#[test]
fn a_trace_that_does_not_fit_changes_nothing() {
    if !needs() {
        return;
    }
    let (lazuli, _) = node(LEARN);
    let (registry, image) = registry(&lazuli);
    teach(&lazuli, &image);
    let kept = fs::read_dir(lazuli.root().join("traces")).unwrap().next().unwrap().unwrap().path();
    let (manifest, good) = (kept.file_name().unwrap().to_owned(), fs::read(&kept).unwrap());
    forget(&lazuli);
    // Of another blob; cut off in the middle of a digest; not a trace at all.
    let mut other = good.clone();
    other[20] ^= 1;
    for bytes in [other, good[..30].to_vec(), b"nonsense".to_vec()] {
        fs::write(lazuli.root().join("traces").join(&manifest), bytes).unwrap();
        registry.reset_stats();
        mount(&lazuli, &image);
        read(&lazuli, 5, SIZE);
        assert_eq!(chunks_ready(&lazuli), 1);
        umount(&lazuli);
        forget(&lazuli);
    }
}

#[test]
fn record_and_nothing_use_no_trace() {
    if !needs() {
        return;
    }
    let (lazuli, _) = node("");
    lazuli.configure("[fetch]\namplify_bytes = 0\n");
    let (registry, image) = registry(&lazuli);
    mount(&lazuli, &image);
    READ.into_iter().for_each(|number| read(&lazuli, number, SIZE));
    umount(&lazuli);
    assert!(!lazuli.root().join("traces").exists());
    assert!(!registry.log().iter().any(|entry| entry.target.contains("/referrers/")));
    let error = lazuli.fails(["trace", "show", &image]);
    assert!(error.contains("no start of"), "{error}");
}

#[test]
fn the_rest_is_fetched_after_the_start() {
    if !needs() {
        return;
    }
    let config = "[prefetch]\nahead = \"nothing\"\nrest_bytes_per_second = 1000000\n";
    let (lazuli, _) = node(config);
    let (registry, image) = registry(&lazuli);
    let begun = Instant::now();
    mount(&lazuli, &image);
    read(&lazuli, 1, SIZE);
    lazuli.kill(lazuli.worker());
    let status = || lazuli.mount_status(&lazuli.path("mnt"));
    wait("a forecast", || {
        let (status, passed) = (status(), begun.elapsed().as_secs());
        let forecast = status["complete_in_seconds"].as_u64().filter(|seconds| *seconds > 0);
        let missing = status["bytes_missing"].as_u64().unwrap();
        assert!(missing > 0 || passed >= 5, "{status}");
        // At 1 MB/s.
        forecast.is_some_and(|seconds| seconds.abs_diff(missing / 1_000_000) <= 2)
    });
    wait("everything", || chunks_ready(&lazuli) == FILES as u64);
    assert_eq!(status()["bytes_missing"], 0);
    assert_eq!(status()["complete_in_seconds"], 0);
    // 8 MB, of which a part came with the first read, at 1 MB/s.
    assert!(begun.elapsed() > Duration::from_secs(5), "{:?} is not polite", begun.elapsed());
    registry.go_away();
    (0..FILES).for_each(|number| read(&lazuli, number, SIZE));
}

/// An unforeseen miss fetches its neighbourhood, within the budget of the start.
#[test]
fn an_unforeseen_miss_fetches_its_neighbourhood() {
    if !needs() {
        return;
    }
    let (lazuli, _) = node(&format!("{LEARN}escalate_bytes = 500000\n"));
    let (registry, image) = registry(&lazuli);
    registry.set_latency(FAR);
    mount(&lazuli, &image);
    read(&lazuli, 20, SIZE);
    // Two files beside the one that was read, with a budget of 500 kB.
    wait("the neighbourhood", || chunks_ready(&lazuli) == 3);
    for number in [21, 22] {
        read(&lazuli, number, SIZE);
    }
    assert_eq!(chunks_ready(&lazuli), 3);
    // None with the remaining 100 kB.
    read(&lazuli, 3, SIZE);
    thread::sleep(Duration::from_millis(200));
    assert_eq!(chunks_ready(&lazuli), 4, "its bytes are spent");
}

/// With `rest_bytes_per_second = 0`, escalation is off by default.
#[test]
fn misses_do_not_escalate_where_the_rest_is_not_wanted() {
    if !needs() {
        return;
    }
    let (lazuli, _) = node(LEARN);
    let (_registry, image) = registry(&lazuli);
    mount(&lazuli, &image);
    read(&lazuli, 20, SIZE);
    thread::sleep(Duration::from_millis(200));
    assert_eq!(chunks_ready(&lazuli), 1);
}

/// A start that keeps missing soon has the whole image.
#[test]
fn repeated_misses_fetch_the_whole_image() {
    if !needs() {
        return;
    }
    let (lazuli, _) = node(&format!("{LEARN}escalate_bytes = 100000000\n"));
    let (registry, image) = registry(&lazuli);
    registry.set_latency(FAR);
    mount(&lazuli, &image);
    read(&lazuli, 20, SIZE);
    wait("a part of it", || chunks_ready(&lazuli) > 2);
    let before = chunks_ready(&lazuli);
    read(&lazuli, 39, SIZE);
    read(&lazuli, 0, SIZE);
    wait("more of it", || chunks_ready(&lazuli) > before + 4);
}

#[test]
fn escalation_stops_at_a_busy_registry() {
    if !needs() {
        return;
    }
    let (lazuli, _) = node(&format!("{LEARN}escalate_bytes = 100000000\n"));
    let (registry, image) = registry(&lazuli);
    registry.set_latency(FAR);
    mount(&lazuli, &image);
    read(&lazuli, 20, SIZE);
    // Of 512 KiB two files of 200 kB.
    wait("what the first miss buys", || chunks_ready(&lazuli) == 3);
    registry.fault("GET", "/blobs/", 1, Fault::Busy(429, 1));
    read(&lazuli, 39, SIZE);
    let before = settled(&lazuli);
    read(&lazuli, 0, SIZE);
    let after = settled(&lazuli);
    assert!(after <= before + 1, "{before} chunks were ready, and {after} after one read");
}

#[test]
fn a_requested_prefetch_survives_deaths() {
    if !needs() {
        return;
    }
    let (lazuli, _) = node(LEARN);
    let (registry, image) = registry(&lazuli);
    registry.set_latency(Duration::from_millis(20));
    let mut wait = lazuli.command(["prefetch", "--wait", &image]).spawn().unwrap();
    let total = FILES * SIZE;
    self::wait("a part of it", || registry.stats().bytes > total as u64 / 10);
    lazuli.kill(lazuli.worker());
    assert!(wait.wait().unwrap().success());
    registry.set_latency(Duration::ZERO);
    mount(&lazuli, &image);
    registry.go_away();
    (0..FILES).for_each(|number| read(&lazuli, number, SIZE));
    registry.come_back();
    // Everything is cached, so only the name is resolved.
    registry.reset_stats();
    let said = lazuli.ok(["prefetch", "--wait", &image]);
    assert!(said.contains("is here"), "{said}");
    assert_eq!(registry.stats().requests, 1);
}

#[test]
fn a_failed_prefetch_is_named() {
    if !needs() {
        return;
    }
    let (lazuli, _) =
        node("[fetch]\ndeadline_seconds = 1\n[prefetch]\nrest_bytes_per_second = 0\n");
    let (registry, image) = registry(&lazuli);
    mount(&lazuli, &image);
    registry.fault("GET", "/blobs/", usize::MAX, lazuli_testkit::registry::Fault::Status(503));
    let error = lazuli.fails(["prefetch", "--wait", &image]);
    assert!(error.contains("cannot fetch all of") && error.contains("503"), "{error}");
    let missing = format!("{}/app:2", registry.host());
    let error = lazuli.fails(["prefetch", "--wait", &missing]);
    assert!(error.contains("app:2"), "{error}");
}

#[test]
fn a_node_is_preloaded_when_it_starts() {
    if !needs() {
        return;
    }
    let (lazuli, _) = node("");
    let (registry, image) = registry(&lazuli);
    lazuli.configure_all(&format!("[prefetch]\nimages = [\"{image}\"]\n"));
    registry.refuse_for(Duration::from_millis(300));
    // Starts the daemon.
    let other = lazuli.directory("empty");
    lazuli.ok(["convert", &format!("dir:{}", other.display()), "oci:empty"]);
    lazuli.ok(["mount", "oci:empty", lazuli.directory("elsewhere").to_str().unwrap()]);
    wait("the image", || lazuli.log().contains("preloaded"));
    mount(&lazuli, &image);
    registry.go_away();
    (0..FILES).for_each(|number| read(&lazuli, number, SIZE));
}
