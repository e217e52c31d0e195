//! The daemon's life: started on demand, several side by side, refusing, restarting.

use lazuli_testkit::{
    kernel::{Feature, require},
    listing, odd,
};

use crate::lazuli::Lazuli;

fn mounted() -> Option<(Lazuli, std::path::PathBuf)> {
    if !require(Feature::Root) || !require(Feature::Fuse) {
        return None;
    }
    let lazuli = Lazuli::new();
    let source = lazuli.directory("source");
    std::fs::write(source.join("a"), odd::random(1, 2 << 20)).unwrap();
    std::fs::write(source.join("b"), odd::random(2, 2 << 20)).unwrap();
    lazuli.ok(["convert", "dir:source", "oci:lazy:image"]);
    let mountpoint = lazuli.directory("mnt");
    lazuli.ok(["mount", "oci:lazy:image", mountpoint.to_str().unwrap()]);
    Some((lazuli, mountpoint))
}

#[test]
fn status_has_what_programs_rely_on() {
    let Some((lazuli, mountpoint)) = mounted() else { return };
    let status = lazuli.status();
    let daemon = &status["daemon"];
    assert!(daemon["worker_pid"].as_u64().is_some() && daemon["version"].as_str().is_some());
    let mount = lazuli.mount_status(&mountpoint);
    assert!(mount["image"].as_str().unwrap().ends_with("lazy:image"), "{mount:#}");
    for counter in [
        "bytes_fetched",
        "bytes_copied",
        "requests",
        "bytes_total",
        "chunks_ready",
        "chunks_total",
        "events",
    ] {
        assert!(mount[counter].as_u64().is_some(), "{counter} in {mount:#}");
    }
    assert_eq!(mount["chunks_total"], 4);
    assert_eq!(mount["chunks_ready"], 0);
    assert!(!lazuli.ok(["status"]).is_empty());
}

#[test]
fn stop_refuses_while_something_is_mounted() {
    let Some((lazuli, mountpoint)) = mounted() else { return };
    let open = std::fs::File::open(mountpoint.join("a")).unwrap();
    let error = lazuli.fails(["stop"]);
    assert!(error.contains(mountpoint.to_str().unwrap()), "{error}");
    assert!(error.contains(&format!("(pid {})", std::process::id())), "{error}");
    drop(open);
    assert!(std::fs::read(mountpoint.join("a")).is_ok());
    lazuli.ok(["umount", mountpoint.to_str().unwrap()]);
    lazuli.ok(["stop"]);
    assert!(lazuli.fails(["status"]).contains("no daemon"));
    lazuli.ok(["stop"]);
}

#[test]
fn umount_refuses_while_a_file_is_open() {
    let Some((lazuli, mountpoint)) = mounted() else { return };
    let open = std::fs::File::open(mountpoint.join("a")).unwrap();
    let error = lazuli.fails(["umount", mountpoint.to_str().unwrap()]);
    assert!(error.contains("in use"), "{error}");
    drop(open);
    lazuli.ok(["umount", mountpoint.to_str().unwrap()]);
    assert!(lazuli.fails(["umount", mountpoint.to_str().unwrap()]).contains("not mounted"));
}

#[test]
fn a_reader_of_a_stopped_daemon_never_sees_a_hole() {
    use std::os::unix::fs::FileExt;
    let Some((lazuli, mountpoint)) = mounted() else { return };
    let open = std::fs::File::open(mountpoint.join("a")).unwrap();
    let mut first = [0; 10];
    open.read_exact_at(&mut first, 0).unwrap();
    lazuli.ok(["stop", "--force"]);
    let mut later = [0; 4096];
    if open.read_exact_at(&mut later, 1 << 20).is_ok() {
        assert!(later == odd::random(1, 2 << 20)[1 << 20..][..4096], "wrong bytes");
    }
    drop(open);
    // A later mount is right again.
    lazuli.ok(["mount", "oci:lazy:image", mountpoint.to_str().unwrap()]);
    listing::assert_equal(lazuli.path("source"), mountpoint);
}

#[test]
fn the_cache_is_found_again_after_a_restart() {
    let Some((lazuli, mountpoint)) = mounted() else { return };
    std::fs::read(mountpoint.join("a")).unwrap();
    let ready = lazuli.mount_status(&mountpoint)["chunks_ready"].clone();
    lazuli.ok(["umount", mountpoint.to_str().unwrap()]);
    lazuli.ok(["stop"]);
    lazuli.ok(["mount", "oci:lazy:image", mountpoint.to_str().unwrap()]);
    assert_eq!(lazuli.mount_status(&mountpoint)["chunks_ready"], ready);
    std::fs::read(mountpoint.join("a")).unwrap();
    // Manifest and config are fetched for the name's present meaning; the bootstrap and the data
    // are cached.
    let again = lazuli.mount_status(&mountpoint);
    assert!(again["bytes_fetched"].as_u64().unwrap() < 10_000, "{again:#}");
}

#[test]
fn chunks_of_another_image_are_not_fetched_again() {
    let Some((lazuli, mountpoint)) = mounted() else { return };
    std::fs::read(mountpoint.join("a")).unwrap();
    lazuli.ok(["umount", mountpoint.to_str().unwrap()]);
    // The present worker knows the first image only from the disk.
    lazuli.ok(["stop"]);
    let next = lazuli.directory("next");
    std::fs::write(next.join("a"), odd::random(1, 2 << 20)).unwrap();
    std::fs::write(next.join("c"), odd::random(3, 2 << 20)).unwrap();
    lazuli.ok(["convert", "dir:next", "oci:other:image"]);
    let mountpoint = mountpoint.to_str().unwrap();
    lazuli.ok(["mount", "oci:other:image", mountpoint]);
    listing::assert_equal(lazuli.path("next"), mountpoint);
    let status = lazuli.mount_status(mountpoint.as_ref());
    assert_eq!(status["bytes_copied"], 2 << 20, "{status:#}");
    let fetched = status["bytes_fetched"].as_u64().unwrap();
    assert!((2 << 20..(2 << 20) + 20_000).contains(&fetched), "{status:#}");
    assert!(lazuli.ok(["status"]).contains("copied   2"));
}

#[test]
fn mounts_of_a_killed_daemon_are_served_again() {
    let Some((lazuli, mountpoint)) = mounted() else { return };
    lazuli.kill(lazuli.worker());
    let other = lazuli.directory("other");
    lazuli.ok(["mount", "oci:lazy:image", other.to_str().unwrap()]);
    assert_eq!(lazuli.status()["mounts"].as_array().unwrap().len(), 2);
    listing::assert_equal(lazuli.path("source"), mountpoint);
    listing::assert_equal(lazuli.path("source"), other);
}

#[test]
fn daemons_of_two_state_directories_are_independent() {
    let (Some((one, _)), Some((two, mountpoint))) = (mounted(), mounted()) else { return };
    one.ok(["stop", "--force"]);
    assert!(one.fails(["status"]).contains("no daemon"));
    listing::assert_equal(two.path("source"), mountpoint);
}

#[test]
fn unknown_configuration_keys_are_refused() {
    let lazuli = Lazuli::new();
    lazuli.configure("[fetch]\nspeed = 11\n");
    let error = lazuli.fails(["status"]);
    assert!(error.contains("speed") && error.contains("config.toml"), "{error}");
    lazuli.configure("");
}

/// Runs a program that must succeed.
#[track_caller]
fn run(program: &str, arguments: &[&std::ffi::OsStr]) {
    let status = std::process::Command::new(program).args(arguments).status().unwrap();
    assert!(status.success(), "{program} {arguments:?}");
}

/// Mounts a tmpfs with a file in it, as another program would.
fn mount_theirs(mountpoint: &std::path::Path) {
    run("mount", &["-t".as_ref(), "tmpfs".as_ref(), "tmpfs".as_ref(), mountpoint.as_ref()]);
    std::fs::write(mountpoint.join("theirs"), "x").unwrap();
}

fn second_half(file: &std::fs::File) -> std::io::Result<bool> {
    use std::os::unix::fs::FileExt;
    let mut bytes = vec![0; 1 << 20];
    file.read_exact_at(&mut bytes, 1 << 20)?;
    Ok(bytes == odd::random(1, 2 << 20)[1 << 20..])
}

#[test]
fn an_open_file_is_served_after_a_lazy_unmount_by_another_program() {
    let Some((lazuli, mountpoint)) = mounted() else { return };
    let open = std::fs::File::open(mountpoint.join("a")).unwrap();
    run("umount", &["-l".as_ref(), mountpoint.as_ref()]);
    assert_eq!(lazuli.status()["mounts"].as_array().unwrap().len(), 0);
    let error = lazuli.fails(["stop"]);
    assert!(error.contains("still in use"), "{error}");
    assert!(error.contains(&format!("(pid {})", std::process::id())), "{error}");
    assert!(second_half(&open).unwrap());
    drop(open);
    lazuli.ok(["stop"]);
}

#[test]
fn an_overlay_outlives_the_mount_and_gets_errors_when_the_daemon_is_forced_to_stop() {
    let Some((lazuli, mountpoint)) = mounted() else { return };
    let [upper, work, merged] = ["upper", "work", "merged"].map(|name| lazuli.directory(name));
    let options = format!(
        "lowerdir={},upperdir={},workdir={}",
        mountpoint.display(),
        upper.display(),
        work.display()
    );
    let overlay = ["-t", "overlay", "-o", &options, "overlay"].map(std::ffi::OsStr::new);
    run("mount", &[&overlay[..], &[merged.as_ref()]].concat());
    lazuli.ok(["umount", mountpoint.to_str().unwrap()]);
    let open = std::fs::File::open(merged.join("a")).unwrap();
    assert!(lazuli.fails(["stop"]).contains("still in use"));
    lazuli.ok(["stop", "--force"]);
    let late = second_half(&open);
    run("umount", &["-l".as_ref(), merged.as_ref()]);
    assert_eq!(late.unwrap_err().raw_os_error(), Some(5));
}

#[test]
fn foreign_mounts_on_top_are_left_alone() {
    let Some((lazuli, mountpoint)) = mounted() else { return };
    mount_theirs(&mountpoint);
    let error = lazuli.fails(["umount", mountpoint.to_str().unwrap()]);
    assert!(error.contains("mounted over"), "{error}");
    assert!(mountpoint.join("theirs").exists());
    run("umount", &[mountpoint.as_ref()]);
    lazuli.ok(["umount", mountpoint.to_str().unwrap()]);
}

#[test]
fn a_stale_mount_record_touches_nothing() {
    let Some((lazuli, mountpoint)) = mounted() else { return };
    let worker = lazuli.worker();
    run("umount", &[mountpoint.as_ref()]);
    mount_theirs(&mountpoint);
    // This worker has forgotten; the next one finds the record.
    lazuli.kill(worker);
    let other = lazuli.directory("other");
    lazuli.ok(["mount", "oci:lazy:image", other.to_str().unwrap()]);
    assert_eq!(lazuli.status()["mounts"].as_array().unwrap().len(), 1);
    assert!(mountpoint.join("theirs").exists());
    listing::assert_equal(lazuli.path("source"), other);
    run("umount", &[mountpoint.as_ref()]);
}

#[test]
fn another_mount_namespace_does_not_hold_up_an_unmount() {
    let Some((lazuli, mountpoint)) = mounted() else { return };
    lazuli.ok(["umount", mountpoint.to_str().unwrap()]);
    for driver in ["fuse", "fanotify", "loop"] {
        lazuli.ok(["mount", "oci:lazy:image", mountpoint.to_str().unwrap(), "--driver", driver]);
        let mut command = std::process::Command::new("unshare");
        let mut holder = command.args(["-m", "sleep", "30"]).spawn().unwrap();
        std::thread::sleep(std::time::Duration::from_millis(200));
        lazuli.ok(["umount", mountpoint.to_str().unwrap()]);
        holder.kill().unwrap();
        holder.wait().unwrap();
    }
    lazuli.ok(["stop"]);
}

#[test]
fn concurrent_clients_of_one_image_all_succeed() {
    let Some((lazuli, mountpoint)) = mounted() else { return };
    lazuli.ok(["umount", mountpoint.to_str().unwrap()]);
    std::thread::scope(|scope| {
        for client in 0..4 {
            let (lazuli, directory) = (&lazuli, lazuli.directory(&format!("mnt-{client}")));
            scope.spawn(move || {
                for _ in 0..20 {
                    lazuli.ok(["mount", "oci:lazy:image", directory.to_str().unwrap()]);
                    assert!(directory.join("a").exists());
                    lazuli.ok(["umount", directory.to_str().unwrap()]);
                }
            });
        }
    });
    assert_eq!(lazuli.status()["mounts"].as_array().unwrap().len(), 0);
}
