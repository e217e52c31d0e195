//! Carries out containerd's requests.

use std::{fmt, path::Path, sync::Arc, time::Duration};

use crate::{
    CoveredLayers, Image, Images, SnapshotError,
    api::types::Mount,
    filter::{self, Filter},
    keyed_lock::{KeyedGuard, KeyedLocks},
    label::{self, Labels, Layer},
    mounts::Form,
    storage::Storage,
    store::{Kind, New, Snapshot, Usage},
};

type Result<T> = std::result::Result<T, SnapshotError>;

/// Interval for checking whether a removed snapshot is still mounted somewhere: shims take seconds
/// to end.
const HELD: Duration = Duration::from_secs(2);

#[derive(Clone)]
pub(crate) struct Snapshotter {
    pub(crate) local: Arc<Storage>,
    images: Arc<dyn Images>,
    /// By names of layers to be, and by numbers of snapshots in which images are mounted.
    locks: Arc<KeyedLocks>,
}

impl fmt::Debug for Snapshotter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Snapshotter").field("local", &self.local).finish_non_exhaustive()
    }
}

/// A snapshot that containerd requests.
pub(crate) struct Wanted {
    pub(crate) key: String,
    pub(crate) parent: Option<String>,
    pub(crate) labels: Labels,
}

impl Snapshotter {
    /// Opens or creates the snapshots in the state directory, and cleans up after a crash.
    pub(crate) async fn open(state: &Path, images: Arc<dyn Images>, form: Form) -> Result<Self> {
        let state = state.to_owned();
        let open = tokio::task::spawn_blocking(move || Storage::open(&state, form));
        let local = Arc::new(open.await.map_err(|_| SnapshotError::Panicked)??);
        let snapshotter = Snapshotter { local, images, locks: Arc::default() };
        for snapshot in snapshotter.local(Storage::unfinished).await? {
            snapshotter.remove(snapshot.name).await?;
        }
        if let Err(error) = snapshotter.discard_strays().await {
            tracing::warn!(%error, "what a crash left stays until the next clean-up");
        }
        snapshotter.empty_trash_later();
        Ok(snapshotter)
    }

    /// Makes a writable snapshot. For a layer of a lazy image, answers that it exists already.
    pub(crate) async fn prepare(&self, wanted: Wanted) -> Result<Vec<Mount>> {
        match Layer::of(&wanted.key, &wanted.labels)? {
            Layer::Ordinary => self.create(wanted, Kind::Active).await,
            Layer::Plain { target, image } => {
                match self.note_plain(&wanted, &target, image).await {
                    Some(layers) => {
                        if layers.is_lazy_image {
                            self.mount_ahead(target.clone());
                        }
                        Err(SnapshotError::AlreadyExists(target))
                    }
                    None => self.create(wanted, Kind::Active).await,
                }
            }
            Layer::Data { target, image } => {
                self.note_data(wanted, &target, &image).await?;
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

    /// Makes the committed snapshot `target` for a data layer of `image`. It stays empty.
    async fn note_data(&self, wanted: Wanted, target: &str, image: &Image) -> Result<()> {
        let mut guard = self.locks.take(&lock_key(target, image)).await;
        let layers = guard.attempt(image, self.images.data_layers(image)).await?;
        if !layers.contains(&label::chain_id(target).into_owned()) {
            // Its metadata may have been fetched ahead.
            self.forget_unless_used(image).await;
            return Err(not_its_layer(image, target, &layers));
        }
        let Wanted { parent, labels, .. } = wanted;
        let name = target.to_owned();
        let new = New { name: name.clone(), parent, kind: Kind::Committed, labels, image: None };
        match self.local(move |local| local.create(new)).await {
            Err(SnapshotError::AlreadyExists(_)) => {
                let there = self.local(move |local| local.store.get(&name)).await?;
                if there.is_data() { Ok(()) } else { Err(taken(image, &there)) }
            }
            other => other.map(drop),
        }
    }

    /// Makes the committed snapshot `target` for a layer of an ordinary image, if the layer can be
    /// shown as it is. It is mounted when a snapshot is based on it, or ahead of that. `None` if
    /// containerd has to unpack the layer, which is always possible.
    async fn note_plain(
        &self,
        wanted: &Wanted,
        target: &str,
        image: Image,
    ) -> Option<CoveredLayers> {
        let mut guard = self.locks.take(&lock_key(target, &image)).await;
        let namespace = wanted.key.split('/').next().unwrap_or_default();
        let layer = label::chain_id(target);
        let shown = guard.attempt(&image, self.images.ordinary_layer(&image, &layer, namespace));
        let failed = |error: &SnapshotError| {
            tracing::warn!(image = image.reference, %error, "containerd unpacks a layer");
        };
        let layers = shown.await.inspect_err(failed).ok()??;
        let image = Image { layers: Some(layers.count), ..image };
        let new = New {
            name: target.to_owned(),
            parent: wanted.parent.clone(),
            kind: Kind::Committed,
            labels: wanted.labels.clone(),
            image: Some(image),
        };
        let (name, parent) = (target.to_owned(), wanted.parent.clone());
        let noted = self.local(move |local| match local.create(new) {
            Ok(_) => Ok(()),
            // A proven snapshot has the content of its name, even if containerd made it.
            Err(SnapshotError::AlreadyExists(_)) => {
                let there = local.store.get(&name)?;
                let is_it = there.proven && there.parent == parent;
                if is_it { Ok(()) } else { Err(SnapshotError::AlreadyExists(name)) }
            }
            Err(error) => Err(error),
        });
        match noted.await {
            Ok(()) => Some(layers),
            Err(error) => {
                tracing::warn!(layer = target, %error, "containerd unpacks a layer");
                None
            }
        }
    }

    /// Mounts a lazy image as the committed snapshot `target`, once for all callers that ask at the
    /// same time.
    async fn bring_in(&self, wanted: Wanted, target: &str, image: Image) -> Result<()> {
        let mut guard = self.locks.take(&lock_key(target, &image)).await;
        let name = target.to_owned();
        match self.local(move |local| local.store.get(&name)).await {
            Err(SnapshotError::NotFound(_)) => {}
            Ok(there) => return self.use_again(&mut guard, &there, &image).await,
            other => return other.map(drop),
        }
        let Wanted { key, parent, labels } = wanted;
        let new = New {
            name: key.clone(),
            parent,
            kind: Kind::Active,
            labels: labels.clone(),
            image: Some(image.clone()),
        };
        let (snapshot, at) = self
            .local(move |local| {
                let snapshot = local.create(new)?;
                let at = local.directories.fs(snapshot.number);
                Ok((snapshot, at))
            })
            .await?;
        // Concurrently, since each takes some round trips; neither is cancelled half-way. The error
        // of the check is more specific.
        let bring = async {
            let (checked, mounted) =
                tokio::join!(self.images.check(&image), self.images.mount(&image, &at));
            checked.and(mounted)
        };
        let proven = match guard.attempt(&image, bring).await {
            Ok(()) => self.prove(&mut guard, &image, target).await,
            Err(error) => Err(error),
        };
        let committed = match proven {
            Ok(()) => {
                let target = target.to_owned();
                self.local(move |local| local.commit(&snapshot.name, &target, None, labels)).await
            }
            Err(error) => Err(error),
        };
        if committed.is_err()
            && let Err(error) = self.remove(key).await
        {
            tracing::warn!(%error, "a snapshot stays until the next start");
        }
        match committed {
            // Another pull, under another name, has committed the layer first.
            Err(SnapshotError::AlreadyExists(name)) => {
                let there = self.local(move |local| local.store.get(&name)).await?;
                self.use_again(&mut guard, &there, &image).await
            }
            committed => committed.map(drop),
        }
    }

    /// Lets `image` use the mounted snapshot that has the name of its bootstrap layer.
    async fn use_again(
        &self,
        guard: &mut KeyedGuard,
        there: &Snapshot,
        image: &Image,
    ) -> Result<()> {
        let Some(known) = &there.image else { return Err(taken(image, there)) };
        guard.attempt(image, self.images.admit(image)).await?;
        let is_same = known.manifest_digest == image.manifest_digest;
        if !is_same || !there.proven {
            let proven = self.prove(guard, image, &there.name).await;
            // Forget data that was fetched for the proof.
            self.forget_unless_used(image).await;
            proven?;
        }
        if !there.proven {
            if !is_same {
                self.prove(guard, known, &there.name).await?;
            }
            let name = there.name.clone();
            self.local(move |local| local.store.prove(&name)).await?;
        }
        // This pull may have a newer login than the mount. A login for another repository does not
        // help it.
        if image.login.is_none() || known.repository() != image.repository() {
            return Ok(());
        }
        let at = self.local.directories.fs(there.number);
        guard.attempt(image, self.images.mount(image, &at)).await
    }

    /// Checks that the bootstrap of `image` unpacks to the chain id in the name `layer`. Images
    /// that pass show the same files up to this layer, however their manifests differ.
    async fn prove(&self, guard: &mut KeyedGuard, image: &Image, layer: &str) -> Result<()> {
        let own = guard.attempt(image, self.images.bootstrap_layer(image)).await?;
        if own == label::chain_id(layer) {
            Ok(())
        } else {
            Err(not_its_layer(image, layer, &[own]))
        }
    }

    /// The mounts that show a snapshot.
    pub(crate) async fn mounts(&self, key: String) -> Result<Vec<Mount>> {
        self.mount_image_of(key.clone()).await?;
        self.local(move |local| local.mounts(&key)).await
    }

    /// Mounts the image below a snapshot if necessary: the machine may have been rebooted. An image
    /// that an earlier version committed is used only if it proves to be what the snapshot's name
    /// says.
    async fn mount_image_of(&self, name: String) -> Result<()> {
        let find = |name: String| self.local(move |local| local.image_of(&name));
        let Some((_, base)) = find(name.clone()).await? else { return Ok(()) };
        let mut guard = self.locks.take(&base.number.to_string()).await;
        // It may have been removed meanwhile: see `discard`.
        let Some((image, base)) = find(name).await? else { return Ok(()) };
        if !base.proven {
            self.prove(&mut guard, &image, &base.name).await?;
            let name = base.name.clone();
            self.local(move |local| local.store.prove(&name)).await?;
        }
        let at = self.local.directories.fs(base.number);
        guard.attempt(&image, self.images.mount(&image, &at)).await
    }

    /// Mounts the image of a committed snapshot in the background: its data begins to arrive while
    /// containerd creates the container. If it fails, the container's own snapshot mounts it.
    fn mount_ahead(&self, name: String) {
        let this = self.clone();
        tokio::spawn(async move {
            if let Err(error) = this.mount_image_of(name.clone()).await {
                tracing::debug!(snapshot = name, %error, "mounted later");
            }
        });
    }

    /// Makes an active snapshot a parent for others, on top of `parent` if it was prepared on top
    /// of nothing.
    pub(crate) async fn commit(
        &self,
        key: String,
        name: String,
        parent: Option<String>,
        labels: Labels,
    ) -> Result<()> {
        self.local(move |local| local.commit(&key, &name, parent, labels)).await.map(drop)
    }

    /// Forgets a snapshot. Its files are deleted later, when they are mounted nowhere any more.
    pub(crate) async fn remove(&self, key: String) -> Result<()> {
        let snapshot = self.local(move |local| local.store.remove(&key)).await?;
        if let Err(error) = self.discard(snapshot.number).await {
            // There is no such snapshot any more, and nothing that containerd could do about its
            // directory.
            tracing::warn!(snapshot = snapshot.name, %error, "stays until the next clean-up");
        }
        self.empty_trash_later();
        if let Some(image) = snapshot.image {
            self.forget_unless_used(&image).await;
        }
        Ok(())
    }

    /// Reports an image as removed, unless another snapshot has it.
    async fn forget_unless_used(&self, image: &Image) {
        let all = match self.local(|local| local.store.all()).await {
            Ok(all) => all,
            Err(error) => {
                let image = &image.reference;
                tracing::warn!(%error, image, "what only it has stays");
                return;
            }
        };
        let mut images = all.iter().filter_map(|snapshot| snapshot.image.as_ref());
        if !images.any(|other| other.manifest_digest == image.manifest_digest) {
            self.images.removed(image).await;
        }
    }

    /// Takes the directory of a snapshot away that is no more, and the mount in it.
    async fn discard(&self, number: u64) -> Result<()> {
        let _guard = self.locks.take(&number.to_string()).await;
        let at = self.local.directories.fs(number);
        self.images.unmount(&at).await.map_err(|source| {
            let source = std::io::Error::other(source);
            SnapshotError::Io { path: at, source }
        })?;
        self.local(move |local| local.directories.throw_away(number)).await
    }

    /// # Errors
    /// The last one; the others are discarded all the same.
    async fn discard_strays(&self) -> Result<()> {
        let mut result = Ok(());
        for number in self.local(Storage::strays).await? {
            result = self.discard(number).await.and(result);
        }
        result
    }

    /// Deletions run one after the other, and nothing else waits for them. Snapshots that a process
    /// still has mounted are tried again later.
    fn empty_trash_later(&self) {
        let local = Arc::downgrade(&self.local);
        tokio::spawn(async move {
            while let Some(local) = local.upgrade().filter(|local| local.shall_empty()) {
                match tokio::task::spawn_blocking(move || local.empty_trash()).await {
                    Ok(Ok(true)) => {}
                    Ok(Ok(false)) => return,
                    Ok(Err(error)) => {
                        tracing::warn!(%error, "removed snapshots stay on the disk until the next clean-up");
                        return;
                    }
                    Err(_) => return,
                }
                tokio::time::sleep(HELD).await;
            }
        });
    }

    /// Deletes the remains of removed snapshots.
    pub(crate) async fn clean_up(&self) -> Result<()> {
        let discarded = self.discard_strays().await;
        self.local(Storage::empty_trash).await.map(drop).and(discarded)
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

    /// Lists the snapshots that pass one of `filters`.
    pub(crate) async fn list(&self, filters: &[String]) -> Result<Vec<Snapshot>> {
        let filters =
            filters.iter().map(|filter| Filter::parse(filter)).collect::<Result<Vec<_>>>()?;
        self.local(move |local| {
            let mut all = local.store.all()?;
            all.retain(|snapshot| filter::any(&filters, snapshot));
            Ok(all)
        })
        .await
    }

    /// The disk usage of a snapshot beyond its parents; for an image, the data that has arrived.
    pub(crate) async fn usage(&self, key: String) -> Result<Usage> {
        let snapshot = self.stat(key.clone()).await?;
        if snapshot.image.is_none() {
            return self.local(move |local| local.usage(&key)).await;
        }
        let at = self.local.directories.fs(snapshot.number);
        let (size, inodes) = self.images.occupied(&at).await;
        Ok(Usage { size, inodes })
    }

    /// Runs storage work on a thread of its own, so that slow disks don't delay readers.
    async fn local<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Storage) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let local = self.local.clone();
        let work = tokio::task::spawn_blocking(move || work(&local));
        work.await.unwrap_or(Err(SnapshotError::Panicked))
    }
}

fn not_its_layer(image: &Image, asked: &str, own: &[String]) -> SnapshotError {
    let expected = match own {
        [] => "no data layer".to_owned(),
        [several @ .., _, _, _] if !several.is_empty() => format!("one of {} others", own.len()),
        few => few.join(" or "),
    };
    let (reference, asked) = (image.reference.clone(), asked.to_owned());
    SnapshotError::NotItsLayer { reference, asked, expected }
}

/// The key of the lock for a layer. Each image has a lock of its own, because the registry of an
/// image that falsely claims the layer may never answer.
fn lock_key(target: &str, image: &Image) -> String {
    format!("{target} {}", image.reference)
}

fn taken(image: &Image, there: &Snapshot) -> SnapshotError {
    let owner = match &there.image {
        Some(image) => image.reference.clone(),
        None => label::image_of(&there.labels).to_owned(),
    };
    let (reference, layer) = (image.reference.clone(), there.name.clone());
    SnapshotError::LayerTaken { reference, layer, owner }
}

#[cfg(test)]
mod tests;
