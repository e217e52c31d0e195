//! Snapshots on this node's disk: records and directories together. Everything here blocks.

use std::{
    collections::HashSet,
    path::Path,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use lazuli_sys::path_error::At as _;

use crate::{
    Image, SnapshotError,
    api::types::Mount,
    directories::{Directories, Owner},
    label::{self, Labels},
    mapping::Mapping,
    mounted_layers,
    mounts::{self, Form},
    store::{Kind, New, Snapshot, Store, Usage, lost},
    usage,
};

type Result<T> = std::result::Result<T, SnapshotError>;

/// `FUSE_SUPER_MAGIC`, see statfs(2).
const FUSE: rustix::fs::FsWord = 0x6573_5546;

#[derive(Debug)]
pub(crate) struct Storage {
    pub(crate) store: Store,
    pub(crate) directories: Directories,
    form: Form,
    /// Held while the trash is emptied.
    emptying: Mutex<()>,
    /// Whether a task is about to empty it.
    waiting: AtomicBool,
}

impl Storage {
    /// Opens or creates the snapshots in the state directory.
    pub(crate) fn open(state: &Path, form: Form) -> Result<Self> {
        let directories = Directories::open(state)?;
        let store = Store::open(&directories.metadata())?;
        Ok(Storage {
            store,
            directories,
            form,
            emptying: Mutex::default(),
            waiting: AtomicBool::default(),
        })
    }

    /// Creates a snapshot with its directory.
    pub(crate) fn create(&self, new: New) -> Result<Snapshot> {
        let parent = new.parent.as_deref().map(|parent| self.store.get(parent)).transpose();
        let parent = parent.map_err(lost)?;
        let owner = match (Mapping::of(&new.labels)?, &parent) {
            (Some(mapping), parent) => {
                if let Some(parent) = parent.as_ref().filter(|parent| !mounts::is_copy(parent)) {
                    self.refuse_fuse(parent)?;
                }
                mapping.owner()
            }
            (None, parent) => parent.as_ref().map_or(Owner::Us, |parent| Owner::Of(parent.number)),
        };
        let kind = new.kind;
        let is_image = new.image.is_some();
        // Leftovers of a failure are deleted at the next start or Cleanup.
        self.store.create(new, |number| {
            self.directories.make(number, owner, kind)?;
            if is_image { self.directories.make_image(number) } else { Ok(()) }
        })
    }

    /// The mounts that show an active snapshot or a view.
    pub(crate) fn mounts(&self, key: &str) -> Result<Vec<Mount>> {
        let chain = self.store.chain(key).map_err(lost)?;
        match chain.first() {
            Some(snapshot) if snapshot.kind == Kind::Committed => {
                Err(SnapshotError::NotActive(key.to_owned()))
            }
            _ => mounts::of(&chain, &self.directories, self.form),
        }
    }

    /// Commits an active snapshot in its present state.
    pub(crate) fn commit(
        &self,
        key: &str,
        name: &str,
        parent: Option<String>,
        labels: Labels,
    ) -> Result<Snapshot> {
        let usage = match self.usage(key) {
            // The store reports whether it has been committed already.
            Err(SnapshotError::NotFound(_)) => Usage::default(),
            other => other?,
        };
        self.store.commit(key, name, parent, labels, usage)
    }

    /// The disk usage of a snapshot's files beyond its parents. An image's data is counted by the
    /// cache.
    pub(crate) fn usage(&self, key: &str) -> Result<Usage> {
        let snapshot = self.store.get(key)?;
        match snapshot.kind {
            Kind::Active if snapshot.image.is_none() => {
                usage::of(&self.directories.fs(snapshot.number))
            }
            _ => Ok(snapshot.usage),
        }
    }

    /// The nearest lazy image below a snapshot, or in it, and the snapshot in which it is mounted.
    ///
    /// # Errors
    /// The chain has a data layer without an image above it. Such a layer has no files, so nothing
    /// may be shown on top of it.
    pub(crate) fn image_of(&self, name: &str) -> Result<Option<(Image, Snapshot)>> {
        for snapshot in self.store.chain(name).map_err(lost)? {
            if let Some(image) = snapshot.image.clone() {
                return Ok(Some((image, snapshot)));
            }
            if snapshot.is_data() {
                let owner = label::image_of(&snapshot.labels).to_owned();
                let (name, layer) = (name.to_owned(), snapshot.name);
                return Err(SnapshotError::NoFiles { name, layer, owner });
            }
        }
        Ok(None)
    }

    /// # Errors
    /// An image that is served by FUSE: its files cannot be shown as those of other users.
    fn refuse_fuse(&self, parent: &Snapshot) -> Result<()> {
        let Some((image, snapshot)) = self.image_of(&parent.name)? else { return Ok(()) };
        let fs = self.directories.fs(snapshot.number);
        let stat = rustix::fs::statfs(&fs).at(&fs)?;
        if stat.f_type == FUSE {
            return Err(SnapshotError::NotMappable(image.reference));
        }
        Ok(())
    }

    /// Snapshots of images whose mounting a crash interrupted: containerd never learned of them.
    pub(crate) fn unfinished(&self) -> Result<Vec<Snapshot>> {
        let mut all = self.store.all()?;
        all.retain(|snapshot| snapshot.image.is_some() && snapshot.kind == Kind::Active);
        Ok(all)
    }

    /// Directories of no snapshot.
    pub(crate) fn strays(&self) -> Result<Vec<u64>> {
        self.store.at_rest(|known| self.directories.strays(known))
    }

    /// Returns whether the caller must empty the trash after adding to it. Otherwise another task
    /// is about to, and will find the addition.
    pub(crate) fn shall_empty(&self) -> bool {
        !self.waiting.swap(true, Ordering::SeqCst)
    }

    /// Deletes the trash except snapshots that are still mounted. Returns whether some are. May
    /// take long.
    ///
    /// # Errors
    /// The first failed deletion; the rest is deleted all the same.
    pub(crate) fn empty_trash(&self) -> Result<bool> {
        let _emptying = self.emptying.lock().unwrap_or_else(PoisonError::into_inner);
        self.waiting.store(false, Ordering::SeqCst);
        let thrown = self.directories.thrown_away()?;
        let removed = self.store.removed()?;
        let held = if thrown.is_empty() { HashSet::new() } else { self.held()? };
        let (mut failed, mut kept) = (None, HashSet::new());
        for (number, paths) in thrown {
            if held.contains(&number) {
                tracing::debug!(number, "a removed snapshot is still mounted somewhere");
                kept.insert(number);
            } else if let Err(error) = self.directories.delete(number, paths) {
                kept.insert(number);
                failed = failed.or(Some(error));
            }
        }
        let gone: Vec<_> = removed
            .into_keys()
            .filter(|number| !kept.contains(number) && !self.directories.fs(*number).exists())
            .collect();
        self.store.forget_removed(&gone)?;
        failed.map_or(Ok(!held.is_empty()), Err)
    }

    /// Snapshots, also removed ones, that are mounted, and those below them.
    fn held(&self) -> Result<HashSet<u64>> {
        let mut held = mounted_layers::numbers(&self.directories).at("/proc")?;
        for (number, below) in self.store.removed()? {
            if held.contains(&number) {
                held.extend(below);
            }
        }
        Ok(held)
    }
}

#[cfg(test)]
impl Storage {
    /// Held by the task that empties the trash.
    pub(crate) fn hold_emptying(&self) -> std::sync::MutexGuard<'_, ()> {
        self.emptying.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
