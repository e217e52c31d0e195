//! Snapshots on this node's disk: records and directories together. Everything here blocks.

use std::path::{Path, PathBuf};

use crate::{
    SnapshotError,
    api::types::Mount,
    directories::Directories,
    label::Labels,
    mounts,
    store::{Kind, New, Snapshot, Store, Usage},
};

type Result<T> = std::result::Result<T, SnapshotError>;

#[derive(Debug)]
pub(crate) struct Local {
    pub(crate) store: Store,
    pub(crate) directories: Directories,
}

impl Local {
    /// Opens or creates the snapshots in `root`.
    pub(crate) fn open(root: &Path) -> Result<Self> {
        let directories = Directories::open(root)?;
        let store = Store::open(&directories.metadata())?;
        Ok(Local { store, directories })
    }

    /// Creates a snapshot with its directory.
    pub(crate) fn create(&self, new: New) -> Result<Snapshot> {
        let parent = new.parent.as_deref().map(|parent| self.store.get(parent)).transpose()?;
        let (parent, active) = (parent.map(|parent| parent.number), new.kind == Kind::Active);
        // What a failure leaves on the disk is thrown away by whoever gets the same number next.
        self.store.create(new, |number| self.directories.make(number, parent, active))
    }

    /// What has to be mounted to see an active snapshot or a view.
    pub(crate) fn mounts(&self, key: &str) -> Result<Vec<Mount>> {
        let chain = self.store.chain(key)?;
        match chain.first() {
            Some(snapshot) if snapshot.kind == Kind::Committed => {
                Err(SnapshotError::NotActive(key.to_owned()))
            }
            _ => Ok(mounts::of(&chain, &self.directories)),
        }
    }

    /// Commits an active snapshot as it is now.
    pub(crate) fn commit(&self, key: &str, name: &str, labels: Labels) -> Result<Snapshot> {
        let usage = self.usage(key)?;
        self.store.commit(key, name, labels, usage)
    }

    /// What a snapshot takes beyond its parents. An image's data is the cache's.
    pub(crate) fn usage(&self, key: &str) -> Result<Usage> {
        let snapshot = self.store.get(key)?;
        match snapshot.kind {
            Kind::Active if snapshot.image.is_none() => self.directories.usage(snapshot.number),
            _ => Ok(snapshot.usage),
        }
    }

    /// Where the nearest lazy image below a snapshot, or in it, is mounted.
    pub(crate) fn image_of(&self, name: &str) -> Result<Option<(crate::Image, PathBuf)>> {
        let found = self
            .store
            .chain(name)?
            .into_iter()
            .find_map(|snapshot| Some((snapshot.image?, self.directories.fs(snapshot.number))));
        Ok(found)
    }
}
