//! The database file of the records.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::Duration,
};

use redb::{Database, DatabaseError};

use super::Result;
use crate::SnapshotError;

/// How often, and how long, a file is waited for that is still being let go: 2 s.
const OPEN_ATTEMPTS: u32 = 400;
const PAUSE: Duration = Duration::from_millis(5);

/// A database that survives a full disk: redb refuses everything after the first failure, until the
/// file is opened again.
#[derive(Debug)]
pub(super) struct File {
    path: PathBuf,
    open: Mutex<Option<Arc<Database>>>,
}

impl File {
    pub(super) fn new(path: &Path) -> Self {
        File { path: path.to_owned(), open: Mutex::default() }
    }

    /// Does something with the database. After a failure of the disk the next caller opens it anew.
    pub(super) fn with<T>(&self, work: impl FnOnce(&Database) -> Result<T>) -> Result<T> {
        let database = self.open()?;
        let result = work(&database);
        drop(database);
        result.map_err(|error| match error {
            SnapshotError::Store { source, .. } => {
                *self.open.lock().unwrap_or_else(PoisonError::into_inner) = None;
                self.failed(*source)
            }
            other => other,
        })
    }

    fn open(&self) -> Result<Arc<Database>> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(database) = &*open {
            return Ok(database.clone());
        }
        let mut created = self.create();
        // Requests that have met the failure, too, are about to let go of the file.
        for _ in 0..OPEN_ATTEMPTS {
            if !matches!(created, Ok(Err(DatabaseError::DatabaseAlreadyOpen))) {
                break;
            }
            thread::sleep(PAUSE);
            created = self.create();
        }
        let database = match created {
            Ok(Ok(database)) => Arc::new(database),
            Ok(Err(error)) => return Err(self.failed(error.into())),
            Err(_) => return Err(self.failed(redb::Error::Corrupted("it cannot be read".into()))),
        };
        *open = Some(database.clone());
        Ok(database)
    }

    fn create(&self) -> thread::Result<std::result::Result<Database, DatabaseError>> {
        // redb panics on damage that it doesn't expect.
        catch_unwind(AssertUnwindSafe(|| Database::create(&self.path)))
    }

    fn failed(&self, source: redb::Error) -> SnapshotError {
        SnapshotError::Store { path: self.path.clone(), source: Box::new(source) }
    }
}
