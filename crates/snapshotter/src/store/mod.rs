//! Records of snapshots: names, parents, kinds, labels. Every change is durable when it is
//! answered, and atomic.

mod database;
mod record;

use std::{
    collections::{BTreeMap, HashSet},
    path::Path,
    sync::{Mutex, PoisonError},
    time::SystemTime,
};

use redb::{
    Database, MultimapTableDefinition, ReadableDatabase, ReadableMultimapTable, ReadableTable,
    TableDefinition, WriteTransaction,
};

use crate::{
    SnapshotError,
    label::{self, Labels},
};
pub(crate) use record::{Kind, New, Snapshot, Usage};
use record::{get, is_numbered, parse, put};

type Result<T> = std::result::Result<T, SnapshotError>;

/// Records by name.
const SNAPSHOTS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("snapshots");
/// Names of children by the name of their parent.
const CHILDREN: MultimapTableDefinition<'_, &str, &str> = MultimapTableDefinition::new("children");
/// The last number given to a directory.
const NUMBERS: TableDefinition<'_, &str, u64> = TableDefinition::new("numbers");
const LAST: &str = "last";
/// Numbers of removed snapshots whose files still exist, with the numbers of their parents.
const REMOVED: MultimapTableDefinition<'_, u64, u64> = MultimapTableDefinition::new("removed");

/// Prefix of renamed snapshots, whose names containerd gave to others. containerd's namespaces have
/// no colon in their names.
pub(crate) const FORMER: &str = "former:";

/// The snapshots.
#[derive(Debug)]
pub(crate) struct Store {
    file: database::File,
    /// The last number tried by this process: a failed attempt may have left a directory.
    last: Mutex<u64>,
}

impl Store {
    /// Opens or creates the file `path`.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let store = Store { file: database::File::new(path), last: Mutex::default() };
        store.write(|transaction| {
            transaction.open_table(SNAPSHOTS)?;
            transaction.open_multimap_table(CHILDREN)?;
            transaction.open_table(NUMBERS)?;
            transaction.open_multimap_table(REMOVED)?;
            Ok(())
        })?;
        Ok(store)
    }

    /// Changes something, unless `work` fails.
    fn write<T>(&self, work: impl FnOnce(&WriteTransaction) -> Result<T>) -> Result<T> {
        self.file.with(|database| {
            let transaction = database.begin_write()?;
            let result = work(&transaction)?;
            transaction.commit()?;
            Ok(result)
        })
    }

    fn read<T>(&self, work: impl FnOnce(&Database) -> Result<T>) -> Result<T> {
        self.file.with(work)
    }

    /// Creates a snapshot, whose directory `make` makes.
    ///
    /// If containerd reuses a name that it counts up, the snapshot under that name was made before
    /// containerd's state was deleted. That snapshot is renamed and keeps everything else, see
    /// [`set_aside`].
    pub(crate) fn create(
        &self,
        new: New,
        make: impl FnOnce(u64) -> Result<()>,
    ) -> Result<Snapshot> {
        if new.name.is_empty() {
            return Err(SnapshotError::Invalid("a snapshot needs a name".to_owned()));
        }
        self.write(|transaction| {
            let number = self.next_number(transaction)?;
            let New { name, parent, kind, labels, image } = new;
            let now = SystemTime::now();
            // Only Lazuli records a layer of an ordinary image, after it has verified the content.
            let proven = image.as_ref().is_some_and(|image| image.layers.is_some());
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
                proven,
                key: None,
            };
            if let Some(parent) = &snapshot.parent {
                let snapshots = transaction.open_table(SNAPSHOTS)?;
                if get(&snapshots, parent).map_err(lost)?.kind != Kind::Committed {
                    return Err(SnapshotError::ParentNotCommitted(parent.clone()));
                }
            }
            make_room(transaction, &snapshot.name)?;
            if let Some(parent) = &snapshot.parent {
                transaction.open_multimap_table(CHILDREN)?.insert(&**parent, &*snapshot.name)?;
            }
            put(&mut transaction.open_table(SNAPSHOTS)?, &snapshot)?;
            self.give(transaction, number)?;
            make(number)?;
            Ok(snapshot)
        })
    }

    fn next_number(&self, transaction: &WriteTransaction) -> Result<u64> {
        let stored = transaction.open_table(NUMBERS)?.get(LAST)?.map_or(0, |last| last.value());
        Ok(stored.max(*self.last.lock().unwrap_or_else(PoisonError::into_inner)) + 1)
    }

    /// Marks the number as used, even if the transaction fails.
    fn give(&self, transaction: &WriteTransaction, number: u64) -> Result<()> {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = number;
        transaction.open_table(NUMBERS)?.insert(LAST, number)?;
        Ok(())
    }

    /// Commits the active snapshot `key` under another name and with these labels. A snapshot
    /// without a parent can get one here.
    pub(crate) fn commit(
        &self,
        key: &str,
        name: &str,
        parent: Option<String>,
        labels: Labels,
        usage: Usage,
    ) -> Result<Snapshot> {
        if name.is_empty() {
            return Err(SnapshotError::Invalid("a snapshot needs a name".to_owned()));
        }
        self.write(|transaction| {
            let found = get(&transaction.open_table(SNAPSHOTS)?, key);
            let mut snapshot = match found {
                Err(SnapshotError::NotFound(key)) => {
                    return committed_before(transaction, key, name);
                }
                other => other?,
            };
            if snapshot.kind != Kind::Active {
                return Err(SnapshotError::NotActive(key.to_owned()));
            }
            match (&snapshot.parent, parent) {
                (None, Some(parent)) => {
                    let snapshots = transaction.open_table(SNAPSHOTS)?;
                    if get(&snapshots, &parent).map_err(lost)?.kind != Kind::Committed {
                        return Err(SnapshotError::ParentNotCommitted(parent));
                    }
                    snapshot.parent = Some(parent);
                }
                (Some(old), Some(new)) if *old != new => {
                    let name = key.to_owned();
                    return Err(SnapshotError::Immutable { field: "parent".to_owned(), name });
                }
                _ => {}
            }
            if key == name {
                return Err(SnapshotError::AlreadyExists(key.to_owned()));
            }
            make_room(transaction, name)?;
            let mut snapshots = transaction.open_table(SNAPSHOTS)?;
            snapshots.remove(key)?;
            if let Some(parent) = &snapshot.parent {
                let mut children = transaction.open_multimap_table(CHILDREN)?;
                children.remove(&**parent, key)?;
                children.insert(&**parent, name)?;
            }
            let now = SystemTime::now();
            name.clone_into(&mut snapshot.name);
            snapshot.key = Some(key.to_owned());
            snapshot.kind = Kind::Committed;
            // Only this process mounts and commits images, and it has looked before.
            snapshot.proven = snapshot.image.is_some();
            snapshot.labels = label::kept(labels);
            (snapshot.created, snapshot.updated) = (now, now);
            snapshot.usage = usage;
            put(&mut snapshots, &snapshot)?;
            Ok(snapshot)
        })
    }

    /// Records that a snapshot's image has been proven to match the snapshot's name.
    pub(crate) fn prove(&self, name: &str) -> Result<()> {
        self.write(|transaction| {
            let mut snapshots = transaction.open_table(SNAPSHOTS)?;
            let mut snapshot = get(&snapshots, name)?;
            snapshot.proven = true;
            put(&mut snapshots, &snapshot)
        })
    }

    /// Forgets a snapshot that has no children. Of its number and its parents' it is known until
    /// [`Store::forget_removed`] that they were one snapshot.
    pub(crate) fn remove(&self, name: &str) -> Result<Snapshot> {
        self.write(|transaction| {
            let mut snapshots = transaction.open_table(SNAPSHOTS)?;
            let [snapshot, below @ ..] = &chain(&snapshots, name)?[..] else {
                return Err(SnapshotError::NotFound(name.to_owned()));
            };
            let mut children = transaction.open_multimap_table(CHILDREN)?;
            if !children.get(name)?.is_empty() {
                return Err(SnapshotError::HasChildren(name.to_owned()));
            }
            if let Some(parent) = &snapshot.parent {
                children.remove(&**parent, name)?;
            }
            snapshots.remove(name)?;
            let mut removed = transaction.open_multimap_table(REMOVED)?;
            for below in below {
                removed.insert(snapshot.number, below.number)?;
            }
            Ok(snapshot.clone())
        })
    }

    /// Parents of removed snapshots, by number.
    pub(crate) fn removed(&self) -> Result<BTreeMap<u64, Vec<u64>>> {
        self.read(|database| {
            let removed = database.begin_read()?.open_multimap_table(REMOVED)?;
            let mut all = BTreeMap::new();
            for entry in removed.iter()? {
                let (number, below) = entry?;
                let below: std::result::Result<Vec<_>, _> =
                    below.map(|below| below.map(|below| below.value())).collect();
                all.insert(number.value(), below?);
            }
            Ok(all)
        })
    }

    /// Forgets removed snapshots, whose files are gone.
    pub(crate) fn forget_removed(&self, numbers: &[u64]) -> Result<()> {
        if numbers.is_empty() {
            return Ok(());
        }
        self.write(|transaction| {
            let mut removed = transaction.open_multimap_table(REMOVED)?;
            for number in numbers {
                removed.remove_all(number)?;
            }
            Ok(())
        })
    }

    /// Changes labels: those that `fields` names (`labels` or `labels.KEY`), all if it names
    /// nothing.
    pub(crate) fn update(&self, name: &str, labels: Labels, fields: &[String]) -> Result<Snapshot> {
        self.write(|transaction| {
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
            Ok(snapshot)
        })
    }

    /// One snapshot.
    pub(crate) fn get(&self, name: &str) -> Result<Snapshot> {
        self.read(|database| get(&database.begin_read()?.open_table(SNAPSHOTS)?, name))
    }

    /// A snapshot, its parent, the parent of that, and so on.
    pub(crate) fn chain(&self, name: &str) -> Result<Vec<Snapshot>> {
        self.read(|database| chain(&database.begin_read()?.open_table(SNAPSHOTS)?, name))
    }

    /// All snapshots, ordered by name.
    pub(crate) fn all(&self) -> Result<Vec<Snapshot>> {
        self.read(|database| all(&database.begin_read()?.open_table(SNAPSHOTS)?))
    }

    /// Calls `look` with the numbers of all snapshots, while none is created: directories with
    /// other numbers have no owner.
    pub(crate) fn at_rest<T>(&self, look: impl FnOnce(&HashSet<u64>) -> Result<T>) -> Result<T> {
        self.write(|transaction| {
            let all = all(&transaction.open_table(SNAPSHOTS)?)?;
            look(&all.into_iter().map(|snapshot| snapshot.number).collect())
        })
    }
}

/// A snapshot, its parent, the parent of that, and so on.
fn chain(
    snapshots: &impl ReadableTable<&'static str, &'static [u8]>,
    name: &str,
) -> Result<Vec<Snapshot>> {
    let mut chain = vec![get(snapshots, name)?];
    while let Some(parent) = chain.last().and_then(|child| child.parent.as_ref()) {
        chain.push(get(snapshots, parent)?);
    }
    Ok(chain)
}

fn all(snapshots: &impl ReadableTable<&'static str, &'static [u8]>) -> Result<Vec<Snapshot>> {
    let mut all = Vec::new();
    for entry in snapshots.iter()? {
        let (name, record) = entry?;
        all.push(parse(name.value(), record.value())?);
    }
    Ok(all)
}

/// The error for a snapshot that containerd believes to exist.
pub(crate) fn lost(error: SnapshotError) -> SnapshotError {
    match error {
        SnapshotError::NotFound(name) if is_numbered(&name) => SnapshotError::Lost(name),
        other => other,
    }
}

/// Answers a commit of an unknown key: containerd repeats a commit whose answer it lost.
fn committed_before(transaction: &WriteTransaction, key: String, name: &str) -> Result<Snapshot> {
    match get(&transaction.open_table(SNAPSHOTS)?, name) {
        Ok(snapshot) if snapshot.key.as_ref() == Some(&key) => Ok(snapshot),
        Ok(_) if !is_numbered(name) => Err(SnapshotError::AlreadyExists(name.to_owned())),
        _ => Err(SnapshotError::NotFound(key)),
    }
}

/// Makes sure that nothing has the name `name`, see [`Store::create`].
fn make_room(transaction: &WriteTransaction, name: &str) -> Result<()> {
    let found = get(&transaction.open_table(SNAPSHOTS)?, name);
    match found {
        Err(SnapshotError::NotFound(_)) => Ok(()),
        Ok(_) if !is_numbered(name) => Err(SnapshotError::AlreadyExists(name.to_owned())),
        Ok(former) => set_aside(transaction, former),
        Err(other) => Err(other),
    }
}

/// Renames a snapshot, whose children, files and mounts are kept. containerd's garbage collector
/// removes snapshots with names that it doesn't know, children first.
fn set_aside(transaction: &WriteTransaction, mut former: Snapshot) -> Result<()> {
    let name = std::mem::take(&mut former.name);
    former.name = format!("{FORMER}{}:{name}", former.number);
    tracing::warn!(
        snapshot = name,
        new_name = former.name,
        "containerd gives a name to a snapshot that another one has: its state is not the one that we served before"
    );
    let mut snapshots = transaction.open_table(SNAPSHOTS)?;
    let mut children = transaction.open_multimap_table(CHILDREN)?;
    snapshots.remove(&*name)?;
    if let Some(parent) = &former.parent {
        children.remove(&**parent, &*name)?;
        children.insert(&**parent, &*former.name)?;
    }
    let mut names = Vec::new();
    for child in children.remove_all(&*name)? {
        names.push(child?.value().to_owned());
    }
    for child in names {
        children.insert(&*former.name, &*child)?;
        let mut child = get(&snapshots, &child)?;
        child.parent = Some(former.name.clone());
        put(&mut snapshots, &child)?;
    }
    put(&mut snapshots, &former)
}

#[cfg(test)]
mod tests;
