//! Adding files to a layout: complete and durable under their name, or not at all.

use std::{
    fs::{self, File, Permissions},
    io::{self, Write as _},
    os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _},
    path::Path,
};

use lazuli_sys::path_error::At as _;
use rustix::fs::OFlags;
use tempfile::{NamedTempFile, TempPath};

use crate::error::RegistryError;

/// Prefix of names of incomplete files.
const PARTIAL: &str = ".partial-";

/// Opens the regular file `path` for reading. Refuses any other type at once: opening a named pipe
/// could block for ever.
pub(super) fn open_regular(path: &Path) -> io::Result<File> {
    let file =
        File::options().read(true).custom_flags(OFlags::NONBLOCK.bits() as i32).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    Ok(file)
}

/// Gives the file `from` the name `path`, too, instead of copying its content; whether that could
/// be done: it cannot across file systems and on those without hard links. The file has to have
/// `size` bytes.
pub(super) fn take_over(from: &Path, path: &Path, size: u64) -> Result<bool, RegistryError> {
    let metadata = fs::symlink_metadata(from).at(from)?;
    if !metadata.is_file() || metadata.len() != size {
        return Ok(false);
    }
    let link = |beside: &Path| fs::hard_link(from, beside);
    let Ok(link) = tempfile::Builder::new().prefix(PARTIAL).make_in(directory(path), link) else {
        return Ok(false);
    };
    let file = File::open(from).at(from)?;
    publish(link.into_temp_path(), &file, path)?;
    Ok(true)
}

pub(super) fn write_whole(path: &Path, content: &[u8]) -> Result<(), RegistryError> {
    write_atomically(path, |file| Ok(file.write_all(content).at(path)?))
}

/// Lets `write` fill a file beside `path`, syncs it and gives it its name. On failure nothing is
/// left.
pub(super) fn write_atomically(
    path: &Path,
    write: impl FnOnce(&mut NamedTempFile) -> Result<(), RegistryError>,
) -> Result<(), RegistryError> {
    let mut file = tempfile::Builder::new()
        .prefix(PARTIAL)
        // The umask decides who else may read it, as for any file.
        .permissions(Permissions::from_mode(0o666))
        .tempfile_in(directory(path))
        .at(path)?;
    write(&mut file)?;
    let (file, beside) = file.into_parts();
    publish(beside, &file, path)
}

/// Syncs a file that lies `beside`, and gives it its name, which is durable once the directory is.
fn publish(beside: TempPath, file: &File, path: &Path) -> Result<(), RegistryError> {
    file.sync_all().at(path)?;
    beside.persist(path).at(path)?;
    Ok(File::open(directory(path)).and_then(|directory| directory.sync_all()).at(path)?)
}

fn directory(path: &Path) -> &Path {
    path.parent().unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    #[test]
    fn only_a_regular_file_is_opened() {
        let directory = tempfile::tempdir().unwrap();
        let [file, pipe, link] = ["file", "pipe", "link"].map(|name| directory.path().join(name));
        fs::write(&file, "content").unwrap();
        mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR, 0).unwrap();
        std::os::unix::fs::symlink(&pipe, &link).unwrap();
        assert!(open_regular(&file).is_ok());
        for other in [&pipe, &link, directory.path(), Path::new("/dev/zero")] {
            let error = open_regular(other).unwrap_err();
            assert_eq!(error.to_string(), "not a regular file", "{}", other.display());
        }
    }

    #[test]
    fn a_file_of_the_same_file_system_is_taken_over() {
        let directory = tempfile::tempdir().unwrap();
        let [from, to] = ["from", "to"].map(|name| directory.path().join(name));
        fs::write(&from, "content").unwrap();
        assert!(!take_over(&from, &to, 6).unwrap() && !to.exists(), "of another size");
        assert!(take_over(&from, &to, 7).unwrap());
        let [from_inode, to_inode] = [&from, &to].map(|path| fs::metadata(path).unwrap().ino());
        assert_eq!(from_inode, to_inode);
        let other = directory.path().join("other");
        fs::write(&other, "of another size").unwrap();
        assert!(take_over(&from, &other, 7).unwrap() && fs::read(&other).unwrap() == b"content");
        let link = directory.path().join("link");
        std::os::unix::fs::symlink(&from, &link).unwrap();
        assert!(!take_over(&link, &directory.path().join("new"), 7).unwrap(), "through a link");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 4, "nothing partial is left");
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
