//! Pull secrets that came with images, on disk: containers that run have to be served by the next
//! worker, too.
//!
//! `ROOT/logins` has one file per mount point, for its owner alone. A login is kept from the first
//! mount of an image until it is unmounted for good, and so outlasts a start of the machine.

use std::{
    io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::SystemTime,
};

use lazuli_registry::{ImageName, Keyring, Login};
use serde::{Deserialize, Serialize};

use crate::{
    daemon::{
        api::MountRequest,
        record::{Record, Records, mount_key},
    },
    kernel::mount,
};

#[derive(Debug, Serialize, Deserialize)]
struct LoginRecord {
    mountpoint: PathBuf,
    image: String,
    login: Login,
    /// The newest is tried first.
    since: SystemTime,
}

impl Record for LoginRecord {
    fn key(&self) -> String {
        mount_key(&self.mountpoint)
    }
}

/// All logins of mounts.
#[derive(Debug)]
pub(in crate::daemon) struct Logins {
    keyring: Keyring,
    records: Arc<Records<LoginRecord>>,
}

/// A login that is forgotten when this is dropped.
#[derive(Debug)]
pub(in crate::daemon) struct Lent {
    keyring: Keyring,
    owner: String,
}

impl Logins {
    /// Loads the records in `directory` into `keyring`.
    pub(in crate::daemon) fn open(directory: &Path, keyring: &Keyring) -> io::Result<Self> {
        let records = Records::open(directory.to_owned())?;
        let (keyring, records) = (keyring.clone(), Arc::new(records));
        let logins = Logins { keyring, records };
        let mut all = logins.records.all()?;
        all.sort_by_key(|record: &LoginRecord| record.since);
        for record in all {
            if mount::device(&record.mountpoint).is_ok() {
                logins.take(&record);
            } else {
                logins.remove(&record.mountpoint);
            }
        }
        Ok(logins)
    }

    fn take(&self, record: &LoginRecord) {
        match record.image.parse() {
            Ok(image) => self.keyring.set(&record.key(), &image, record.login.clone()),
            Err(error) => tracing::warn!(%error, "a login is for no image"),
        }
    }

    /// Uses a login for a mount's image from now on.
    pub(in crate::daemon) async fn set(
        &self,
        request: &MountRequest,
        login: Login,
    ) -> io::Result<()> {
        let record = LoginRecord {
            mountpoint: request.mountpoint.clone(),
            image: request.image.clone(),
            login,
            since: SystemTime::now(),
        };
        self.take(&record);
        let records = self.records.clone();
        // The disk may be slow, and readers must not wait for it here.
        let written = tokio::task::spawn_blocking(move || records.write_secret(&record));
        written.await.map_err(io::Error::other)?
    }

    /// The login of a mount.
    pub(in crate::daemon) fn of(&self, mountpoint: &Path) -> Option<Login> {
        self.keyring.held_by(&mount_key(mountpoint))
    }

    /// Uses a login for a moment, before anything is mounted.
    pub(in crate::daemon) fn lend(&self, image: &ImageName, login: Login) -> Lent {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let owner = format!("lent {}", NUMBER.fetch_add(1, Ordering::Relaxed));
        self.keyring.set(&owner, image, login);
        Lent { keyring: self.keyring.clone(), owner }
    }

    /// Forgets the login of a mount.
    pub(in crate::daemon) fn remove(&self, mountpoint: &Path) {
        let key = mount_key(mountpoint);
        self.keyring.remove(&key);
        if let Err(error) = self.records.remove(&key) {
            tracing::warn!(mountpoint = %mountpoint.display(), %error, "stale login stays");
        }
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.keyring.remove(&self.owner);
    }
}
