//! Storing a finished image under its name.

use std::{mem, path::PathBuf};

use anyhow::{Context as _, Result, bail};
use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt, stream};
use lazuli_builder::{BootstrapLayer, BuiltBlob, index::ImageIndex};
use lazuli_image::{
    Digest, Stored,
    oci::{BlobLayer, LazyImage, media_type},
    rafs::{self, BlobRecord},
};
use lazuli_registry::{
    BlobContent, Document, ImageName, Progress, Pull, Push, PushBy, Pushed, Repository,
};

use crate::{image::sign::Signer, progress};

/// Blobs that are uploaded at the same time: enough to hide round trips, few enough for any
/// registry.
const UPLOADS: usize = 4;

/// A blob to store: its digest, its size in bytes, and its content.
pub(crate) type Blob = (Digest, u64, BlobContent);

/// `source`'s repository, if the target's registry can mount blobs from there: another repository
/// of the same registry.
pub(crate) fn mount_source<'a>(source: &'a ImageName, target: &ImageName) -> Option<&'a str> {
    match (source, target) {
        (ImageName::Registry(source), ImageName::Registry(target))
            if source.registry() == target.registry()
                && source.repository() != target.repository() =>
        {
            Some(source.repository())
        }
        _ => None,
    }
}

/// The blob to store for one that was built; `None` if the target has it.
pub(crate) fn built(blob: &BuiltBlob) -> Option<Blob> {
    let record = &blob.record.blob;
    Some((record.id, record.stored_size, BlobContent::File(blob.file.clone()?)))
}

/// Takes out of an index the blobs to store for it, beside its bootstrap. Some are in files that
/// are there as long as `index`.
pub(crate) fn take_indexed(index: &mut ImageIndex) -> Vec<Blob> {
    let mut blobs: Vec<_> = index.beside.iter().filter_map(built).collect();
    blobs.extend(index.layers.iter_mut().filter_map(|layer| {
        let (written, bytes) = (layer.record.tail.index?, mem::take(&mut layer.bytes));
        Some((written.digest, written.size, BlobContent::Bytes(Bytes::from(bytes))))
    }));
    blobs
}

/// Returns whether both images are in the same repository or layout, and share its blobs.
pub(crate) fn same_place(a: &ImageName, b: &ImageName) -> bool {
    match (a, b) {
        (ImageName::Registry(a), ImageName::Registry(b)) => {
            a.registry() == b.registry() && a.repository() == b.repository()
        }
        (ImageName::Layout(a), ImageName::Layout(b)) => {
            let real = |path: &PathBuf| path.canonicalize().ok();
            real(&a.directory).is_some_and(|a| real(&b.directory) == Some(a))
        }
        _ => false,
    }
}

/// Refuses a target with a digest, which can only name the image that it is of.
pub(crate) fn must_name_a_new_image(name: &ImageName) -> Result<()> {
    if name.is_pinned() {
        bail!(
            "cannot store a new image as {name}, a digest names one image for ever: say another TARGET"
        );
    }
    Ok(())
}

/// The content of `<blob id>.blob.meta` for a blob in `repository`: from the bootstrap, or from the
/// blob's end if another writer made it.
pub(crate) async fn meta_file(repository: &dyn Pull, record: &BlobRecord) -> Result<Vec<u8>> {
    if let Some(written) = rafs::written_meta_file(record) {
        return Ok(written);
    }
    let (blob, tail) = (&record.blob, &record.tail);
    let range = Stored(tail.ci_offset)..Stored(tail.meta_end());
    let tail = repository.read(&blob.id, blob.stored_size, range, &|_| {}).await?;
    rafs::meta_file(&tail, record).with_context(|| format!("blob {}", blob.id))
}

/// The manifest's layer for a blob that was built.
pub(crate) fn layer(blob: &BuiltBlob) -> BlobLayer {
    let record = &blob.record.blob;
    BlobLayer { digest: record.id, size: record.stored_size, hot_bytes: blob.hot_bytes }
}

/// Stores the blobs, the config, the manifest, the signatures and the tag in this order, so that
/// the tag always names something complete. Returns the bytes that the target did not have yet.
pub(crate) async fn push(
    target: &dyn Repository,
    blobs: Vec<Blob>,
    bootstrap: BootstrapLayer,
    image: LazyImage,
    mount_from: Option<&str>,
    signer: Option<&Signer>,
) -> Result<u64> {
    let uploaded = push_blobs(target, blobs, bootstrap, &image, mount_from).await?;
    let expected = image.digest;
    let document = Document::new(image.manifest, media_type::MANIFEST);
    if let Some(signer) = signer {
        target.push_document(&document, PushBy::Digest).await?;
        signer.sign_lazy(target, &document).await?;
    }
    let digest = target.push_manifest(document.raw, media_type::MANIFEST).await?;
    if digest != expected {
        bail!("{} stored {digest} instead of {expected}", target.describe());
    }
    Ok(uploaded)
}

/// Stores an image without its manifest.
pub(crate) async fn push_blobs(
    target: &dyn Push,
    mut blobs: Vec<Blob>,
    bootstrap: BootstrapLayer,
    image: &LazyImage,
    mount_from: Option<&str>,
) -> Result<u64> {
    let size = bootstrap.size();
    blobs.push((bootstrap.digest, size, BlobContent::Bytes(Bytes::from(bootstrap.bytes))));
    let config = Bytes::from(image.config.clone());
    blobs.push((image.config_digest, config.len() as u64, BlobContent::Bytes(config)));
    let bar = progress::bytes(Some(blobs.iter().map(|(_, size, _)| size).sum()), "storing");
    let uploaded = upload(target, blobs, mount_from, &|bytes| bar.inc(bytes)).await?;
    bar.finish_and_clear();
    Ok(uploaded)
}

/// Stores blobs, several at a time.
pub(crate) async fn upload(
    target: &dyn Push,
    blobs: Vec<Blob>,
    mount_from: Option<&str>,
    count: Progress<'_>,
) -> Result<u64> {
    let pushes = blobs.into_iter().map(|(digest, size, content)| async move {
        target.push_blob(&digest, size, content, mount_from, count).await
    });
    let sum = |sum, pushed| async move {
        Ok(sum + if let Pushed::Uploaded(bytes) = pushed { bytes } else { 0 })
    };
    Ok(stream::iter(pushes).buffer_unordered(UPLOADS).try_fold(0, sum).await?)
}
