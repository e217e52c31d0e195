//! The mounts of one process, which the node's daemon makes.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
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
    /// Told when a place is free again.
    freed: Condvar,
}

#[derive(Debug)]
struct Held {
    phase: Phase,
    /// By their place below the directory, as clients name it.
    instances: BTreeMap<String, Instance>,
    /// Places that a request works on.
    busy: BTreeSet<String>,
    /// Nothing new is mounted any more.
    closing: bool,
}

/// A place on which nobody else works as long as this lives.
struct Turn<'a> {
    service: &'a Service,
    place: String,
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
        let (instances, busy) = (BTreeMap::new(), BTreeSet::new());
        let held = Mutex::new(Held { phase, instances, busy, closing: false });
        Service { session, directory, guest, identity, held, freed: Condvar::new() }
    }

    pub(super) fn phase(&self) -> Phase {
        self.held().phase
    }

    /// Shows an image or a directory, unless it is shown there. Blocks, as everything here.
    pub(super) fn mount(&self, place: &str, instance: Instance) -> Result<()> {
        let turn = self.turn(place)?;
        if self.held().closing {
            bail!("this process is ending");
        }
        self.show(&turn.place, instance)
    }

    fn show(&self, place: &str, instance: Instance) -> Result<()> {
        let before = self.held().instances.get(place).cloned();
        if let Some(other) = &before
            && other.source() != instance.source()
        {
            bail!("{} is mounted at {place} already", other.source().display());
        }
        let directory = self.directory_of(place);
        match (&instance, &self.guest) {
            (Instance::Image { source, config }, guest) => {
                self.mount_image(&directory, source, config)?;
                if let Some(guest) = guest
                    && let Err(error) = guest.show(place, &directory, Changes::Never)
                {
                    self.unmount_image(&directory)?;
                    return Err(error);
                }
            }
            (Instance::Directory { source }, Some(guest)) => {
                guest.show(place, source, Changes::ByAnyone)?;
            }
            (Instance::Directory { .. }, None) => {
                bail!("directories are shown to guests only: `nydusd virtiofs`, not `nydusd fuse`")
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

    /// Hides an image or a directory. On the node, files that are open are served until they are
    /// closed.
    pub(super) fn unmount(&self, place: &str) -> Result<()> {
        let turn = self.turn(place)?;
        self.hide(&turn.place)
    }

    fn hide(&self, place: &str) -> Result<()> {
        let instance = self.held().instances.get(place).cloned();
        let instance = instance.with_context(|| format!("nothing is mounted at {place}"))?;
        if let Some(guest) = &self.guest {
            guest.hide(place)?;
        }
        if let Instance::Image { .. } = instance {
            self.unmount_image(&self.directory_of(place))?;
        }
        self.held().instances.remove(place);
        Ok(())
    }

    fn unmount_image(&self, directory: &Path) -> Result<()> {
        let request = Request::Umount { mountpoint: directory.to_owned(), lazy: true };
        daemon::connect(&self.session)?.call(&request)?;
        if directory != self.directory {
            match fs::remove_dir(directory) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    tracing::warn!(directory = %directory.display(), %error, "it stays");
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Hides everything, for good.
    pub(super) fn unmount_all(&self) -> Result<()> {
        let places: Vec<_> = {
            let mut held = self.held();
            held.closing = true;
            let at_work = |held: &mut Held| !held.busy.is_empty();
            let held = self.freed.wait_while(held, at_work);
            held.unwrap_or_else(PoisonError::into_inner).instances.keys().cloned().collect()
        };
        // All of them, whatever becomes of one.
        let unmounted: Vec<_> = places.iter().map(|place| self.unmount(place)).collect();
        unmounted.into_iter().collect()
    }

    /// Uses another login, as clients encode it, for an image.
    pub(super) fn set_login(&self, place: &str, auth: &str) -> Result<()> {
        let turn = self.turn(place)?;
        let instance = self.held().instances.get(&turn.place).cloned();
        let Some(Instance::Image { source, config }) = instance else {
            bail!("no image is mounted at {place}");
        };
        let config = backend::with_login(&config, auth)?;
        self.mount_image(&self.directory_of(&turn.place), &source, &config)?;
        self.held().instances.insert(turn.place.clone(), Instance::Image { source, config });
        Ok(())
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
        let there = self.mounted()?;
        for (place, instance) in instances {
            let turn = self.turn(&place)?;
            // What is mounted may have a newer login than the list.
            let shown = match there.contains(&self.directory_of(&turn.place)) {
                true => Ok(()),
                false => self.show(&turn.place, instance.clone()),
            };
            if let Err(error) = shown {
                // The others are taken over all the same, and a client can take this one away.
                tracing::error!(place, error = format!("{error:#}"), "it cannot be mounted again");
            }
            self.held().instances.insert(turn.place.clone(), instance);
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
        let directory = self.directory_of(&normal(place)?);
        let mut mounts = self.mounts()?.into_iter();
        let mount = mounts.find(|mount| mount.mountpoint == directory);
        mount.with_context(|| format!("nothing is mounted at {place}"))
    }

    /// Where the node's daemon has mounts.
    fn mounted(&self) -> Result<BTreeSet<PathBuf>> {
        Ok(self.mounts()?.into_iter().map(|mount| mount.mountpoint).collect())
    }

    fn mounts(&self) -> Result<Vec<MountStatus>> {
        match daemon::connect(&self.session)?.call(&Request::Status)? {
            Response::Status(status) => Ok(status.mounts),
            _ => bail!("the daemon is of another version"),
        }
    }

    fn supervisor(&self) -> Result<&Path> {
        let socket = self.identity.supervisor.as_deref();
        socket.context("this process has no supervisor: it was started without --supervisor")
    }

    /// Waits until nobody works on a place.
    fn turn(&self, place: &str) -> Result<Turn<'_>> {
        let place = normal(place)?;
        let held = self.freed.wait_while(self.held(), |held| held.busy.contains(&place));
        held.unwrap_or_else(PoisonError::into_inner).busy.insert(place.clone());
        Ok(Turn { service: self, place })
    }

    /// The directory of a place.
    fn directory_of(&self, place: &str) -> PathBuf {
        // Without a slash at the end.
        self.directory.join(place.trim_start_matches('/')).components().collect()
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.service.held().busy.remove(&self.place);
        self.service.freed.notify_all();
    }
}

/// A place, which clients name by an absolute path, in the only spelling that counts here.
fn normal(place: &str) -> Result<String> {
    let Some(relative) = place.strip_prefix('/') else {
        bail!("`{place}` is not a mount point, expected an absolute path");
    };
    let mut parts = Vec::new();
    for part in relative.split('/').filter(|part| !part.is_empty()) {
        if part == "." || part == ".." {
            bail!("`{place}` is not a mount point, expected one without `.` and `..`");
        }
        parts.push(part);
    }
    Ok(format!("/{}", parts.join("/")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_has_one_spelling() {
        for place in ["/a/b", "/a/b/", "//a//b"] {
            assert_eq!(normal(place).unwrap(), "/a/b");
        }
        assert_eq!(normal("/").unwrap(), "/");
        for place in ["", "a", "/a/../b", "/./a", "/.."] {
            assert!(normal(place).is_err(), "{place}");
        }
    }
}
