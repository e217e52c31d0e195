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

/// One image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Instance {
    /// Its bootstrap.
    pub(super) source: PathBuf,
    /// Where its blobs are, see [`Backend`].
    pub(super) config: String,
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
        identity: Identity,
        phase: Phase,
    ) -> Self {
        let held = Mutex::new(Held { phase, instances: BTreeMap::new() });
        Service { session, directory, identity, held }
    }

    pub(super) fn phase(&self) -> Phase {
        self.held().phase
    }

    /// Mounts an image, unless it is mounted there. Blocks, as everything here.
    pub(super) fn mount(&self, place: &str, instance: Instance) -> Result<()> {
        let directory = self.directory_of(place)?;
        if let Some(other) = self.held().instances.get(place)
            && other.source != instance.source
        {
            bail!("{place} is mounted already, with bootstrap {}", other.source.display());
        }
        let source = std::path::absolute(&instance.source).cannot("find", &instance.source)?;
        let Backend { image, plain_http, login } = Backend::parse(&instance.config)?;
        fs::create_dir_all(&directory).cannot("create", &directory)?;
        let request = MountRequest {
            bootstrap: Some(source),
            mountpoint: directory,
            plain_http,
            ..MountRequest::of(image)
        };
        daemon::connect(&self.session)?.call(&Request::MountBootstrap { request, login })?;
        self.held().instances.insert(place.to_owned(), instance);
        Ok(())
    }

    /// Unmounts an image. Files of it that are open are served until they are closed.
    pub(super) fn unmount(&self, place: &str) -> Result<()> {
        if !self.held().instances.contains_key(place) {
            bail!("nothing is mounted at {place}");
        }
        let directory = self.directory_of(place)?;
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
        let Instance { source, config } =
            instance.with_context(|| format!("nothing is mounted at {place}"))?;
        self.mount(place, Instance { source, config: backend::with_login(&config, auth)? })
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
