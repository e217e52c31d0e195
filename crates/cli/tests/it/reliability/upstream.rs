//! The same load on upstream's nydusd when it is killed, for comparison: only the image is made by
//! Lazuli.

use std::{
    collections::BTreeMap,
    fs,
    io::Read as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use lazuli_image::Digest;
use lazuli_testkit::reading::now;
use serde_json::{Value, json};

use super::{
    alone,
    image::ColdImage,
    processes::kill,
    readers::{Readers, Seen},
    report,
    round::{load, pause},
    soak,
};
use crate::{drivers::able, lazuli::Lazuli};

/// nydusd in the directory that `LAZULI_NYDUS` names.
fn program() -> PathBuf {
    let directory = std::env::var_os("LAZULI_NYDUS").expect("LAZULI_NYDUS names a directory");
    PathBuf::from(directory).join("nydusd")
}

/// The bootstrap of the shared image, as a file.
fn bootstrap(lazuli: &Lazuli) -> PathBuf {
    let image = ColdImage::shared();
    let manifest = image.registry.manifest("cold", "latest").unwrap();
    let manifest: Value = serde_json::from_slice(&manifest).unwrap();
    let layer = manifest["layers"].as_array().unwrap().last().unwrap()["digest"].as_str().unwrap();
    let layer = image.registry.blob("cold", &layer.parse::<Digest>().unwrap()).unwrap();
    let mut archive = tar::Archive::new(zstd::Decoder::new(&layer[..]).unwrap());
    let mut entries = archive.entries().unwrap().map(Result::unwrap);
    let mut entry = entries.find(|entry| entry.path().unwrap().ends_with("image.boot")).unwrap();
    let mut bytes = Vec::new();
    entry.read_to_end(&mut bytes).unwrap();
    fs::write(lazuli.path("bootstrap"), bytes).unwrap();
    lazuli.path("bootstrap")
}

/// A mount by nydusd. Dropping it removes the mount and its remains.
struct Mount<'a> {
    child: Child,
    mountpoint: &'a Path,
}

impl<'a> Mount<'a> {
    fn new(program: &Path, config: &Path, bootstrap: &Path, mountpoint: &'a Path) -> Self {
        let mut command = Command::new(program);
        command.arg("--config").arg(config).arg("--bootstrap").arg(bootstrap);
        command.arg("--mountpoint").arg(mountpoint);
        // Raising the limit needs a right that root does not always have.
        command.args(["--log-level", "error", "--rlimit-nofile", "0"]);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let began = Instant::now();
        let name = mountpoint.to_str().unwrap();
        while !fs::read_to_string("/proc/self/mountinfo").unwrap().contains(name) {
            let ended = child.try_wait().unwrap();
            assert!(ended.is_none(), "nydusd ended: {ended:?}");
            assert!(began.elapsed() < Duration::from_secs(30), "nydusd does not mount");
            thread::sleep(Duration::from_millis(10));
        }
        Mount { child, mountpoint }
    }
}

impl Drop for Mount<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = Command::new("umount").arg("-l").arg(self.mountpoint).status();
    }
}

#[test]
#[ignore = "needs LAZULI_NYDUS, a directory with nydusd"]
fn readers_of_nydusd_when_it_dies() {
    if !able("fuse") {
        return;
    }
    let program = program();
    let _alone = alone();
    let lazuli = Lazuli::new();
    let bootstrap = bootstrap(&lazuli);
    let mountpoint = lazuli.directory("mnt");
    let config = lazuli.path("nydusd.json");
    let (mut before, mut after) = (Seen::default(), Seen::default());
    let count = if soak() { 100 } else { 3 };
    for number in 0..count {
        let cache = lazuli.directory(&format!("cache-{number}"));
        let backend = json!({
            "scheme": "http", "host": ColdImage::shared().registry.host(), "repo": "cold",
        });
        let text = json!({
            "version": 2,
            "id": "reliability",
            "backend": { "type": "registry", "registry": backend },
            "cache": { "type": "filecache", "validate": true, "filecache": { "work_dir": cache } },
            "rafs": { "mode": "direct", "enable_xattr": true },
        });
        fs::write(&config, text.to_string()).unwrap();
        let mount = Mount::new(&program, &config, &bootstrap, &mountpoint);
        let readers = Readers::start(load(&mountpoint, number as u64 * 100));
        thread::sleep(Duration::from_millis(100));
        pause(number);
        let at = now();
        kill(mount.child.id());
        thread::sleep(Duration::from_millis(200));
        let seen = readers.stop();
        let ended = |access: &lazuli_testkit::reading::Access| access.ended < at;
        before
            .errors
            .extend(seen.errors.iter().filter(|(a, _)| a.as_ref().is_some_and(ended)).cloned());
        after.add(seen);
        drop(mount);
        fs::remove_dir_all(cache).unwrap();
    }
    assert!(before.errors.is_empty(), "nydusd did not serve before it was killed: {before:?}");
    let mut kinds: BTreeMap<&str, u64> = BTreeMap::new();
    for (_, error) in &after.errors {
        *kinds.entry(error).or_default() += 1;
    }
    let version = Command::new(&program).arg("--version").output().unwrap().stdout;
    let version = String::from_utf8_lossy(&version);
    let figures = json!({
        "version": version.lines().next(),
        "blows": count,
        "accesses": after.accesses,
        "bytes_checked": after.bytes,
        "wrong_bytes": after.wrong_bytes(),
        "errors": after.errors.len(),
        "kinds": kinds,
    });
    report("upstream-nydusd", &figures);
}
