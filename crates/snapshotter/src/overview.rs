//! An overview of the snapshots that keep images mounted.

use std::{
    collections::{BTreeMap, HashMap},
    path::PathBuf,
    sync::Arc,
};

use crate::{
    SnapshotError,
    mapping::Mapping,
    snapshotters::Snapshotters,
    storage::Storage,
    store::{FORMER, Kind, Snapshot},
};

/// The snapshots kept for containerd.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Contents {
    /// Layers.
    pub committed: usize,
    /// Writable snapshots, of containers.
    pub active: usize,
    /// Read-only snapshots.
    pub views: usize,
    /// Snapshots from before containerd's state was deleted, whose names it has reused since. They
    /// are counted above as well.
    pub former: usize,
    /// Removed snapshots whose files are not deleted yet, or are still mounted somewhere.
    pub removed: usize,
    /// The lazy images among the committed ones.
    pub images: Vec<ImageSnapshot>,
}

/// The snapshot of a lazy image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageSnapshot {
    /// Its name.
    pub name: String,
    /// The image's mountpoint.
    pub mountpoint: PathBuf,
    /// Active snapshots of containers on top of it, by name: the upper directories of all snapshots
    /// between image and container, lowest first, as overlayfs keeps them. Empty if the files have
    /// other owners there than in the container.
    pub containers: BTreeMap<String, Vec<PathBuf>>,
}

/// Reads the state of a [`crate::Server`].
#[derive(Clone, Debug)]
pub struct Overview(pub(crate) Arc<Snapshotters>);

impl Overview {
    /// Reads all records. Blocks.
    pub fn read(&self) -> Result<Contents, SnapshotError> {
        let mut contents = self.0.files.local.contents()?;
        if let Some(machines) = self.0.machines.get() {
            let Contents { committed, active, views, former, removed, images } =
                machines.local.contents()?;
            contents.committed += committed;
            contents.active += active;
            contents.views += views;
            contents.former += former;
            contents.removed += removed;
            contents.images.extend(images);
        }
        Ok(contents)
    }
}

impl Storage {
    fn contents(&self) -> Result<Contents, SnapshotError> {
        let all = self.store.all()?;
        let by_name: HashMap<_, _> =
            all.iter().map(|snapshot| (&*snapshot.name, snapshot)).collect();
        let mut containers = HashMap::<_, BTreeMap<_, _>>::new();
        let mut contents =
            Contents { removed: self.directories.thrown_away()?.len(), ..Contents::default() };
        for snapshot in &all {
            contents.former += usize::from(snapshot.name.starts_with(FORMER));
            match snapshot.kind {
                Kind::View => contents.views += 1,
                Kind::Active => contents.active += 1,
                Kind::Committed => contents.committed += 1,
            }
            if snapshot.kind == Kind::Active
                && snapshot.image.is_none()
                && let Some((image, numbers)) = image_of(snapshot, &by_name)
            {
                let mapped = !matches!(Mapping::of(&snapshot.labels), Ok(None));
                let numbers = numbers.into_iter().filter(|_| !mapped);
                let layers = numbers.map(|number| self.directories.fs(number)).collect();
                containers.entry(image).or_default().insert(snapshot.name.clone(), layers);
            }
        }
        for snapshot in all.iter().filter(|snapshot| snapshot.image.is_some()) {
            contents.images.push(ImageSnapshot {
                name: snapshot.name.clone(),
                mountpoint: self.directories.fs(snapshot.number),
                containers: containers.remove(&snapshot.number).unwrap_or_default(),
            });
        }
        Ok(contents)
    }
}

/// The number of the nearest image below a snapshot, and those of the snapshots on top of that,
/// lowest first.
fn image_of(snapshot: &Snapshot, all: &HashMap<&str, &Snapshot>) -> Option<(u64, Vec<u64>)> {
    let mut above = Vec::new();
    let mut at = snapshot;
    while at.image.is_none() {
        above.push(at.number);
        at = all.get(at.parent.as_deref()?)?;
    }
    above.reverse();
    Some((at.number, above))
}
