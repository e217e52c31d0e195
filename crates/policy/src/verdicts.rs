//! Verdicts kept on disk, so that a second start needs no request.
//!
//! ```text
//! ROOT/verdicts/<digest of the policy>/<digest of name and manifest>     empty files
//! ```
//! The directory is root's. Each policy has its own directory; those of earlier policies are
//! removed.

use std::{
    fs::{self, DirBuilder, File},
    io,
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
    sync::atomic::{AtomicUsize, Ordering},
};

use lazuli_image::{Algorithm, Digest};

use crate::name::Asked;

/// Maximum number of verdicts that are kept. A node has some hundred images.
const VERDICTS_LIMIT: usize = 16_384;

/// The verdicts of one policy.
#[derive(Debug)]
pub(crate) struct Verdicts {
    directory: PathBuf,
    count: AtomicUsize,
}

impl Verdicts {
    /// Opens those of the policy with the digest `policy`, and removes those of others.
    pub(crate) fn open(root: &Path, policy: &Digest) -> io::Result<Self> {
        let directory = root.join(policy.hex());
        DirBuilder::new().recursive(true).mode(0o700).create(&directory)?;
        for entry in fs::read_dir(root)? {
            let path = entry?.path();
            if path != directory {
                fs::remove_dir_all(path)?;
            }
        }
        let count = fs::read_dir(&directory)?.count().into();
        Ok(Verdicts { directory, count })
    }

    pub(crate) fn has(&self, asked: &Asked, manifest: &Digest) -> bool {
        self.path(asked, manifest).exists()
    }

    /// Stores a verdict. If that fails, the next start verifies the image again.
    pub(crate) fn keep(&self, asked: &Asked, manifest: &Digest) {
        let path = self.path(asked, manifest);
        let kept = self.make_room().and_then(|()| File::create_new(&path));
        match kept {
            Ok(_) => drop(self.count.fetch_add(1, Ordering::Relaxed)),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => tracing::warn!(path = %path.display(), %error, "a verdict is not kept"),
        }
    }

    fn make_room(&self) -> io::Result<()> {
        if self.count.load(Ordering::Relaxed) < VERDICTS_LIMIT {
            return Ok(());
        }
        for entry in fs::read_dir(&self.directory)? {
            fs::remove_file(entry?.path())?;
        }
        self.count.store(0, Ordering::Relaxed);
        Ok(())
    }

    fn path(&self, asked: &Asked, manifest: &Digest) -> PathBuf {
        let key = Algorithm::Blake3.digest(format!("{asked}@{manifest}").as_bytes());
        self.directory.join(key.hex())
    }
}
