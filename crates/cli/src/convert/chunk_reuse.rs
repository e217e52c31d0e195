//! Lazy images at the target whose chunks a conversion can reuse.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use anyhow::{Context, Result, bail};
use futures_util::{StreamExt, TryStreamExt, stream};
use lazuli_builder::{Built, BuiltBlob, Dictionary};
use lazuli_image::Digest;
use lazuli_registry::{
    BlobContent, ImageName, Manifest, Options, Platform, RegistryError, Repository, SeekableLayers,
    TAGS,
};
use lazuli_runtime::image::StoredImage;

use crate::image::{push, scratch::Scratch};

/// Number of images to search for chunks when the target's tag is new: each costs its bootstrap, 1
/// to 3 MB for 20,000 files.
const SIBLINGS: usize = 3;

/// Requests at the same time.
const REQUESTS: usize = 8;

/// The place that the image is stored in, and how to reach it.
pub(crate) struct Target<'a> {
    pub(crate) name: &'a ImageName,
    pub(crate) repository: &'a Arc<dyn Repository>,
    pub(crate) options: &'a Options,
    pub(crate) platform: Option<&'a Platform>,
}

/// Lazy images whose chunks a conversion may reuse: their manifests, and the digests of their blobs
/// in the repository.
#[derive(Debug, Default)]
pub(crate) struct ReusableImages(Vec<(Digest, HashSet<Digest>)>);

impl ReusableImages {
    /// The manifests of the images whose blobs `image` uses. `image` may be one of them, converted
    /// again.
    pub(crate) fn used_by(&self, built: &Built, image: &Digest) -> Vec<Digest> {
        let used = || built.blobs.iter().filter(|blob| blob.file.is_none());
        let gives = |blobs: &HashSet<Digest>| used().any(|it| blobs.contains(&it.record.blob.id));
        let others = self.0.iter().filter(|(manifest, blobs)| manifest != image && gives(blobs));
        others.map(|(manifest, _)| *manifest).collect()
    }
}

/// The chunks that a conversion may reuse, and the images that they are from.
#[derive(Debug, Default)]
pub(crate) struct Reusable {
    pub(crate) dictionary: Dictionary,
    pub(crate) images: ReusableImages,
}

impl Target<'_> {
    /// Finds the chunks of the image that has the target's name now, or of those with the nearest
    /// tags, and the chunks of `wanted`, whose blobs [`Target::link`] mounts later.
    ///
    /// # Errors
    /// `wanted` is not a lazy image in the target's registry. Other failures only mean that less is
    /// reused; one that prevents storing the image is reported by the push.
    pub(crate) async fn reusable(&self, wanted: Option<&ImageName>) -> Result<Reusable> {
        let mut known = Reusable::default();
        if let Some(wanted) = wanted {
            if !push::same_place(wanted, self.name)
                && push::mount_source(wanted, self.name).is_none()
            {
                bail!(
                    "{wanted} is not in the registry of {}, which cannot mount its blobs: copy it with \
                     `lazuli copy` first",
                    self.name
                );
            }
            let repository = lazuli_registry::open(wanted, self.options)?;
            let manifest = repository.manifest(self.platform).await?;
            let added = self.add(&repository, &manifest, &mut known).await;
            added.with_context(|| format!("cannot use the chunks of {wanted}"))?;
        }
        if let Err(error) = self.add_siblings(&mut known).await {
            tracing::debug!(%error, "nothing of the target's repository is used");
        }
        Ok(known)
    }

    /// Mounts the blobs of `wanted` that the image uses. Returns the bytes that had to be sent.
    pub(crate) async fn link(&self, wanted: &ImageName, built: &Built) -> Result<u64> {
        let Some(mount_from) = push::mount_source(wanted, self.name) else { return Ok(0) };
        let repository = lazuli_registry::open(wanted, self.options)?;
        let used = built.blobs.iter().filter(|blob| blob.file.is_none());
        let stored = |blob: &BuiltBlob| {
            let record = &blob.record.blob;
            (record.id, record.stored_size, BlobContent::Stored(repository.clone()))
        };
        let blobs = used.map(stored).collect();
        push::upload(&**self.repository, blobs, Some(mount_from), &|_| {}).await
    }

    async fn add_siblings(&self, known: &mut Reusable) -> Result<()> {
        match self.repository.manifest(self.platform).await {
            Ok(manifest) if manifest.parsed.lazy_base().is_some() => {
                return self.add(self.repository, &manifest, known).await;
            }
            Ok(_) | Err(RegistryError::Missing { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        let tags = self.repository.tags(TAGS).await?;
        let tag = self.name.tag().unwrap_or_default();
        for sibling in nearest(&tag, tags).iter().filter_map(|tag| self.name.tagged(tag)) {
            let repository = lazuli_registry::open(&sibling, self.options)?;
            let manifest = match repository.manifest(self.platform).await {
                Ok(manifest) if manifest.parsed.lazy_base().is_some() => manifest,
                _ => continue,
            };
            if let Err(error) = self.add(&repository, &manifest, known).await {
                tracing::debug!(%error, image = %sibling, "its chunks are not used");
            }
        }
        Ok(())
    }

    /// Adds the chunks of a lazy image, as far as the repository has their blobs.
    async fn add(
        &self,
        repository: &Arc<dyn Repository>,
        manifest: &Manifest,
        known: &mut Reusable,
    ) -> Result<()> {
        let (data, _) = manifest.parsed.lazy_base().context("it is not a lazy image")?;
        let scratch = Scratch::new()?;
        let directory = scratch.path();
        let present = data.iter().map(|layer| async move {
            let here = repository.has_blob(&layer.digest).await?;
            Ok::<_, RegistryError>(here.then_some((layer.digest, (layer.size, layer.hot_bytes()))))
        });
        let present = stream::iter(present).buffer_unordered(REQUESTS).try_collect::<Vec<_>>();
        let seekable = SeekableLayers::Ordinary;
        let fetch = async {
            Ok(StoredImage::fetch(repository.clone(), manifest, &directory, seekable).await)
        };
        let (present, image) = tokio::try_join!(present, fetch)?;
        let present: HashMap<Digest, (u64, Option<u64>)> = present.into_iter().flatten().collect();
        known.dictionary.add(&image?.0.bootstrap, |blob| present.get(blob).copied());
        known.images.0.push((manifest.digest, present.into_keys().collect()));
        Ok(())
    }
}

/// The tags next to `tag` in order, where numbers compare as numbers: first those below it.
fn nearest(tag: &str, mut tags: Vec<String>) -> Vec<String> {
    // Registries without the referrers API keep lists of referrers under such tags.
    tags.retain(|other| other != tag && !other.starts_with("sha256-"));
    tags.sort_by_cached_key(|tag| parts(tag));
    let at = tags.partition_point(|other| parts(other) < parts(tag));
    let (below, above) = tags.split_at(at);
    // The new image is usually the newest.
    below.iter().rev().chain(above).take(SIBLINGS).cloned().collect()
}

/// Splits a tag between digits and other characters, so that 1.10 sorts behind 1.9.
fn parts(tag: &str) -> Vec<(u64, String)> {
    let mut parts = Vec::new();
    let mut rest = tag;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        let (number, text) = rest.split_at(digits);
        let end = text.find(|c: char| c.is_ascii_digit()).unwrap_or(text.len());
        let (text, next) = text.split_at(end);
        parts.push((number.parse().unwrap_or(u64::MAX), text.to_owned()));
        rest = next;
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn near_tags_are_those_just_below_and_then_those_above() {
        let tags =
            ["1.2", "1.10", "latest", "1.9", "1.11", "2.0", "sha256-1"].map(String::from).to_vec();
        assert_eq!(nearest("1.11", tags.clone()), ["1.10", "1.9", "1.2"]);
        assert_eq!(nearest("1.1", tags.clone()), ["1.2", "1.9", "1.10"]);
        assert_eq!(nearest("1.9.1", tags), ["1.9", "1.2", "1.10"]);
        assert!(nearest("x", vec!["x".into()]).is_empty());
    }
}
