//! The directories of snapshots, and their trash.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    fs::{self, DirBuilder, Permissions},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, chown},
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use lazuli_sys::path_error::At as _;

use crate::{SnapshotError, store::Kind};

type Result<T> = std::result::Result<T, SnapshotError>;

/// `ROOT/snapshots` and `ROOT/lazy`.
///
/// Images are mounted in the latter. To map the ids of a container with several layers, containerd
/// clones the directory above all of them with every mount in it. It fails if one of these cannot
/// be mapped, as FUSE mounts cannot. So no mount lies beside the files of layers.
#[derive(Debug)]
pub(crate) struct Directories {
    root: PathBuf,
    lazy: PathBuf,
    /// Makes names in the trash that were not used before.
    thrown: AtomicU64,
}

/// The owner of the root of a new snapshot. A container sees the owner of the uppermost
/// directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    /// The user that runs this process.
    Us,
    /// The owner of the root of the parent with this number.
    Of(u64),
    /// This user and this group.
    Ids(u32, u32),
}

/// Returns whether an operation failed because the container removed its files meanwhile.
pub(crate) fn is_gone(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

impl Directories {
    /// Opens or creates both directories in the state directory.
    pub(crate) fn open(state: &Path) -> Result<Self> {
        for name in ["snapshots/trash", "lazy"] {
            let path = state.join(name);
            DirBuilder::new().recursive(true).mode(0o700).create(&path).at(&path)?;
        }
        let state = state.canonicalize().at(state)?;
        let (root, lazy) = (state.join("snapshots"), state.join("lazy"));
        let special = [':', ',', '\\', '"'];
        if root.to_str().is_none_or(|root| root.contains(special)) {
            return Err(SnapshotError::Root(root));
        }
        Ok(Directories { root, lazy, thrown: AtomicU64::new(0) })
    }

    /// `ROOT/snapshots`
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// `ROOT/lazy`
    pub(crate) fn lazy(&self) -> &Path {
        &self.lazy
    }

    /// The database's file.
    pub(crate) fn metadata(&self) -> PathBuf {
        self.root.join("metadata.redb")
    }

    /// The directory of a snapshot's files: its own, or those of the image that is mounted for it.
    pub(crate) fn fs(&self, number: u64) -> PathBuf {
        let lazy = self.image(number);
        if lazy.exists() { lazy.join("fs") } else { self.own(number) }
    }

    /// The mountpoint of a snapshot's image. Images that an earlier version mounted beside the
    /// files of other snapshots have none here.
    fn image(&self, number: u64) -> PathBuf {
        self.lazy.join(number.to_string())
    }

    /// A snapshot's own files.
    fn own(&self, number: u64) -> PathBuf {
        self.root.join(number.to_string()).join("fs")
    }

    /// The work directory that overlayfs needs for an active snapshot.
    pub(crate) fn work(&self, number: u64) -> PathBuf {
        self.root.join(number.to_string()).join("work")
    }

    fn trash(&self) -> PathBuf {
        self.root.join("trash")
    }

    /// Makes the directory in which the image of a snapshot is to be mounted.
    pub(crate) fn make_image(&self, number: u64) -> Result<()> {
        let directory = self.image(number);
        DirBuilder::new().mode(0o700).create(&directory).at(&directory)?;
        let fs = directory.join("fs");
        Ok(fs::create_dir(&fs).at(&fs)?)
    }

    /// Makes the directory of a snapshot.
    pub(crate) fn make(&self, number: u64, owner: Owner, kind: Kind) -> Result<()> {
        let directory = self.root.join(number.to_string());
        if directory.exists() || self.image(number).exists() {
            // Left by a transaction that failed, or that a crash interrupted.
            self.throw_away(number)?;
        }
        DirBuilder::new().mode(0o700).create(&directory).at(&directory)?;
        let fs = self.own(number);
        fs::create_dir(&fs).at(&fs)?;
        // Independent of the umask.
        fs::set_permissions(&fs, Permissions::from_mode(0o755)).at(&fs)?;
        let ids = match owner {
            Owner::Us => None,
            Owner::Ids(uid, gid) => Some((uid, gid)),
            Owner::Of(parent) => {
                let parent = self.fs(parent);
                let metadata = fs::metadata(&parent).at(&parent)?;
                Some((metadata.uid(), metadata.gid())).filter(|ids| *ids != (0, 0))
            }
        };
        if let Some((uid, gid)) = ids {
            chown(&fs, Some(uid), Some(gid)).at(&fs)?;
        }
        if kind == Kind::Active {
            let work = self.work(number);
            fs::create_dir(&work).at(&work)?;
            fs::set_permissions(&work, Permissions::from_mode(0o711)).at(&work)?;
        }
        Ok(())
    }

    /// Moves the directories of a snapshot away, in the same time however much is in them. A
    /// process that has its files mounted notices nothing.
    pub(crate) fn throw_away(&self, number: u64) -> Result<()> {
        for path in [self.image(number), self.root.join(number.to_string())] {
            match fs::rename(&path, self.new_in_trash(number)) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                result => result.at(&path)?,
            }
        }
        Ok(())
    }

    /// A name in the trash that nothing has.
    fn new_in_trash(&self, number: u64) -> PathBuf {
        loop {
            let name = self.thrown.fetch_add(1, Ordering::Relaxed);
            let path = self.trash().join(format!("{number}-{name}"));
            // Renaming would replace an empty directory and fail on a full one of an earlier
            // process.
            if fs::symlink_metadata(&path).is_err() {
                return path;
            }
        }
    }

    /// Directories of no snapshot, from a crash.
    pub(crate) fn strays(&self, known: &HashSet<u64>) -> Result<Vec<u64>> {
        let mut strays = BTreeSet::new();
        for directory in [&self.root, &self.lazy] {
            for entry in fs::read_dir(directory).at(directory)? {
                let name = entry.at(directory)?.file_name();
                let number = name.to_str().and_then(|name| name.parse().ok());
                strays.extend(number.filter(|number| !known.contains(number)));
            }
        }
        Ok(strays.into_iter().collect())
    }

    /// Lists the trash, by the numbers of the snapshots.
    pub(crate) fn thrown_away(&self) -> Result<BTreeMap<u64, Vec<PathBuf>>> {
        let trash = self.trash();
        let mut all = BTreeMap::<u64, Vec<_>>::new();
        for entry in fs::read_dir(&trash).at(&trash)? {
            let path = entry.at(&trash)?.path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            let number = name.split('-').next().and_then(|number| number.parse().ok());
            // Files of other programs in the trash are deleted too.
            all.entry(number.unwrap_or(0)).or_default().push(path);
        }
        Ok(all)
    }

    /// Deletes the trash of one snapshot; may take long. Directories may be nested to any depth:
    /// entries are moved up before they are deleted, so this neither recurses nor uses long paths.
    pub(crate) fn delete(&self, number: u64, thrown: Vec<PathBuf>) -> Result<()> {
        let mut paths = thrown;
        while let Some(path) = paths.pop() {
            let entries = match fs::read_dir(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotADirectory => {
                    fs::remove_file(&path).at(&path)?;
                    continue;
                }
                entries => entries.at(&path)?,
            };
            for entry in entries {
                let entry = entry.at(&path)?;
                let inner = entry.path();
                if !entry.file_type().at(&inner)?.is_dir() {
                    fs::remove_file(&inner).at(&inner)?;
                } else if fs::remove_dir(&inner).is_err() {
                    let moved = self.new_in_trash(number);
                    fs::rename(&inner, &moved).at(&inner)?;
                    paths.push(moved);
                }
            }
            fs::remove_dir(&path).at(&path)?;
        }
        Ok(())
    }
}
