//! The layers of ordinary images that a client does not have to unpack.

use std::{pin::pin, sync::Arc};

use futures_util::future::{Either, select};
use lazuli_builder::index::KnownLayer;
use lazuli_image::{Digest, oci::chain_ids};
use lazuli_registry::{ImageName, IndexTrust, Login, Manifest, Repository, listed_indexes};
use tokio::time::timeout;

use super::{
    begin::key_of, claimed_layer::ClaimedLayer, known_parts::LOOK_WITHIN, state::Ordinary,
    store::Holder, vouched::Vouched,
};
use crate::{
    daemon::{DaemonError, api::MountRequest, images::Images},
    image::removed,
};

/// The lowest layers of an ordinary image, which one chain id covers.
#[derive(Clone, Copy, Debug)]
pub struct CoveredLayers {
    /// How many they are.
    pub count: u32,
    /// Whether they are the whole image, and a key vouches for some of them: their data is fetched
    /// once the image is mounted.
    pub is_lazy_image: bool,
}

impl Images {
    /// Returns the layers of an ordinary image that the chain id `layer` covers, if they can be
    /// shown without being unpacked; `None` if containerd has to unpack them. With `may_pull`, the
    /// node fetches layers without an index whole.
    pub async fn ordinary_layer(
        &self,
        request: &MountRequest,
        login: Option<&Login>,
        layer: &Digest,
        may_pull: bool,
    ) -> Result<Option<CoveredLayers>, DaemonError> {
        let shown = self.find_layer(request, login, layer, may_pull).await;
        if !may_pull && !matches!(shown, Ok(Some(_))) {
            self.0.index_when_unpacked(request, login);
        }
        shown
    }

    async fn find_layer(
        &self,
        request: &MountRequest,
        login: Option<&Login>,
        layer: &Digest,
        may_pull: bool,
    ) -> Result<Option<CoveredLayers>, DaemonError> {
        if self.0.admission.registry.indexes == IndexTrust::Nothing {
            return Ok(None);
        }
        let (name, digest) = request.name_and_digest()?;
        if !may_pull && !self.may_know_layers(&name) {
            return Ok(None);
        }
        self.0.admission.expected.arrived(&digest).await;
        let client = login;
        let login = login.map(|login| Arc::new(self.0.admission.logins.lend(&name, login.clone())));
        let Some(image) = self.ordinary_image(request, &name).await? else {
            return Ok(None);
        };
        let chain = chain_ids(image.layers.iter().filter_map(|layer| layer.diff_id));
        let Some(at) = chain.iter().position(|id| id == layer) else { return Ok(None) };
        let options = self.0.admission.options(request);
        let repository = lazuli_registry::open(&name, &options)?;
        let vouched = self.0.ordinaries.vouched(&image, &repository, &options).await?;
        if may_pull {
            self.0.ordinaries.begin_pulls(&image, &vouched, &repository, login.as_ref());
        }
        self.look_ahead(&image, &vouched, &repository, client).await;
        let shown = self.are_shown(&image.layers[..=at], &vouched, &repository, may_pull);
        // Permission takes a round trip, for this layer and the ones above it at once.
        let layers = image.layers[at..].iter().map(ClaimedLayer::digest);
        let asked = image.access.ask_ahead(&*repository, client, layers);
        let are_shown = match select(pin!(shown), pin!(asked)).await {
            Either::Left((false, _)) => false,
            Either::Left((true, asked)) => {
                asked.await;
                true
            }
            Either::Right(((), shown)) => shown.await,
        };
        if !are_shown {
            return Ok(None);
        }
        // A client without access to a layer gets none of this node's data of it.
        let own = &image.manifest.parsed.layers[at];
        if !image.access.allows(&*repository, client, own.digest).await? {
            return Ok(None);
        }
        if !self.0.ordinaries.keep(&image, Holder::Containerd) {
            return Ok(None);
        }
        let is_whole = at + 1 == chain.len();
        if is_whole {
            self.0.ordinaries.publish_once(&image, !vouched.beside.is_empty(), &repository, login);
        }
        let count = u32::try_from(at + 1).ok();
        let is_lazy_image =
            is_whole && image.layers.iter().any(|layer| vouched.of(layer).is_some());
        if is_whole && !is_lazy_image && may_pull {
            self.make_ahead(&image);
        }
        Ok(count.map(|count| CoveredLayers { count, is_lazy_image }))
    }

    /// Waits until each of the layers can be shown, or one cannot.
    async fn are_shown(
        &self,
        layers: &[ClaimedLayer],
        vouched: &Vouched,
        repository: &Arc<dyn Repository>,
        may_pull: bool,
    ) -> bool {
        let ordinaries = &self.0.ordinaries;
        for layer in layers {
            let is_known = async || ordinaries.is_known_layer(layer, vouched).await;
            // A pull may end in between.
            let pulled = async || {
                let (pulls, from) = (&ordinaries.pulls, key_of(&**repository));
                may_pull && matches!(pulls.ended(&from, layer.key()).await, Some(Ok(())))
            };
            if !(is_known().await || pulled().await || is_known().await) {
                tracing::debug!(layer = %layer.digest(), "containerd unpacks it");
                return false;
            }
        }
        true
    }

    /// Returns one layer of an ordinary image, by its digest as stored, if it can be shown without
    /// being unpacked. `request` has the name and digest of the image.
    pub(in crate::daemon) async fn single_layer(
        &self,
        request: &MountRequest,
        layer: &Digest,
    ) -> Result<Option<KnownLayer>, DaemonError> {
        let (name, _) = request.name_and_digest()?;
        let Some(image) = self.ordinary_image(request, &name).await? else {
            return Ok(None);
        };
        let Some(layer) = image.layers.iter().find(|own| own.digest() == *layer) else {
            return Ok(None);
        };
        let options = self.0.admission.options(request);
        let repository = lazuli_registry::open(&name, &options)?;
        let vouched = self.0.ordinaries.vouched(&image, &repository, &options).await?;
        self.look_ahead(&image, &vouched, &repository, None).await;
        let Some(known) = self.0.ordinaries.known_layer(layer, &vouched).await else {
            return Ok(None);
        };
        let is_shown = image.access.allows(&*repository, None, layer.digest()).await?
            && self.0.ordinaries.keep(&image, Holder::LayerStore);
        Ok(is_shown.then_some(known))
    }

    /// An ordinary image that may run.
    pub(super) async fn ordinary_image(
        &self,
        request: &MountRequest,
        name: &ImageName,
    ) -> Result<Option<Arc<Ordinary>>, DaemonError> {
        let (_, digest) = request.name_and_digest()?;
        let options = self.0.admission.options(request);
        let repository = lazuli_registry::open(name, &options)?;
        let is_new = self.0.admission.recent.get(name).is_none();
        let preconnect = is_new.then(|| repository.request_policy().preconnect());
        // The list needs the digest alone.
        let list = async {
            let ordinaries = &self.0.ordinaries;
            let asked = request.asked_name().ok()?;
            match is_new && ordinaries.searches(&asked, &digest) {
                true => {
                    let listed = timeout(LOOK_WITHIN, listed_indexes(&*repository, &digest, None));
                    Some(listed.await.unwrap_or_default())
                }
                false => None,
            }
        };
        let list = async { Ok(list.await) };
        let (manifest, listed) = tokio::try_join!(self.recent_manifest(request, name), list)?;
        if manifest.digest != digest || !is_ordinary(&manifest) {
            return Ok(None);
        }
        // An image that may not run is reported at its start.
        if self.0.admission.admit_pinned(request).await.is_err() {
            return Ok(None);
        }
        if let Some(preconnect) = preconnect {
            preconnect.done().await;
        }
        let listed = listed.as_deref();
        let image = self.0.ordinaries.image(request, manifest, listed, &*repository, &options);
        image.await.map(Some)
    }

    /// Returns whether this node may know layers of the image without pulling any.
    pub(in crate::daemon) fn may_know_layers(&self, name: &ImageName) -> bool {
        self.0.admission.registry.indexes != IndexTrust::Nothing
            && (self.0.ordinaries.store.knows_layers() || self.0.ordinaries.may_be_signed(name))
    }

    /// An ordinary image is about to be pulled, see [`Images::expect`].
    pub(in crate::daemon) fn expect_ordinary(
        &self,
        name: &ImageName,
        manifest: Arc<Manifest>,
        login: Option<Login>,
    ) {
        if !is_ordinary(&manifest) || !self.0.ordinaries.may_be_signed(name) {
            return;
        }
        let Some(arriving) = self.0.admission.expected.begin(manifest.digest) else { return };
        self.0.admission.recent.insert(name, manifest);
        let (images, name) = (self.clone(), name.clone());
        tokio::spawn(async move {
            let fetch = images.fetch_indexes_ahead(&name, login.as_ref());
            if let Ok(Err(error)) = timeout(LOOK_WITHIN, fetch).await {
                tracing::debug!(error = error.for_people(), "indexes are not fetched ahead");
            }
            drop(arriving);
        });
    }

    /// Fetches the configuration of an ordinary image, trusted statements about it, and the stated
    /// indexes of its layers.
    async fn fetch_indexes_ahead(
        &self,
        name: &ImageName,
        login: Option<&Login>,
    ) -> Result<(), DaemonError> {
        let request = MountRequest::of(name.to_string());
        let _login = login.map(|login| self.0.admission.logins.lend(name, login.clone()));
        let Some(image) = self.ordinary_image(&request, name).await? else { return Ok(()) };
        let options = self.0.admission.options(&request);
        let repository = lazuli_registry::open(name, &options)?;
        let vouched = self.0.ordinaries.vouched(&image, &repository, &options).await?;
        self.0.ordinaries.fetch_indexes(&image, &vouched).await;
        Ok(())
    }

    /// Fetches what the mount of the image needs and, once that is on its way, what a start most
    /// likely reads.
    async fn look_ahead(
        &self,
        image: &Ordinary,
        vouched: &Vouched,
        repository: &Arc<dyn Repository>,
        login: Option<&Login>,
    ) {
        let is_first = image.looked_ahead.get().is_none();
        let look_up = async {
            if is_first && !vouched.beside.is_empty() {
                let layers = image.manifest.parsed.layers.iter().chain(&vouched.beside);
                let (digest, layers) =
                    (&image.manifest.digest, layers.cloned().collect::<Vec<_>>());
                let guess = vouched.guess.clone();
                self.0.prefetcher.look_up_ahead(repository, digest, &layers, guess);
            }
        };
        let indexes = self.0.ordinaries.look_ahead(image, vouched, &**repository, login);
        tokio::join!(biased; indexes, look_up);
    }

    /// Removes everything of an ordinary image that nothing else uses: containerd has it no more.
    pub async fn ordinary_removed(&self, manifest: Digest) {
        self.forget_ordinary(manifest, Holder::Containerd).await;
    }

    /// The same where no client of the layer store has a layer of it any more.
    pub(in crate::daemon) async fn layers_released(&self, manifest: Digest) {
        self.forget_ordinary(manifest, Holder::LayerStore).await;
    }

    async fn forget_ordinary(&self, manifest: Digest, holder: Holder) {
        match self.0.ordinaries.store.forget_image(&manifest, holder) {
            Ok(true) => {}
            Ok(false) => return,
            Err(error) => {
                tracing::warn!(%manifest, %error, "its indexes stay in the cache");
                return;
            }
        }
        let images = self.0.root.join("images");
        let find = move || removed::indexes_of(&images, &manifest);
        for prefix in tokio::task::spawn_blocking(find).await.unwrap_or_default() {
            self.removed(prefix).await;
        }
    }
}

/// Returns whether containerd would unpack the image.
fn is_ordinary(manifest: &Manifest) -> bool {
    let manifest = &manifest.parsed;
    manifest.lazy_base().is_none() && !manifest.is_artifact()
}
