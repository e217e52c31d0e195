//! What is done for each request.

use std::{fmt, path::Path, sync::Arc};

use crate::{
    Image, Images, SnapshotError,
    api::types::Mount,
    filter::{self, Filter},
    label::{Labels, Layer},
    local::Local,
    store::{Kind, New, Snapshot, Usage},
};

type Result<T> = std::result::Result<T, SnapshotError>;

#[derive(Clone)]
pub(crate) struct Snapshotter {
    local: Arc<Local>,
    images: Arc<dyn Images>,
}

impl fmt::Debug for Snapshotter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Snapshotter").field("local", &self.local).finish_non_exhaustive()
    }
}

/// What containerd wants to have.
pub(crate) struct Wanted {
    pub(crate) key: String,
    pub(crate) parent: Option<String>,
    pub(crate) labels: Labels,
}

impl Snapshotter {
    /// Opens or creates the snapshots in `root`, and cleans up after a crash.
    pub(crate) async fn open(root: &Path, images: Arc<dyn Images>) -> Result<Self> {
        let root = root.to_owned();
        let open = tokio::task::spawn_blocking(move || Local::open(&root));
        let local = Arc::new(open.await.map_err(|_| SnapshotError::Panicked)??);
        let snapshotter = Snapshotter { local, images };
        let strays = snapshotter.local(|local| local.directories.strays(&local.store.numbers()?));
        for number in strays.await? {
            snapshotter.discard(number).await?;
        }
        snapshotter.empty_trash_later();
        Ok(snapshotter)
    }

    /// Makes a snapshot that can be written to. For a layer of a lazy image it answers that it is here already.
    pub(crate) async fn prepare(&self, wanted: Wanted) -> Result<Vec<Mount>> {
        match Layer::of(&wanted.labels)? {
            Layer::Ordinary => self.create(wanted, Kind::Active).await,
            Layer::Data { target } => {
                let Wanted { parent, labels, .. } = wanted;
                let name = target.clone();
                let new = New { name, parent, kind: Kind::Committed, labels, image: None };
                self.local(move |local| local.create(new)).await?;
                Err(SnapshotError::AlreadyExists(target))
            }
            Layer::Bootstrap { target, image } => {
                self.bring_in(wanted, &target, image).await?;
                Err(SnapshotError::AlreadyExists(target))
            }
        }
    }

    /// Makes a snapshot that can be read.
    pub(crate) async fn view(&self, wanted: Wanted) -> Result<Vec<Mount>> {
        self.create(wanted, Kind::View).await
    }

    async fn create(&self, wanted: Wanted, kind: Kind) -> Result<Vec<Mount>> {
        let Wanted { key: name, parent, labels } = wanted;
        if let Some(parent) = parent.clone() {
            self.mount_image_of(parent).await?;
        }
        let new = New { name, parent, kind, labels, image: None };
        self.local(move |local| {
            let snapshot = local.create(new)?;
            local.mounts(&snapshot.name)
        })
        .await
    }

    /// Mounts a lazy image as the committed snapshot `target`.
    async fn bring_in(&self, wanted: Wanted, target: &str, image: Image) -> Result<()> {
        let name = target.to_owned();
        let unusable = |source| SnapshotError::Image { reference: image.reference.clone(), source };
        match self.local(move |local| local.store.get(&name)).await {
            Err(SnapshotError::NotFound(_)) => {}
            // It may be pulled with a newer login than it has.
            Ok(there) if image.login.is_some() && there.image.is_some() => {
                let at = self.local.directories.fs(there.number);
                return self.images.mount(&image, &at).await.map_err(unusable);
            }
            other => return other.map(drop),
        }
        self.images.check(&image).await.map_err(unusable)?;
        let Wanted { key, parent, labels } = wanted;
        let (name, image_of_it) = (key.clone(), Some(image.clone()));
        let of_it = labels.clone();
        let kind = Kind::Active;
        let new = New { name, parent, kind, labels: of_it, image: image_of_it };
        let (snapshot, at) = self
            .local(move |local| {
                let snapshot = local.create(new)?;
                let at = local.directories.fs(snapshot.number);
                Ok((snapshot, at))
            })
            .await?;
        let committed = match self.images.mount(&image, &at).await {
            Ok(()) => {
                let target = target.to_owned();
                self.local(move |local| local.commit(&snapshot.name, &target, labels)).await
            }
            Err(source) => Err(unusable(source)),
        };
        if committed.is_err() {
            self.remove(key).await?;
        }
        committed.map(drop)
    }

    /// What has to be mounted to see a snapshot.
    pub(crate) async fn mounts(&self, key: String) -> Result<Vec<Mount>> {
        self.mount_image_of(key.clone()).await?;
        self.local(move |local| local.mounts(&key)).await
    }

    /// Makes sure that the image below a snapshot is mounted: the machine may have been started again.
    async fn mount_image_of(&self, name: String) -> Result<()> {
        let found = self.local(move |local| local.image_of(&name)).await?;
        let Some((image, at)) = found else { return Ok(()) };
        let mounted = self.images.mount(&image, &at).await;
        mounted.map_err(|source| SnapshotError::Image { reference: image.reference, source })
    }

    /// Makes an active snapshot a parent for others.
    pub(crate) async fn commit(&self, key: String, name: String, labels: Labels) -> Result<()> {
        self.local(move |local| local.commit(&key, &name, labels)).await.map(drop)
    }

    /// Forgets a snapshot. Its files are deleted later.
    pub(crate) async fn remove(&self, key: String) -> Result<()> {
        let snapshot = self.local(move |local| local.store.remove(&key)).await?;
        self.discard(snapshot.number).await?;
        self.empty_trash_later();
        Ok(())
    }

    /// Takes a snapshot's directory away, and the mount in it.
    async fn discard(&self, number: u64) -> Result<()> {
        let at = self.local.directories.fs(number);
        self.images.unmount(&at).await.map_err(|source| {
            let source = std::io::Error::other(source);
            SnapshotError::Io { path: at, source }
        })?;
        self.local(move |local| local.directories.throw_away(number)).await
    }

    fn empty_trash_later(&self) {
        let local = self.local.clone();
        tokio::task::spawn_blocking(move || {
            if let Err(error) = local.directories.empty_trash() {
                tracing::warn!(%error, "removed snapshots stay on the disk until the next clean-up");
            }
        });
    }

    /// Deletes what removed snapshots left.
    pub(crate) async fn clean_up(&self) -> Result<()> {
        self.local(|local| local.directories.empty_trash()).await
    }

    /// One snapshot.
    pub(crate) async fn stat(&self, key: String) -> Result<Snapshot> {
        self.local(move |local| local.store.get(&key)).await
    }

    /// Changes labels, see [`crate::store::Store::update`].
    pub(crate) async fn update(
        &self,
        name: String,
        labels: Labels,
        fields: Vec<String>,
    ) -> Result<Snapshot> {
        self.local(move |local| local.store.update(&name, labels, &fields)).await
    }

    /// The snapshots that pass one of `filters`.
    pub(crate) async fn list(&self, filters: &[String]) -> Result<Vec<Snapshot>> {
        let filters =
            filters.iter().map(|filter| Filter::parse(filter)).collect::<Result<Vec<_>>>()?;
        let mut all = self.local(|local| local.store.all()).await?;
        all.retain(|snapshot| filter::any(&filters, snapshot));
        Ok(all)
    }

    /// What a snapshot takes beyond its parents.
    pub(crate) async fn usage(&self, key: String) -> Result<Usage> {
        self.local(move |local| local.usage(&key)).await
    }

    /// Disks are slow, and readers must not wait for them here.
    async fn local<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Local) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let local = self.local.clone();
        let work = tokio::task::spawn_blocking(move || work(&local));
        work.await.unwrap_or(Err(SnapshotError::Panicked))
    }
}

#[cfg(test)]
mod tests;
