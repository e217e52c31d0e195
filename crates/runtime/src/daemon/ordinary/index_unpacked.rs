//! Indexes images after containerd has unpacked them, from its content store.
//!
//! Nothing is fetched, and every layer is hashed whole, as in a first pull. So the next pull of the
//! image starts lazily here, and elsewhere once its index is published. The queue is on disk, and
//! outlives the worker.

use std::{
    io,
    sync::{Arc, Weak},
    time::Duration,
};

use lazuli_image::{
    Digest,
    oci::{Descriptor, media_type},
};
use lazuli_registry::{Document, ImageName, Login, Parsed};

use super::{
    background::{Yielding, in_background},
    claimed_layer::ClaimedLayer,
    content_store::ContentStore,
    state::{Ordinaries, Ordinary},
    store::{IndexStore, Unpacked},
    whole_layer::{self, LayerError},
};
use crate::{
    cache::Cache,
    daemon::{DaemonError, api::MountRequest, node::Node},
    sync::lock,
};

/// The pause between checks whether containerd has all of an image.
const PAUSE: Duration = Duration::from_secs(2);

/// Time limit for containerd to have all of an image. If it discards layers after unpacking them,
/// it never does.
const GIVEN_UP: Duration = Duration::from_secs(3600);

/// Divides a layer's size into a bound for its index, which has about a hundredth of it and is
/// seldom larger than this bound.
const PART_OF_LAYER: u64 = 32;

/// Indexes images as containerd has unpacked them, for as long as the node serves.
pub(in crate::daemon) async fn keep_indexing(node: Weak<Node>) {
    loop {
        tokio::time::sleep(PAUSE).await;
        let Some(node) = node.upgrade() else { return };
        let Some(content) = node.ordinaries.settings.content.clone() else { return };
        let content = ContentStore::new(content);
        let all = {
            let mut waiting = lock(&node.ordinaries.waiting);
            let all = node.ordinaries.store.unpacked();
            waiting.retain(|image, _| all.iter().any(|it| it.image == *image));
            all
        };
        for unpacked in all {
            if node.lifecycle.is_leaving() {
                return;
            }
            node.index_unpacked(&content, &unpacked).await;
        }
    }
}

impl Node {
    /// Schedules an image to be indexed once containerd has pulled it, if the operator wants that.
    pub(super) fn index_when_unpacked(&self, request: &MountRequest, login: Option<&Login>) {
        let settings = &self.ordinaries.settings;
        let Ok((name, image)) = request.name_and_digest() else { return };
        if settings.content.is_none() {
            return;
        }
        // Until the image is noted, too: logins of images that do not wait are dropped.
        let mut waiting = lock(&self.ordinaries.waiting);
        if let (true, Some(login)) = (settings.publish, login) {
            let lend = || Arc::new(self.admission.logins.lend(&name, login.clone()));
            waiting.entry(image).or_insert_with(lend);
        }
        if let Err(error) = self.ordinaries.store.note_unpacked(&image, request) {
            tracing::warn!(image = %name, %error, "it is not indexed");
        }
    }

    async fn index_unpacked(&self, content: &ContentStore, unpacked: &Unpacked) {
        let Unpacked { image, request, waited } = unpacked;
        let name = &request.image;
        match self.ordinaries.find_unpacked(content, image, request) {
            Ok(Some(found)) => {
                let found = Arc::new(found);
                self.ordinaries.index_layers(content, &found).await;
                if let Err(error) = self.publish_unpacked(request, &found).await {
                    let error = error.for_people();
                    tracing::warn!(image = name, error, "its index is not published");
                }
            }
            Ok(None) if *waited < GIVEN_UP => return,
            Ok(None) => {
                tracing::info!(image = name, "not indexed: containerd does not keep its layers");
            }
            Err(error) => tracing::info!(image = name, %error, "not indexed"),
        }
        if let Err(error) = self.ordinaries.store.forget_unpacked(image) {
            tracing::warn!(image = name, %error, "it is indexed again");
        }
    }

    async fn publish_unpacked(
        &self,
        request: &MountRequest,
        image: &Arc<Ordinary>,
    ) -> Result<(), DaemonError> {
        if !self.ordinaries.settings.publish {
            return Ok(());
        }
        let login = lock(&self.ordinaries.waiting).get(&image.manifest.digest).cloned();
        self.admission.admit_pinned(request).await?;
        let options = self.admission.options(request);
        let repository = lazuli_registry::open(&request.image.parse()?, &options)?;
        let is_signed = self.ordinaries.indexing(image, &repository, &options).await?.is_some();
        self.ordinaries.publish_once(image, is_signed, &repository, login);
        Ok(())
    }
}

impl Ordinaries {
    /// The image, if containerd has all of its layers of which the node has no index.
    fn find_unpacked(
        &self,
        content: &ContentStore,
        image: &Digest,
        request: &MountRequest,
    ) -> Result<Option<Ordinary>, Box<dyn std::error::Error + Send + Sync>> {
        let asked: ImageName = request.asked.as_ref().unwrap_or(&request.image).parse()?;
        let Some(manifest) = content.document(image)? else { return Ok(None) };
        let document = Document::new(manifest.to_vec(), media_type::MANIFEST);
        let Parsed::Image(manifest) = document.parse("containerd's content store")? else {
            return Err("it is an index of images".into());
        };
        let Some(config) = content.document(&manifest.parsed.config.digest)? else {
            return Ok(None);
        };
        let found = Ordinary::new(asked, Arc::new(*manifest), config);
        if found.layers.is_empty() {
            return Err("its configuration lists other layers than its manifest".into());
        }
        let store = &self.store;
        for layer in &found.layers {
            if !store.is_proven(layer) && content.open(&layer.digest())?.is_none() {
                return Ok(None);
            }
        }
        Ok(Some(found))
    }

    /// Indexes layers, one after the other.
    async fn index_layers(&self, content: &ContentStore, image: &Ordinary) {
        for layer in &image.layers {
            let (store, cache) = (self.store.clone(), self.cache.clone());
            if store.is_proven(layer) {
                continue;
            }
            let (digest, content, layer) = (layer.digest(), content.clone(), layer.clone());
            let work = move || index(&content, &store, cache, &layer);
            match in_background(work).await.unwrap_or(Err(LayerError::Ended)) {
                Ok(()) => tracing::info!(layer = %digest, "indexed"),
                Err(error) => tracing::info!(layer = %digest, %error, "not indexed"),
            }
        }
    }
}

/// Indexes a layer that containerd has. Blocks.
fn index(
    content: &ContentStore,
    store: &IndexStore,
    cache: Arc<Cache>,
    layer: &ClaimedLayer,
) -> Result<(), LayerError> {
    let Descriptor { digest, size: expected, .. } = layer.descriptor;
    if !cache.has_room_for_hints(expected / PART_OF_LAYER) {
        return Err(LayerError::NoRoom);
    }
    let gone = || io::Error::from(io::ErrorKind::NotFound);
    let opened = content.open(&digest).and_then(|file| file.ok_or_else(gone));
    let (file, size) = opened.map_err(LayerError::Content)?;
    if size != expected {
        let problem = format!("it has {size} bytes, and its manifest says {expected}");
        return Err(LayerError::Content(io::Error::other(problem)));
    }
    let mut drop_content = |_, _: &[u8]| Ok(());
    let known = whole_layer::read(layer, Yielding::new(file, cache), &mut drop_content)?;
    whole_layer::keep(store, &layer.key(), &known)
}
