//! Probes this driver with a real mount.

use std::{
    fs::{self, File},
    io::{self, Read as _},
    os::{
        fd::{AsFd as _, AsRawFd as _, OwnedFd},
        unix::fs::FileExt as _,
    },
    path::Path,
    thread,
    time::{Duration, Instant},
};

use lazuli_image::BLOCK_SIZE;
use lazuli_sys::fanotify::{Group, Response};
use rustix::{
    fs::{Mode, OFlags, openat},
    io::Errno,
};

use super::super::{
    mount,
    tiny_image::{CONTENT, TinyImage},
};

/// Time limit of the trial for an event.
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);

/// Tries the driver with a small image in `cache`. Blocks for some milliseconds.
///
/// # Errors
/// The step that doesn't work, in words.
pub(in crate::kernel) fn run(cache: &Path) -> Result<(), String> {
    let group = Group::new().map_err(|error| match error.kind() {
        io::ErrorKind::PermissionDenied => "it needs CAP_SYS_ADMIN".to_owned(),
        _ => format!("the kernel refuses a pre-content group: {error}"),
    })?;
    let in_cache = |error: io::Error| format!("{}: {error}", cache.display());
    let dir = cache.join(format!("probe-{}", std::process::id()));
    fs::create_dir_all(&dir).map_err(in_cache)?;
    let result = try_image(&group, &dir, cache);
    fs::remove_dir_all(&dir).map_err(in_cache)?;
    result
}

/// Reads a hole through an EROFS mount, and fills it when the kernel asks.
fn try_image(group: &Group, dir: &Path, cache: &Path) -> Result<(), String> {
    let failed = |error: io::Error| format!("{}: {error}", cache.display());
    let bootstrap = dir.join("image.boot");
    fs::write(&bootstrap, TinyImage::new()?.bootstrap).map_err(failed)?;
    let blob = File::options().read(true).write(true).create_new(true).open(dir.join("data"));
    let blob = blob.map_err(failed)?;
    blob.set_len(BLOCK_SIZE).map_err(failed)?;
    group.mark(blob.as_fd()).map_err(|error| match Errno::from_io_error(&error) {
        Some(Errno::INVAL) => "the kernel has no pre-content events (Linux 6.14)".to_owned(),
        Some(Errno::OPNOTSUPP) => {
            format!("the file system of {} has no pre-content events", cache.display())
        }
        _ => format!("pre-content events are refused on {}: {error}", cache.display()),
    })?;
    let (mount, _) = mount::create(&bootstrap, &[blob.as_fd()]).map_err(|error| {
        format!("the kernel does not mount EROFS from files (Linux 6.12): {}", error.source)
    })?;
    let reader = thread::spawn(move || read(&mount));
    let answered = answer(group, &blob);
    let content = reader.join().map_err(|_| "the trial read panicked".to_owned())?;
    answered?;
    match content {
        Ok(content) if content == CONTENT => Ok(()),
        Ok(_) => Err("EROFS does not wait for pre-content events (Linux 6.15)".to_owned()),
        Err(error) => Err(format!("reading through EROFS fails: {error}")),
    }
}

fn read(mount: &OwnedFd) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    let file = openat(mount, c"file", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    File::from(file).read_to_end(&mut content)?;
    Ok(content)
}

/// Waits for the first event, fills the file, and lets all readers go.
fn answer(group: &Group, blob: &File) -> Result<(), String> {
    let failed = |error: io::Error| format!("answering a pre-content event fails: {error}");
    let start = Instant::now();
    let mut answers = 0;
    while answers == 0 && start.elapsed() < PROBE_TIMEOUT {
        while let Some(event) = group.read().map_err(failed)? {
            let Some(file) = event.file else { continue };
            blob.write_all_at(CONTENT, 0).map_err(failed)?;
            group.respond(file.as_raw_fd(), Response::Allow).map_err(failed)?;
            answers += 1;
        }
        thread::sleep(Duration::from_micros(200));
    }
    // Later reads find the file filled.
    group.unmark(blob.as_fd()).map_err(failed)?;
    while let Some(event) = group.read().map_err(failed)? {
        let Some(file) = event.file else { continue };
        group.respond(file.as_raw_fd(), Response::Allow).map_err(failed)?;
    }
    Ok(())
}
