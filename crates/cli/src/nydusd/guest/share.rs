//! What a guest sees.

use std::{path::Path, sync::Arc, time::Duration};

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
pub(in crate::nydusd) struct Share(Arc<Vfs>);

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
        Share(Arc::new(Vfs::new(options)))
    }

    /// Its files for the device.
    pub(super) fn files(&self) -> Arc<Vfs> {
        self.0.clone()
    }

    /// Shows `directory` at `place`.
    pub(in crate::nydusd) fn show(
        &self,
        place: &str,
        directory: &Path,
        changes: Changes,
    ) -> Result<()> {
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
        let shown = PassthroughFs::<()>::new(config).and_then(|files| {
            files.import()?;
            Ok(files)
        });
        let files = shown.with_context(|| format!("cannot show {root_dir} to the guest"))?;
        let mounted = self.0.mount(Box::new(files), place);
        mounted.map(drop).map_err(|error| anyhow!("cannot show {root_dir} at {place}: {error}"))
    }

    /// Hides what is shown at `place`.
    pub(in crate::nydusd) fn hide(&self, place: &str) -> Result<()> {
        let hidden = self.0.umount(place);
        hidden.map(drop).map_err(|error| anyhow!("cannot hide {place} from the guest: {error}"))
    }
}

impl std::fmt::Debug for Share {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Share").finish_non_exhaustive()
    }
}
