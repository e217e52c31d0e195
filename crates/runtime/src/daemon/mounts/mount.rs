//! Mounts images, and takes mounts away.

use std::{
    io,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use lazuli_image::ext4;
use lazuli_registry::{ImageName, IndexTrust, Platform};
use lazuli_sys::{mountinfo, path_error::At as _};

use super::table::Mount;
use crate::{
    daemon::{
        DaemonError,
        api::{DriverChoice, MountRequest, Mounted},
        filesystems::{attachment::Attachment, mounted::FilesystemMount, users},
        node::Node,
        record::MountRecord,
        served::{image::ServedImage, possession, route::ImageRoute},
    },
    image::{Fetched, StoredImage},
    kernel::{
        fuse::MountPoint,
        loop_devices,
        mount::{self, Format, Suid},
    },
    prefetch::{Known, Metadata},
};

/// Pause before a mount point is tried again that another request works on.
pub(in crate::daemon) const OTHERS: Duration = Duration::from_millis(10);

/// How to handle a busy mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::daemon) enum InUse {
    /// Leave it, and name its users.
    Refuse,
    /// Detach it under its users: open files are served until they are closed.
    Detach,
}

impl Node {
    /// Mounts an image. `cancelled` ends the part that may take long, fetching the metadata.
    pub(in crate::daemon) async fn mount(
        &self,
        mut request: MountRequest,
        cancelled: impl Future<Output = ()>,
    ) -> Result<Mounted, DaemonError> {
        let mountpoint = mount::real_path(&request.mountpoint).at(&request.mountpoint)?;
        request.mountpoint.clone_from(&mountpoint);
        self.mounts.reserve(&mountpoint).await?;
        let begun = Instant::now();
        let by_client = !request.base;
        let result = self.mount_reserved(request, cancelled).await;
        // A client pulls the image, and mounts it then.
        if !(by_client && result.as_ref().is_err_and(|error| self.may_pull(error))) {
            self.count_start(&result, begun.elapsed());
        }
        if result.is_err() {
            self.mounts.free(&mountpoint).await;
        }
        result
    }

    async fn mount_reserved(
        &self,
        request: MountRequest,
        cancelled: impl Future<Output = ()>,
    ) -> Result<Mounted, DaemonError> {
        let (driver, driver_reason) = self.drivers.choose(request.driver).await?;
        let name: ImageName = request.image.parse()?;
        let platform: Option<Platform> = request.platform.as_deref().map(str::parse).transpose()?;
        let platform = platform.map(Platform::lazy);
        let mut options = self.admission.options(&request);
        if request.base {
            // containerd names layers by the claims of the image's configuration, and shares them
            // between images. So indexes that only the repository vouches for must not count here.
            options.indexes = IndexTrust::Nothing;
        }
        let mountpoint = request.mountpoint.clone();
        let route = ImageRoute::to(&name, &options);
        let repository = route.open()?;
        let images = self.root.join("images");
        let remembering = self.remembering.start(images.clone(), self.cache.clone());
        let pull = async {
            if let Some(bootstrap) = &request.bootstrap {
                let made = self.of_bootstrap(&request, bootstrap, repository.clone()).await?;
                let (stored, verified, fetched, pin) = made;
                let digest = &stored.manifest_digest;
                let known = self.prefetcher.look_up(&repository, digest, &[], None, Metadata::Here);
                return Ok((stored, verified, fetched, known, pin));
            }
            let preconnect = repository.request_policy().preconnect();
            let part = match (request.layers, request.layer) {
                (Some(layers), _) => Some(self.prefix(&request, &name, layers).await?),
                (None, Some(layer)) => Some(self.one_layer(&request, &name, layer).await?),
                (None, None) => None,
            };
            if let Some((stored, verified, manifest, pin)) = part {
                let digest = &manifest.digest;
                let known = self.prefetcher.look_up(&repository, digest, &[], None, Metadata::Here);
                return Ok((stored, verified, Fetched::default(), known, pin));
            }
            let resolved = match self.admission.recent.get(&name) {
                Some(manifest) => manifest.into(),
                None => {
                    let (platform, known) = (platform.as_ref(), &self.ordinaries);
                    self.admission
                        .resolve(&request, &name, &*repository, platform, &options, known)
                        .await?
                }
            };
            if !request.base
                && let Some(shown) = self.by_layers(&request, &name, &resolved.manifest).await?
            {
                let (stored, verified, manifest, pin) = shown;
                let digest = &manifest.digest;
                let known = self.prefetcher.look_up(&repository, digest, &[], None, Metadata::Here);
                return Ok((stored, verified, Fetched::default(), known, pin));
            }
            let manifest = &resolved.manifest;
            preconnect.done().await;
            // Until there is a record of the mount.
            let pin = self.admission.pins.pin(&images, manifest.digest);
            let is_started = self.images.is_started(&manifest.digest).await;
            let metadata = match StoredImage::is_in(&images, &manifest.digest) {
                true => Metadata::Here,
                false => Metadata::Missing,
            };
            let look_up = async {
                match is_started {
                    true => Known::default(),
                    false => {
                        let layers: Vec<_> = resolved.layers().cloned().collect();
                        let (digest, guess) = (&manifest.digest, manifest.parsed.guess());
                        self.prefetcher.look_up(&repository, digest, &layers, guess, metadata)
                    }
                }
            };
            // Metadata first: prefetched data is useless before it.
            let fetch = async {
                let _lock = self.admission.fetch_locks.lock(&request.image).await;
                let admission = self.admission.admit_resolved(&request, &resolved);
                let seekable = options.indexes.seekable_layers(&name);
                StoredImage::fetch_admitted(
                    repository.clone(),
                    manifest,
                    &images,
                    seekable,
                    admission,
                )
                .await
            };
            let (fetched, known) = tokio::join!(fetch, look_up);
            let (stored, fetched, verified) = fetched?;
            if !request.base {
                stored.must_be_whole(repository.describe())?;
            }
            Ok::<_, DaemonError>((stored, verified, fetched, known, pin))
        };
        let (stored, verified, metadata, known, _pin) = tokio::select! {
            pulled = pull => pulled?,
            () = self.mounts.stopping() => return Err(DaemonError::Stopping),
            () = cancelled => return Err(DaemonError::Stopping),
        };
        let config = stored.config.clone();
        let manifest_digest = stored.manifest_digest;
        let proven = possession::prove(&stored, &name, &options, &*repository, &self.cache).await?;
        let image = self.serve(stored, &verified, route).await?;
        self.refuse_wrong_files(&image)?;
        drop(proven);
        if self.admission.logins.of(&mountpoint).is_some() {
            possession::keep_private(&image, &*repository)?;
        }
        remembering.await;
        if image.is_first_start() {
            self.prefetcher.start(image.prefetched(repository), known);
        }
        let mut record = MountRecord {
            request,
            manifest_digest,
            driver,
            driver_reason,
            backing: None,
            journal: false,
        };
        let attached = self.attach(&image, &mut record, MountPoint::Free).await;
        let (attachment, id) =
            attached.inspect_err(|_| self.mounts.forget(&record.request.mountpoint))?;
        let mountpoint = &record.request.mountpoint;
        tracing::info!(image = %record.request.image, digest = %manifest_digest,
            mountpoint = %mountpoint.display(), driver = ?record.driver, "mounted");
        let mount = Mount::new(record, image, attachment, id, metadata);
        let mount = self.mounts.insert(mount).await;
        Ok(Mounted { mount, config })
    }

    /// Mounts, with a record of it on disk before it can be seen.
    pub(in crate::daemon) async fn attach(
        &self,
        image: &Arc<ServedImage>,
        record: &mut MountRecord,
        place: MountPoint,
    ) -> Result<(Attachment, u64), DaemonError> {
        let mountpoint = record.request.mountpoint.clone();
        let suid = if record.request.nosuid { Suid::Ignore } else { Suid::Keep };
        let records = self.root.join("mounts");
        let mut by_kernel = self.mount_by_kernel(image, record).await;
        while let Some(Err(error)) = &by_kernel
            && record.request.driver == DriverChoice::Auto
            && is_refused(error)
        {
            (record.driver, record.driver_reason) =
                self.drivers.instead_of(record.driver, error).await;
            by_kernel = self.mount_by_kernel(image, record).await;
        }
        let attached = match by_kernel {
            Some(mount) => {
                let mount = mount.map_err(|source| mount_error(record, source))?;
                record.backing = Some(mount.image.backing().clone());
                self.mounts.record(record).at(&records)?;
                mount.image.bind(&mountpoint, suid).map(|()| Attachment::Bind(mount))
            }
            None => {
                record.journal = true;
                self.mounts.record(record).at(&records)?;
                image.fuse(record, suid, place, &self.drivers.link).await
            }
        };
        let attachment = attached.map_err(|source| mount_error(record, source))?;
        let id = mountinfo::id_at(&mountpoint).map_err(|source| mount_error(record, source))?;
        Ok((attachment, id.unwrap_or_default()))
    }

    /// The image's file system of the record's driver, if the kernel reads blobs by itself then.
    async fn mount_by_kernel(
        &self,
        image: &Arc<ServedImage>,
        record: &MountRecord,
    ) -> Option<io::Result<Arc<FilesystemMount>>> {
        let (filesystems, request) = (&self.filesystems, &record.request);
        match (&self.drivers.fanotify, self.drivers.disks.get(), record.driver) {
            (Some(session), _, DriverChoice::Fanotify) => {
                Some(image.erofs_on_files(session, filesystems, request, &self.boot).await)
            }
            (_, Some(Ok(session)), DriverChoice::Loop | DriverChoice::Ext4) => {
                let format = match record.driver {
                    DriverChoice::Ext4 => Format::Ext4,
                    _ => Format::Erofs,
                };
                let mount = image.on_disks(format, session, filesystems, request, &self.boot);
                Some(mount.await)
            }
            _ => None,
        }
    }

    /// Takes a mount away.
    pub(in crate::daemon) async fn umount(
        &self,
        mountpoint: &Path,
        in_use: InUse,
    ) -> Result<(), DaemonError> {
        let mount = self.mounts.take(mountpoint).await?;
        if let Err(error) = unmount(&mount, mountpoint, in_use).await {
            self.mounts.put_back(mountpoint, mount).await;
            return Err(error);
        }
        self.mounts.forget(mountpoint);
        drop(mount);
        self.mounts.free(mountpoint).await;
        tracing::info!(mountpoint = %mountpoint.display(), "unmounted");
        Ok(())
    }

    /// Takes a mount away, if there is one, and forgets its login. Users of a busy mount are served
    /// until they are done.
    pub(in crate::daemon) async fn umount_for_good(
        &self,
        mountpoint: &Path,
    ) -> Result<(), DaemonError> {
        let unmounted = loop {
            match self.umount(mountpoint, InUse::Detach).await {
                Err(DaemonError::Taken { .. }) => tokio::time::sleep(OTHERS).await,
                Err(DaemonError::NotMounted { .. }) => break Ok(()),
                other => break other,
            }
        };
        if unmounted.is_ok() {
            self.admission.logins.remove(mountpoint);
        }
        unmounted
    }
}

/// Returns whether the driver cannot take this image: ext4 has no place for something in it, or the
/// kernel would read it wrongly from several loop devices.
fn is_refused(error: &io::Error) -> bool {
    error
        .get_ref()
        .is_some_and(|inner| inner.is::<ext4::Refused>() || inner.is::<loop_devices::WrongReads>())
}

async fn unmount(mount: &Mount, mountpoint: &Path, in_use: InUse) -> Result<(), DaemonError> {
    if mount.is_covered() {
        return Err(DaemonError::Covered { mountpoint: mountpoint.to_owned() });
    }
    match (mount.attachment.unmount(mountpoint).await, in_use) {
        (Err(error), InUse::Detach) if error.kind() == io::ErrorKind::ResourceBusy => {
            Ok(mount.attachment.detach(mountpoint).await.at(mountpoint)?)
        }
        (Err(error), InUse::Refuse) if error.kind() == io::ErrorKind::ResourceBusy => {
            let holders = users::of(mountpoint);
            Err(DaemonError::Busy { mountpoint: mountpoint.to_owned(), holders })
        }
        (other, _) => Ok(other.at(mountpoint)?),
    }
}

pub(super) fn mount_error(record: &MountRecord, source: io::Error) -> DaemonError {
    let MountRequest { image, mountpoint, .. } = &record.request;
    DaemonError::Mount { image: image.clone(), mountpoint: mountpoint.clone(), source }
}
