//! What snapshots there are: names, parents, kinds, labels. Every change is on the disk when it is answered, whole or
//! not at all.

use std::{collections::HashSet, path::Path, time::SystemTime};

use redb::{
    Database, MultimapTableDefinition, ReadableDatabase, ReadableMultimapTable, ReadableTable,
    Table, TableDefinition, WriteTransaction,
};
use serde::{Deserialize, Serialize};

use crate::{
    Image, SnapshotError,
    label::{self, Labels},
};

type Result<T> = std::result::Result<T, SnapshotError>;

/// Records by name.
const SNAPSHOTS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("snapshots");
/// Names of children by the name of their parent.
const CHILDREN: MultimapTableDefinition<'_, &str, &str> = MultimapTableDefinition::new("children");
/// The last number given to a directory.
const NUMBERS: TableDefinition<'_, &str, u64> = TableDefinition::new("numbers");
const LAST: &str = "last";

/// What can be done with a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Kind {
    /// Read.
    View,
    /// Read, written and committed.
    Active,
    /// Be the parent of others.
    Committed,
}

/// Room that a snapshot takes beyond its parents.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Usage {
    /// Bytes on the disk.
    pub(crate) size: u64,
    /// Files, directories and so on.
    pub(crate) inodes: u64,
}

/// One snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Snapshot {
    /// Its directory; never given to another one.
    pub(crate) number: u64,
    pub(crate) name: String,
    pub(crate) parent: Option<String>,
    pub(crate) kind: Kind,
    pub(crate) labels: Labels,
    pub(crate) created: SystemTime,
    pub(crate) updated: SystemTime,
    /// Of committed ones.
    #[serde(default)]
    pub(crate) usage: Usage,
    /// The lazy image that is mounted in its directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) image: Option<Image>,
}

/// A snapshot to be.
#[derive(Clone, Debug)]
pub(crate) struct New {
    pub(crate) name: String,
    pub(crate) parent: Option<String>,
    pub(crate) kind: Kind,
    pub(crate) labels: Labels,
    pub(crate) image: Option<Image>,
}

/// The database.
#[derive(Debug)]
pub(crate) struct Store(Database);

impl Store {
    /// Opens or creates the file `path`.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let database = Database::create(path)?;
        let transaction = database.begin_write()?;
        transaction.open_table(SNAPSHOTS)?;
        transaction.open_multimap_table(CHILDREN)?;
        transaction.open_table(NUMBERS)?;
        transaction.commit()?;
        Ok(Store(database))
    }

    /// Creates a snapshot, whose directory `make` makes.
    pub(crate) fn create(
        &self,
        new: New,
        make: impl FnOnce(u64) -> Result<()>,
    ) -> Result<Snapshot> {
        if new.name.is_empty() {
            return Err(SnapshotError::Invalid("a snapshot needs a name".to_owned()));
        }
        let transaction = self.0.begin_write()?;
        let number = {
            let mut numbers = transaction.open_table(NUMBERS)?;
            let last = numbers.get(LAST)?.map_or(0, |last| last.value());
            numbers.insert(LAST, last + 1)?;
            last + 1
        };
        let New { name, parent, kind, labels, image } = new;
        let now = SystemTime::now();
        let snapshot = Snapshot {
            number,
            name,
            parent,
            kind,
            labels: label::kept(labels),
            created: now,
            updated: now,
            usage: Usage::default(),
            image,
        };
        {
            let mut snapshots = transaction.open_table(SNAPSHOTS)?;
            if snapshots.get(&*snapshot.name)?.is_some() {
                return Err(SnapshotError::AlreadyExists(snapshot.name));
            }
            if let Some(parent) = &snapshot.parent {
                if get(&snapshots, parent)?.kind != Kind::Committed {
                    return Err(SnapshotError::ParentNotCommitted(parent.clone()));
                }
                transaction.open_multimap_table(CHILDREN)?.insert(&**parent, &*snapshot.name)?;
            }
            put(&mut snapshots, &snapshot)?;
        }
        make(number)?;
        transaction.commit()?;
        Ok(snapshot)
    }

    /// Makes the active snapshot `key` a committed one, under another name and with these labels.
    pub(crate) fn commit(
        &self,
        key: &str,
        name: &str,
        labels: Labels,
        usage: Usage,
    ) -> Result<Snapshot> {
        if name.is_empty() {
            return Err(SnapshotError::Invalid("a snapshot needs a name".to_owned()));
        }
        let transaction = self.0.begin_write()?;
        let snapshot = {
            let mut snapshots = transaction.open_table(SNAPSHOTS)?;
            if snapshots.get(name)?.is_some() {
                return Err(SnapshotError::AlreadyExists(name.to_owned()));
            }
            let mut snapshot = get(&snapshots, key)?;
            if snapshot.kind != Kind::Active {
                return Err(SnapshotError::NotActive(key.to_owned()));
            }
            snapshots.remove(key)?;
            if let Some(parent) = &snapshot.parent {
                let mut children = transaction.open_multimap_table(CHILDREN)?;
                children.remove(&**parent, key)?;
                children.insert(&**parent, name)?;
            }
            let now = SystemTime::now();
            name.clone_into(&mut snapshot.name);
            snapshot.kind = Kind::Committed;
            snapshot.labels = label::kept(labels);
            (snapshot.created, snapshot.updated) = (now, now);
            snapshot.usage = usage;
            put(&mut snapshots, &snapshot)?;
            snapshot
        };
        transaction.commit()?;
        Ok(snapshot)
    }

    /// Forgets a snapshot that has no children.
    pub(crate) fn remove(&self, name: &str) -> Result<Snapshot> {
        let transaction: WriteTransaction = self.0.begin_write()?;
        let snapshot = {
            let mut snapshots = transaction.open_table(SNAPSHOTS)?;
            let snapshot = get(&snapshots, name)?;
            let mut children = transaction.open_multimap_table(CHILDREN)?;
            if !children.get(name)?.is_empty() {
                return Err(SnapshotError::HasChildren(name.to_owned()));
            }
            if let Some(parent) = &snapshot.parent {
                children.remove(&**parent, name)?;
            }
            snapshots.remove(name)?;
            snapshot
        };
        transaction.commit()?;
        Ok(snapshot)
    }

    /// Changes labels: those that `fields` names (`labels` or `labels.KEY`), all if it names nothing.
    pub(crate) fn update(&self, name: &str, labels: Labels, fields: &[String]) -> Result<Snapshot> {
        let transaction = self.0.begin_write()?;
        let snapshot = {
            let mut snapshots = transaction.open_table(SNAPSHOTS)?;
            let mut snapshot = get(&snapshots, name)?;
            if fields.is_empty() {
                snapshot.labels.clone_from(&labels);
            }
            for field in fields {
                match field.strip_prefix("labels.") {
                    Some(key) => {
                        let value = labels.get(key).cloned().unwrap_or_default();
                        snapshot.labels.insert(key.to_owned(), value);
                    }
                    None if field == "labels" => snapshot.labels.clone_from(&labels),
                    None => {
                        let (field, name) = (field.clone(), name.to_owned());
                        return Err(SnapshotError::Immutable { field, name });
                    }
                }
            }
            snapshot.labels = label::kept(snapshot.labels);
            snapshot.updated = SystemTime::now();
            put(&mut snapshots, &snapshot)?;
            snapshot
        };
        transaction.commit()?;
        Ok(snapshot)
    }

    /// One snapshot.
    pub(crate) fn get(&self, name: &str) -> Result<Snapshot> {
        get(&self.0.begin_read()?.open_table(SNAPSHOTS)?, name)
    }

    /// A snapshot, its parent, the parent of that, and so on.
    pub(crate) fn chain(&self, name: &str) -> Result<Vec<Snapshot>> {
        let snapshots = self.0.begin_read()?.open_table(SNAPSHOTS)?;
        let mut chain = vec![get(&snapshots, name)?];
        while let Some(parent) = chain.last().and_then(|child| child.parent.as_ref()) {
            chain.push(get(&snapshots, parent)?);
        }
        Ok(chain)
    }

    /// All snapshots, ordered by name.
    pub(crate) fn all(&self) -> Result<Vec<Snapshot>> {
        let snapshots = self.0.begin_read()?.open_table(SNAPSHOTS)?;
        let mut all = Vec::new();
        for entry in snapshots.iter()? {
            let (name, record) = entry?;
            all.push(parse(name.value(), record.value())?);
        }
        Ok(all)
    }

    /// Directories that belong to snapshots.
    pub(crate) fn numbers(&self) -> Result<HashSet<u64>> {
        Ok(self.all()?.into_iter().map(|snapshot| snapshot.number).collect())
    }
}

fn get(
    snapshots: &impl ReadableTable<&'static str, &'static [u8]>,
    name: &str,
) -> Result<Snapshot> {
    match snapshots.get(name)? {
        Some(record) => parse(name, record.value()),
        None => Err(SnapshotError::NotFound(name.to_owned())),
    }
}

fn parse(name: &str, record: &[u8]) -> Result<Snapshot> {
    serde_json::from_slice(record)
        .map_err(|source| SnapshotError::Record { name: name.to_owned(), source })
}

fn put(snapshots: &mut Table<'_, &str, &[u8]>, snapshot: &Snapshot) -> Result<()> {
    let record = serde_json::to_vec(snapshot)
        .map_err(|source| SnapshotError::Record { name: snapshot.name.clone(), source })?;
    snapshots.insert(&*snapshot.name, &*record)?;
    Ok(())
}

#[cfg(test)]
mod tests;
