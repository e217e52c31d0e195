//! Puts an index that this node has made beside its image, for other nodes.

use std::{fs, path::Path, sync::Arc};

use lazuli_builder::{
    index::{ImageIndex, KnownLayer, assemble},
    pack_bootstrap,
};
use lazuli_image::{
    oci::{BlobLayer, IndexImage, IndexedLayer, NotedGuess, media_type},
    rafs::IndexedBootstrap,
};
use lazuli_policy::{
    Converter, Indexing, Source, StatedLayer, Statement,
    sign::{SigningKey, attach},
};
use lazuli_registry::{BlobContent, Document, ImageName, PushBy, Repository};

use super::{
    background::in_background,
    content_store::ContentStore,
    layer_content::LayerContent,
    state::{Ordinaries, Ordinary},
};
use crate::{cache::Cache, daemon::admission::logins::Lent, prefetch};

type Outcome<T = ()> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

impl Ordinaries {
    /// Publishes the index of an image with all layers known, once, unless it `is_signed` already.
    /// Nothing waits for that.
    pub(super) fn publish_once(
        &self,
        image: &Arc<Ordinary>,
        is_signed: bool,
        repository: &Arc<dyn Repository>,
        login: Option<Arc<Lent>>,
    ) {
        if !self.settings.publish || is_signed || image.published.set(()).is_err() {
            return;
        }
        let (image, repository) = (image.clone(), repository.clone());
        let (store, key) = (self.store.clone(), self.settings.key.clone());
        let (cache, content) = (self.cache.clone(), self.settings.content.clone());
        tokio::spawn(async move {
            let _login = login;
            let known = image.layers.iter().map(|layer| store.proven(layer));
            let Some(known) = known.collect::<Option<Vec<_>>>() else { return };
            if known.is_empty() || known.len() != image.manifest.parsed.layers.len() {
                return;
            }
            let name = image.asked.to_string();
            let content = content.map(ContentStore::new);
            let stated = stated(&known);
            let published = match make(image.clone(), known, cache, content).await {
                Ok(made) => publish(&image, made, stated, &*repository, key.as_deref()).await,
                Err(error) => Err(error),
            };
            match published {
                Ok(()) => tracing::info!(image = name, "its index is published"),
                Err(error) => tracing::warn!(image = name, %error, "its index is not published"),
            }
        });
    }
}

/// Makes the image's index of those of its layers, and guesses what a start reads. Gives way to
/// everything else.
async fn make(
    image: Arc<Ordinary>,
    known: Vec<KnownLayer>,
    cache: Arc<Cache>,
    content: Option<ContentStore>,
) -> Outcome<(ImageIndex, Option<NotedGuess>)> {
    let runtime = tokio::runtime::Handle::current();
    let make = move || -> Outcome<_> {
        let made = assemble(known)?;
        let bootstrap = IndexedBootstrap::new(made.bootstrap.clone(), &made.layers)?;
        let bootstrap = bootstrap.open()?;
        let blobs = bootstrap.blobs();
        let content = LayerContent::open(blobs, &cache, content.as_ref());
        if image.manifest.parsed.is_artifact() {
            return Ok((made, None));
        }
        let config = serde_json::from_slice(&image.config)?;
        let guess = runtime.block_on(prefetch::makers_guess(&config, &bootstrap, &content));
        Ok((made, NotedGuess::of(&guess)))
    };
    in_background(make).await.unwrap_or_else(|| Err("the worker is ending".into()))
}

/// What a statement says of the layers.
fn stated(known: &[KnownLayer]) -> Vec<StatedLayer> {
    let stated = known.iter().map(|known| StatedLayer {
        layer: known.digest,
        diff_id: known.diff_id,
        index: lazuli_image::Algorithm::Sha256.digest(&known.index),
    });
    stated.collect()
}

async fn publish(
    image: &Ordinary,
    (made, guess): (ImageIndex, Option<NotedGuess>),
    stated: Vec<StatedLayer>,
    repository: &dyn Repository,
    key: Option<&Path>,
) -> Outcome {
    let document = store(image, made, guess.as_ref(), repository).await?;
    let Some(key) = key else { return Ok(()) };
    let key = SigningKey::from_pem(&fs::read(key)?, None)?;
    let name = image.asked.to_string();
    let name = name.split('@').next().unwrap_or_default().to_owned();
    let digest = image.manifest.digest;
    let version = env!("CARGO_PKG_VERSION").to_owned();
    let indexing = Indexing {
        source: Source { name, digest, manifest: digest },
        converter: Converter { version, program: None },
        layers: stated,
    };
    let reference = repository_name(&image.asked);
    let statement = Statement::indexed(reference, document.digest, &indexing)?;
    let subject = lazuli_image::oci::Descriptor::plain(
        &document.media_type,
        document.digest,
        document.raw.len() as u64,
    );
    Ok(attach(repository, &subject, &statement, &key).await?)
}

/// The repository of an image, as signatures spell it.
fn repository_name(name: &ImageName) -> String {
    match name {
        ImageName::Registry(reference) => {
            format!("{}/{}", reference.registry(), reference.repository())
        }
        ImageName::Layout(_) => name.to_string(),
    }
}

/// Stores the blobs before the manifest, and has it listed.
async fn store(
    image: &Ordinary,
    made: ImageIndex,
    guess: Option<&NotedGuess>,
    repository: &dyn Repository,
) -> Outcome<Document> {
    let bootstrap = pack_bootstrap(&made.bootstrap, []);
    let layer = BlobLayer::new(bootstrap.digest, bootstrap.size());
    let indexed: Vec<_> = made.layers.iter().filter_map(IndexedLayer::of).collect();
    let subject = image.manifest.descriptor();
    let config = &image.manifest.parsed.config;
    let IndexImage { manifest, descriptor } =
        IndexImage::new(subject, config, &indexed, &[], layer, guess)?;
    let bytes = made.layers.into_iter().map(|layer| layer.bytes).chain([bootstrap.bytes]);
    for bytes in bytes {
        let digest = lazuli_image::Algorithm::Sha256.digest(&bytes);
        let (size, content) = (bytes.len() as u64, BlobContent::Bytes(bytes.into()));
        repository.push_blob(&digest, size, content, None, &|_| {}).await?;
    }
    let document = Document::new(manifest, media_type::MANIFEST);
    repository.push_document(&document, PushBy::Digest).await?;
    repository.enlist_referrers(&image.manifest.digest, &[descriptor]).await?;
    Ok(document)
}
