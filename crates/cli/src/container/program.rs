//! Looks up the container's program in the image, for a better error than runc's.

use std::{fmt, path::Path};

use rustix::{
    fs::{CWD, FileType, Mode, OFlags, ResolveFlags, fstat, openat, openat2},
    io::Errno,
};

/// A program that cannot be run.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Misconfigured {
    NotFound(String),
    NotExecutable(String),
}

impl Misconfigured {
    /// The exit code that `docker run` uses.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Misconfigured::NotFound(_) => 127,
            Misconfigured::NotExecutable(_) => 126,
        }
    }
}

impl fmt::Display for Misconfigured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Misconfigured::NotFound(program) => write!(f, "the image has no program `{program}`"),
            Misconfigured::NotExecutable(program) => {
                write!(f, "`{program}` of the image is not an executable file")
            }
        }
    }
}

/// Looks `program` up in the tree at `rootfs` as execvp(3) would: with a slash from `directory`,
/// else in each directory of `search_path`.
pub(crate) fn look_up(
    program: &str,
    rootfs: &Path,
    search_path: &str,
    directory: &str,
) -> Result<(), Misconfigured> {
    let candidates: Vec<String> = if program.contains('/') {
        vec![if program.starts_with('/') {
            program.into()
        } else {
            format!("{directory}/{program}")
        }]
    } else {
        search_path.split(':').map(|path| format!("{path}/{program}")).collect()
    };
    let mut result = Err(Misconfigured::NotFound(program.to_owned()));
    for candidate in candidates {
        match is_executable(rootfs, &candidate) {
            Ok(true) => return Ok(()),
            Ok(false) => result = Err(Misconfigured::NotExecutable(candidate)),
            Err(Errno::NOENT | Errno::NOTDIR) => {}
            // Left to runc, which reports the problem.
            Err(_) => return Ok(()),
        }
    }
    result
}

/// Resolves `path` without leaving `rootfs`, whatever its symbolic links are.
fn is_executable(rootfs: &Path, path: &str) -> rustix::io::Result<bool> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let root = openat(CWD, rootfs, flags, Mode::empty())?;
    let file = openat2(root, path, flags, Mode::empty(), ResolveFlags::IN_ROOT)?;
    let stat = fstat(&file)?;
    let regular = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    Ok(regular && stat.st_mode & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::{PermissionsExt, symlink},
    };

    use super::*;

    #[test]
    fn programs_are_found_as_execvp_finds_them() {
        let rootfs = tempfile::tempdir().unwrap();
        let bin = rootfs.path().join("bin");
        fs::create_dir_all(bin.join("directory")).unwrap();
        fs::write(bin.join("good"), "").unwrap();
        fs::set_permissions(bin.join("good"), fs::Permissions::from_mode(0o755)).unwrap();
        fs::write(bin.join("data"), "").unwrap();
        fs::set_permissions(bin.join("data"), fs::Permissions::from_mode(0o644)).unwrap();
        symlink("/bin/good", bin.join("link")).unwrap();
        symlink("/usr/bin/env", bin.join("outside")).unwrap();
        let look_up = |program: &str| look_up(program, rootfs.path(), "/none:/bin", "/bin");
        for program in ["good", "/bin/good", "./good", "link", "../bin/good"] {
            assert_eq!(look_up(program), Ok(()), "{program}");
        }
        for program in ["missing", "/good", "./missing", "outside", "/bin/good/x"] {
            assert_eq!(look_up(program).unwrap_err().exit_code(), 127, "{program}");
        }
        for program in ["data", "/bin/data", "directory"] {
            assert_eq!(look_up(program).unwrap_err().exit_code(), 126, "{program}");
        }
    }
}
