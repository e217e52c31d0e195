//! How files come into a layout: whole under their name, and durable, or not at all.

use std::{
    fs::{self, File, Permissions},
    io::Write as _,
    os::unix::fs::PermissionsExt as _,
    path::Path,
};

use tempfile::NamedTempFile;

use crate::error::RegistryError;

/// Gives the file `from` the name `path`, too, instead of copying its content; whether that could be done: it cannot across file systems,
/// on those without hard links, and when something has the name. The file has to have `size` bytes.
pub(super) fn take_over(from: &Path, path: &Path, size: u64) -> Result<bool, RegistryError> {
    let io = || RegistryError::io(from);
    let metadata = fs::symlink_metadata(from).map_err(io())?;
    if !metadata.is_file() || metadata.len() != size {
        return Ok(false);
    }
    File::open(from).and_then(|file| file.sync_all()).map_err(io())?;
    if fs::hard_link(from, path).is_err() {
        return Ok(false);
    }
    sync_directory(path)?;
    Ok(true)
}

pub(super) fn write_whole(path: &Path, content: &[u8]) -> Result<(), RegistryError> {
    write_atomically(path, |file| file.write_all(content).map_err(RegistryError::io(path)))
}

/// Lets `write` fill a file beside `path`, syncs it and gives it its name. On failure nothing is left.
pub(super) fn write_atomically(
    path: &Path,
    write: impl FnOnce(&mut NamedTempFile) -> Result<(), RegistryError>,
) -> Result<(), RegistryError> {
    let io = || RegistryError::io(path);
    let mut file = tempfile::Builder::new()
        .prefix(".partial-")
        // What others may read is the umask's business, as for any file.
        .permissions(Permissions::from_mode(0o666))
        .tempfile_in(directory(path))
        .map_err(io())?;
    write(&mut file)?;
    file.as_file().sync_all().map_err(io())?;
    file.persist(path).map_err(|error| io()(error.error))?;
    sync_directory(path)
}

/// Makes the new name `path` durable.
fn sync_directory(path: &Path) -> Result<(), RegistryError> {
    let directory = directory(path);
    let synced = File::open(directory).and_then(|directory| directory.sync_all());
    synced.map_err(RegistryError::io(path))
}

fn directory(path: &Path) -> &Path {
    path.parent().unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    #[test]
    fn a_file_of_the_same_file_system_is_taken_over() {
        let directory = tempfile::tempdir().unwrap();
        let [from, to] = ["from", "to"].map(|name| directory.path().join(name));
        fs::write(&from, "content").unwrap();
        assert!(!take_over(&from, &to, 6).unwrap() && !to.exists(), "of another size");
        assert!(take_over(&from, &to, 7).unwrap());
        let [from_inode, to_inode] = [&from, &to].map(|path| fs::metadata(path).unwrap().ino());
        assert_eq!(from_inode, to_inode);
        assert!(!take_over(&from, &to, 7).unwrap(), "over another file");
        let link = directory.path().join("link");
        std::os::unix::fs::symlink(&from, &link).unwrap();
        assert!(!take_over(&link, &directory.path().join("new"), 7).unwrap(), "through a link");
    }

    #[test]
    fn a_file_of_another_file_system_is_not() {
        let elsewhere = tempfile::tempdir_in("/dev/shm").unwrap();
        let directory = tempfile::tempdir().unwrap();
        let from = elsewhere.path().join("from");
        fs::write(&from, "content").unwrap();
        assert!(!take_over(&from, &directory.path().join("to"), 7).unwrap());
    }
}
