//! What a guest sees.

use std::{
    collections::BTreeSet,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow};
use fuse_backend_rs::{
    api::{Vfs, VfsOptions},
    passthrough::{CachePolicy, Config, PassthroughFs},
};

/// How long a guest may keep what it knows of an image, which never changes.
const FOR_EVER: Duration = Duration::from_secs(86_400);

/// The same of a directory of the host, which others change.
const SHORT: Duration = Duration::from_secs(1);

/// Directories by the path at which the guest sees them.
#[derive(Clone)]
pub(in crate::nydusd) struct Share {
    files: Arc<Vfs>,
    shown: Arc<Mutex<BTreeSet<String>>>,
}

/// Who changes a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::nydusd) enum Changes {
    Never,
    ByAnyone,
}

impl Share {
    pub(in crate::nydusd) fn new() -> Self {
        // The kernel of the guest opens and closes files as it does elsewhere, and writes at once.
        let options = VfsOptions {
            no_open: false,
            no_opendir: false,
            no_writeback: true,
            ..VfsOptions::default()
        };
        Share { files: Arc::new(Vfs::new(options)), shown: Arc::default() }
    }

    /// Its files for the device.
    pub(super) fn files(&self) -> Arc<Vfs> {
        self.files.clone()
    }

    /// Shows `directory` at `place`, unless something is shown there.
    pub(in crate::nydusd) fn show(
        &self,
        place: &str,
        directory: &Path,
        changes: Changes,
    ) -> Result<()> {
        let mut shown = self.shown();
        if shown.contains(place) {
            return Ok(());
        }
        let (cache_policy, timeout) = match changes {
            Changes::Never => (CachePolicy::Always, FOR_EVER),
            Changes::ByAnyone => (CachePolicy::Auto, SHORT),
        };
        let root_dir = directory.to_str().context("only paths in UTF-8 can be shown to a guest")?;
        let config = Config {
            root_dir: root_dir.to_owned(),
            do_import: false,
            xattr: true,
            cache_policy,
            attr_timeout: timeout,
            entry_timeout: timeout,
            ..Config::default()
        };
        let opened = PassthroughFs::<()>::new(config).and_then(|files| {
            files.import()?;
            Ok(files)
        });
        let files = opened.with_context(|| format!("cannot show {root_dir} to the guest"))?;
        let mounted = self.files.mount(Box::new(files), place);
        mounted.map_err(|error| anyhow!("cannot show {root_dir} at {place}: {error}"))?;
        shown.insert(place.to_owned());
        Ok(())
    }

    /// Hides what is shown at `place`, if anything is. The guest's open files are closed.
    pub(in crate::nydusd) fn hide(&self, place: &str) -> Result<()> {
        if !self.shown().remove(place) {
            return Ok(());
        }
        let hidden = self.files.umount(place);
        hidden.map(drop).map_err(|error| anyhow!("cannot hide {place} from the guest: {error}"))
    }

    fn shown(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.shown.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Share {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Share").finish_non_exhaustive()
    }
}
