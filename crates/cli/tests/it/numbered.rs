//! Images of twenty numbered files, and reads that know what is in them.

use std::{fs, path::Path};

use lazuli_testkit::{odd, tarball::Entry};

/// The content of a file, which compresses to a half.
fn content(number: usize) -> Vec<u8> {
    let bytes = odd::random(number as u64, 150_000);
    bytes.iter().flat_map(|byte| format!("{byte:02x}").into_bytes()).collect()
}

/// Files that take some MiB together.
pub(crate) fn files() -> Vec<Entry> {
    (0..20).map(|number| Entry::file(format!("file{number}"), content(number))).collect()
}

/// Reads a file. The error is the system's number.
pub(crate) fn read(directory: &Path, number: usize) -> Result<(), i32> {
    match fs::read(directory.join(format!("file{number}"))) {
        Ok(bytes) => {
            assert!(bytes == content(number), "file{number} has wrong bytes");
            Ok(())
        }
        Err(error) => Err(error.raw_os_error().unwrap()),
    }
}

/// Changes the layer `stored` in a layout under an image that is mounted, and checks that the mount
/// shows no wrong byte, and everything once the layer is as it was.
pub(crate) fn assert_checked(mountpoint: &Path, layout: &Path, stored: &[u8]) {
    let digest = lazuli_image::Algorithm::Sha256.digest(stored);
    let blob = layout.join("blobs/sha256").join(digest.hex());
    let mut changed = stored.to_vec();
    let middle = changed.len() / 2;
    changed[middle..middle + 20_000].iter_mut().for_each(|byte| *byte ^= 0x55);
    fs::write(&blob, &changed).unwrap();
    let read_all = || (0..20).map(|number| read(mountpoint, number)).collect::<Vec<_>>();
    let found = read_all();
    assert!(found.contains(&Err(5)), "{found:?}");
    assert!(found.contains(&Ok(())), "{found:?}");
    fs::write(&blob, stored).unwrap();
    assert!(read_all().iter().all(Result::is_ok));
}
