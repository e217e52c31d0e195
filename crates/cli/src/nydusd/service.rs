//! The mounts of one process, which the node's daemon makes.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Component, Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};

use anyhow::{Context as _, Result, bail};
use lazuli_runtime::daemon::{MountRequest, MountStatus, Request, Response};
use serde::{Deserialize, Serialize};

use super::{
    backend::{self, Backend},
    guest::{Changes, Share},
    supervisor,
};
use crate::{Session, daemon, path_context::PathContext as _};

/// How far the process is, in upstream's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub(super) enum Phase {
    /// It waits for the mounts of another process.
    Init,
    /// It has them.
    Ready,
    /// It answers everything.
    Running,
}

/// What is shown at a place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Instance {
    /// An image.
    Image {
        /// Its bootstrap.
        source: PathBuf,
        /// Where its blobs are, see [`Backend`].
        config: String,
    },
    /// A directory of the host, for a guest.
    Directory {
        /// The directory.
        source: PathBuf,
    },
}

impl Instance {
    fn source(&self) -> &Path {
        let (Instance::Image { source, .. } | Instance::Directory { source }) = self;
        source
    }
}

/// What the process's supervisor calls it, and where that listens.
#[derive(Clone, Debug)]
pub(super) struct Identity {
    pub(super) id: Option<String>,
    pub(super) supervisor: Option<PathBuf>,
}

#[derive(Debug)]
pub(super) struct Service {
    session: Session,
    /// The directory in which images appear.
    directory: PathBuf,
    /// What a guest sees of it, if there is one.
    guest: Option<Share>,
    pub(super) identity: Identity,
    held: Mutex<Held>,
}

#[derive(Debug)]
struct Held {
    phase: Phase,
    /// By their place below the directory, as clients name it.
    instances: BTreeMap<String, Instance>,
}

/// What a successor gets.
#[derive(Serialize, Deserialize)]
struct Handover {
    instances: BTreeMap<String, Instance>,
}

impl Service {
    /// Images appear below `directory`, an absolute path without symbolic links.
    pub(super) fn new(
        session: Session,
        directory: PathBuf,
        guest: Option<Share>,
        identity: Identity,
        phase: Phase,
    ) -> Self {
        let held = Mutex::new(Held { phase, instances: BTreeMap::new() });
        Service { session, directory, guest, identity, held }
    }

    pub(super) fn phase(&self) -> Phase {
        self.held().phase
    }

    /// Shows an image or a directory, unless it is shown there. Blocks, as everything here.
    pub(super) fn mount(&self, place: &str, instance: Instance) -> Result<()> {
        let directory = self.directory_of(place)?;
        let before = self.held().instances.get(place).cloned();
        if let Some(other) = &before
            && other.source() != instance.source()
        {
            bail!("{} is mounted at {place} already", other.source().display());
        }
        let changes = match &instance {
            Instance::Image { source, config } => {
                self.mount_image(&directory, source, config)?;
                Changes::Never
            }
            Instance::Directory { .. } => Changes::ByAnyone,
        };
        if before.is_none() {
            match (&self.guest, &instance) {
                (Some(guest), Instance::Image { .. }) => guest.show(place, &directory, changes)?,
                (Some(guest), Instance::Directory { source }) => {
                    guest.show(place, source, changes)?;
                }
                (None, Instance::Directory { .. }) => bail!(
                    "directories are shown to guests only: `nydusd virtiofs`, not `nydusd fuse`"
                ),
                (None, Instance::Image { .. }) => {}
            }
        }
        self.held().instances.insert(place.to_owned(), instance);
        Ok(())
    }

    fn mount_image(&self, directory: &Path, source: &Path, config: &str) -> Result<()> {
        let source = std::path::absolute(source).cannot("find", source)?;
        let Backend { image, plain_http, login } = Backend::parse(config)?;
        fs::create_dir_all(directory).cannot("create", directory)?;
        let request = MountRequest {
            bootstrap: Some(source),
            mountpoint: directory.to_owned(),
            plain_http,
            ..MountRequest::of(image)
        };
        daemon::connect(&self.session)?.call(&Request::MountBootstrap { request, login })?;
        Ok(())
    }

    /// Hides an image or a directory. Files of it that are open are served until they are closed.
    pub(super) fn unmount(&self, place: &str) -> Result<()> {
        let instance = self.held().instances.get(place).cloned();
        let instance = instance.with_context(|| format!("nothing is mounted at {place}"))?;
        let directory = self.directory_of(place)?;
        if let Some(guest) = &self.guest {
            guest.hide(place)?;
        }
        if let Instance::Directory { .. } = instance {
            self.held().instances.remove(place);
            return Ok(());
        }
        let request = Request::Umount { mountpoint: directory.clone(), lazy: true };
        daemon::connect(&self.session)?.call(&request)?;
        self.held().instances.remove(place);
        if directory != self.directory {
            match fs::remove_dir(&directory) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    tracing::warn!(directory = %directory.display(), %error, "it stays");
                }
                _ => {}
            }
        }
        Ok(())
    }

    pub(super) fn unmount_all(&self) -> Result<()> {
        let places: Vec<_> = self.held().instances.keys().cloned().collect();
        // All of them, whatever becomes of one.
        let unmounted: Vec<_> = places.iter().map(|place| self.unmount(place)).collect();
        unmounted.into_iter().collect()
    }

    /// Uses another login, as clients encode it, for an image.
    pub(super) fn set_login(&self, place: &str, auth: &str) -> Result<()> {
        let instance = self.held().instances.get(place).cloned();
        let Some(Instance::Image { source, config }) = instance else {
            bail!("no image is mounted at {place}");
        };
        let config = backend::with_login(&config, auth)?;
        self.mount(place, Instance::Image { source, config })
    }

    /// Sends the list of mounts to the supervisor.
    pub(super) fn send(&self) -> Result<()> {
        let instances = self.held().instances.clone();
        let document = serde_json::to_vec(&Handover { instances })?;
        supervisor::send(self.supervisor()?, &document)
    }

    /// Takes the mounts of another process over, of which the supervisor has the list.
    pub(super) fn take_over(&self) -> Result<()> {
        if self.phase() != Phase::Init {
            bail!("this process serves already, and takes nothing over");
        }
        let document = supervisor::receive(self.supervisor()?)?;
        let handover = serde_json::from_slice(&document);
        let Handover { instances } =
            handover.context("the supervisor has another program's list")?;
        for (place, instance) in instances {
            self.mount(&place, instance)?;
        }
        self.held().phase = Phase::Ready;
        Ok(())
    }

    pub(super) fn start(&self) -> Result<()> {
        match &mut self.held().phase {
            Phase::Init => bail!("there is nothing to serve before a takeover"),
            phase => *phase = Phase::Running,
        }
        Ok(())
    }

    /// The node's view of an image.
    pub(super) fn status(&self, place: &str) -> Result<MountStatus> {
        let directory = self.directory_of(place)?;
        let answer = daemon::connect(&self.session)?.call(&Request::Status)?;
        let Response::Status(status) = answer else { bail!("the daemon is of another version") };
        let mut mounts = status.mounts.into_iter();
        let mount = mounts.find(|mount| mount.mountpoint == directory);
        mount.with_context(|| format!("nothing is mounted at {place}"))
    }

    fn supervisor(&self) -> Result<&Path> {
        let socket = self.identity.supervisor.as_deref();
        socket.context("this process has no supervisor: it was started without --supervisor")
    }

    /// The directory of a place, which clients name by an absolute path.
    fn directory_of(&self, place: &str) -> Result<PathBuf> {
        let Some(relative) = place.strip_prefix('/') else {
            bail!("`{place}` is not a mount point, expected an absolute path");
        };
        let relative = Path::new(relative);
        if !relative.components().all(|part| matches!(part, Component::Normal(_))) {
            bail!("`{place}` is not a mount point, expected one without `.` and `..`");
        }
        // Without a slash at the end.
        Ok(self.directory.join(relative).components().collect())
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
