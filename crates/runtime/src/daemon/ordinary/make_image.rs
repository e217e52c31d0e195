//! Makes images of layers: each once, and ahead of its mount if the node may pull layers for its
//! client.

use std::{io, path::PathBuf, sync::Arc};

use futures_util::future::join_all;
use lazuli_builder::index::KnownLayer;

use super::{
    made_images::{Part, inputs},
    state::Ordinary,
    vouched::Vouched,
};
use crate::{
    daemon::{DaemonError, admission::pins::Pin, images::Images, node::Node},
    image::{
        ImageError, StoredImage,
        from_indexes::{Prefix, PrefixError},
    },
};

impl Images {
    /// Makes the image of all layers of an ordinary image that are proven, before it is mounted,
    /// unless that was begun before.
    pub(super) fn make_ahead(&self, image: &Arc<Ordinary>) {
        if image.made_ahead.set(()).is_err() {
            return;
        }
        let (images, image) = (self.clone(), image.clone());
        tokio::spawn(async move {
            if let Err(error) = images.made_ahead(&image).await {
                let error = error.for_people();
                tracing::debug!(image = %image.asked, error, "made when it is mounted");
            }
        });
    }

    async fn made_ahead(&self, image: &Ordinary) -> Result<(), DaemonError> {
        let (ordinaries, nobody) = (&self.0.ordinaries, Vouched::default());
        let known = image.layers.iter().map(|layer| ordinaries.known_layer(layer, &nobody));
        let known: Option<Vec<_>> = join_all(known).await.into_iter().collect();
        let Some((known, count)) = known.zip(u32::try_from(image.layers.len()).ok()) else {
            return Ok(());
        };
        let (made, _) = self.0.image_of_layers(image, Part::Lowest(count), known).await?;
        // Its removal may have found nothing.
        if ordinaries.store.image(&image.manifest.digest).is_none() {
            self.removed(made.manifest_digest).await;
        }
        Ok(())
    }
}

impl Node {
    /// The image that consists of these layers of an ordinary image, and a pin on its files.
    pub(super) async fn image_of_layers(
        &self,
        image: &Ordinary,
        part: Part,
        layers: Vec<KnownLayer>,
    ) -> Result<(StoredImage, Pin), DaemonError> {
        let unusable = |source: Box<PrefixError>| DaemonError::Prefix {
            image: image.asked.to_string(),
            source: source.into(),
        };
        let (images, manifest) = (self.root.join("images"), image.manifest.clone());
        let hash = move || Ok((inputs(&manifest.digest, part, &layers), layers));
        let (inputs, mut layers) = blocking(hash).await.map_err(unusable)?;
        let _once = self.admission.fetch_locks.lock(&format!("image of {inputs}")).await;
        if let Some(made) = self.ordinaries.made.of(&inputs) {
            let pin = self.admission.pins.pin(&images, made);
            let images = images.clone();
            // It may have been removed.
            if let Ok(stored) = blocking(move || Prefix::open(&images, &made)).await {
                return Ok((stored, pin));
            }
        }
        let manifest = image.manifest.clone();
        let make = move || match part {
            Part::Lowest(_) => Prefix::new(&manifest, layers),
            Part::One(_) => Prefix::one(&manifest, layers.swap_remove(0)),
        };
        let prefix = blocking(make).await.map_err(unusable)?;
        let digest = prefix.digest;
        let pin = self.admission.pins.pin(&images, digest);
        let config = image.config.clone();
        let stored = blocking(move || prefix.store(&images, &config)).await.map_err(unusable)?;
        self.ordinaries.made.note(inputs, digest);
        Ok((stored, pin))
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, PrefixError> + Send + 'static,
) -> Result<T, Box<PrefixError>> {
    let done = tokio::task::spawn_blocking(work).await;
    let ended = |panic| {
        let (path, source) = (PathBuf::from("indexes"), io::Error::other(panic));
        Err(ImageError::Io { path, source }.into())
    };
    done.unwrap_or_else(ended).map_err(Box::new)
}
