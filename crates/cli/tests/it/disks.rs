//! The driver `disks`, with this machine's kernel in place of a guest's: it knows the disks alone.

use std::{
    fs::{self, File},
    os::unix::fs::{FileExt as _, MetadataExt as _},
    path::{Path, PathBuf},
    process::{Command, Output},
    thread,
};

use lazuli_testkit::{
    kernel::{Feature, require},
    listing,
    oci::Compression,
    odd,
    registry::FakeRegistry,
};

use crate::{lazuli::Lazuli, mount::unpack};

const SIZE: usize = 8 << 20;

fn able() -> bool {
    [Feature::Root, Feature::Loop].into_iter().all(require)
}

fn run(program: &str, arguments: &[&str]) -> Output {
    let output = Command::new(program).args(arguments).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {said}");
    output
}

/// What a guest does with its disks. Dropping it takes the mount and the devices away.
#[derive(Default)]
struct Guest {
    devices: Vec<String>,
    mounted: Option<PathBuf>,
}

impl Guest {
    /// Attaches the files of `disks`, and mounts the first with the others as its devices.
    fn mount(disks: &[PathBuf], at: &Path) -> Self {
        let mut guest = Guest::default();
        for disk in disks {
            let disk = disk.to_str().unwrap();
            let output = run("losetup", &["--find", "--show", "--read-only", disk]);
            guest.devices.push(String::from_utf8(output.stdout).unwrap().trim().to_owned());
        }
        let others = guest.devices.iter().skip(1).map(|device| format!(",device={device}"));
        let options = format!("ro{}", others.collect::<String>());
        let at_text = at.to_str().unwrap();
        run("mount", &["-t", "erofs", "-o", &options, &guest.devices[0], at_text]);
        guest.mounted = Some(at.to_owned());
        guest
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        if let Some(at) = &self.mounted {
            drop(Command::new("umount").arg(at).status());
        }
        for device in &self.devices {
            drop(Command::new("losetup").args(["--detach", device]).status());
        }
    }
}

/// The disks below a mount point: that of the metadata, and those of the blobs.
pub(crate) fn disks(at: &Path) -> Vec<PathBuf> {
    let blobs = (1..).map(|number| at.join(format!("blob-{number}")));
    let blobs = blobs.take_while(|blob| blob.exists());
    [at.join("bootstrap")].into_iter().chain(blobs).collect()
}

#[test]
fn one_disk_and_several_show_every_entry() {
    if !able() || !require(Feature::Program("umoci")) {
        return;
    }
    let lazuli = Lazuli::new();
    let layout = lazuli.directory("layout");
    odd::image().compressed_with(Compression::Gzip).write_layout(&layout, "odd").unwrap();
    lazuli.ok(["convert", "oci:layout:odd", "oci:image:lazy"]);
    let (at, guest) = (lazuli.directory("disks"), lazuli.directory("guest"));
    lazuli.ok(["mount", "oci:image:lazy", at.to_str().unwrap(), "--driver", "disks"]);
    assert_eq!(lazuli.mount_status(&at)["driver"], "disks");
    let expected = unpack(&layout, "odd", &lazuli);
    let several = disks(&at);
    assert!(several.len() > 2, "{several:?}");
    for disks in [vec![at.join("disk")], several.clone()] {
        let mounted = Guest::mount(&disks, &guest);
        listing::assert_equal(expected.clone(), guest.clone());
        drop(mounted);
    }
    // A monitor may join the pieces, and map the whole in pages of 2 MiB.
    let joined: Vec<u8> = several.iter().flat_map(|disk| fs::read(disk).unwrap()).collect();
    assert!(joined == fs::read(at.join("disk")).unwrap());
    assert_eq!(joined.len() % (2 << 20), 0);
    // Nobody else reads files that the image keeps from him.
    for name in fs::read_dir(&at).unwrap() {
        let found = name.unwrap().metadata().unwrap();
        assert_eq!((found.mode() & 0o7777, found.uid()), (0o400, 0));
    }
    lazuli.ok(["umount", at.to_str().unwrap()]);
}

#[test]
fn a_guest_fetches_what_it_reads_and_waits_for_the_next_worker() {
    if !able() {
        return;
    }
    let (lazuli, registry) = (Lazuli::new(), FakeRegistry::start().unwrap());
    lazuli.configure("[fetch]\namplify_bytes = 0\n");
    let source = lazuli.directory("source");
    for (name, seed) in [("a", 1), ("b", 2)] {
        fs::write(source.join(name), odd::random(seed, SIZE)).unwrap();
    }
    let image = format!("{}/image:1", registry.host());
    lazuli.ok(["convert", "dir:source", &image]);
    let (at, guest) = (lazuli.directory("disks"), lazuli.directory("guest"));
    lazuli.ok(["mount", &image, at.to_str().unwrap(), "--driver", "disks"]);
    let mounted = Guest::mount(&[at.join("disk")], &guest);
    let file = File::open(guest.join("a")).unwrap();
    let read = |from: u64| {
        let mut bytes = vec![0; 64 << 10];
        file.read_exact_at(&mut bytes, from).map(|()| bytes)
    };
    let expected = odd::random(1, SIZE);
    assert!(read(0).unwrap() == expected[..64 << 10]);
    let fetched = lazuli.mount_status(&at)["bytes_fetched"].as_u64().unwrap();
    assert!(fetched < SIZE as u64, "{fetched} bytes for a read of 64 KiB");
    for round in 1..=3 {
        let (worker, from) = (lazuli.worker(), round * SIZE as u64 / 4);
        thread::scope(|scope| {
            let reader = scope.spawn(|| read(from));
            lazuli.kill(worker);
            assert!(reader.join().unwrap().unwrap() == expected[from as usize..][..64 << 10]);
        });
        // Also what is asked of the successor alone.
        assert!(fs::read(at.join("blob-1")).is_ok());
    }
    listing::assert_equal(source, guest.clone());
    drop(file);
    drop(mounted);
    lazuli.ok(["umount", at.to_str().unwrap()]);
}

#[test]
fn containers_of_this_node_do_not_run_on_disks() {
    let lazuli = Lazuli::new();
    fs::write(lazuli.directory("source").join("file"), "content").unwrap();
    lazuli.ok(["convert", "dir:source", "oci:image:1"]);
    let said = lazuli.fails(["run", "--driver", "disks", "oci:image:1", "--", "true"]);
    assert!(said.contains("lazuli mount --driver disks"), "{said}");
}
