//! Copies an image from one place to another: manifests byte for byte, blobs, and all referrers.
//!
//! ```text
//! index ─▶ manifest ─▶ config, layers                copied before what names them
//!   ▲         ▲
//! referrer  referrer ─▶ config, layers               copied after the image, and listed there
//!
//! tag sha256-HEX.sig ─▶ manifest ─▶ config, layers   cosign's; copies of their own
//! ```

use std::{
    collections::{BTreeMap, HashSet},
    ops::AddAssign,
    sync::Arc,
};

use futures_util::{StreamExt as _, TryStreamExt as _, future::BoxFuture, stream};
use lazuli_image::{
    Digest,
    oci::{Descriptor, Platform},
};

use crate::{
    blob::{Progress, Pushed},
    distribution::referrers,
    error::RegistryError,
    manifest::{Document, IMAGE_TYPES, INDEX_TYPES},
    repository::{BlobContent, PushBy, Repository},
};

/// Blobs that are copied at the same time, and questions for referrers: enough to hide round trips,
/// few enough for any registry.
const AT_ONCE: usize = 4;

/// Maximum size of all manifests of one image, referrers included, in bytes. Each has a few hundred
/// bytes, or a few kB.
const LIMIT: u64 = 64 << 20;

/// How deep indexes may hold indexes, and referrers have referrers: a signature of an attestation
/// of an image is 2.
const DEPTH: usize = 4;

/// An image to copy: all of its manifests, and the blobs that they name.
#[derive(Debug)]
pub struct Copy {
    from: Arc<dyn Repository>,
    /// The only platform whose images are copied, if one is.
    platform: Option<Platform>,
    /// Each behind those that it names.
    documents: Vec<Document>,
    /// The number of documents that make up the image. The last of them is the one that was asked
    /// for.
    image: usize,
    blobs: Vec<Descriptor>,
    /// By their subjects.
    referrers: BTreeMap<Digest, Vec<Descriptor>>,
    known: HashSet<Digest>,
    /// Bytes of all documents.
    bytes: u64,
}

/// The result of a copy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Copied {
    /// Uploads. Parts that were sent again count each time.
    pub sent: Count,
    /// Blobs that the registry linked from another of its repositories.
    pub mounted: Count,
    /// Content that the destination already had.
    pub existed: Count,
}

/// Blobs and manifests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// The number.
    pub objects: u64,
    /// Their bytes.
    pub bytes: u64,
}

impl Copied {
    fn add(&mut self, pushed: Pushed, size: u64) {
        let (count, bytes) = match pushed {
            Pushed::Existed => (&mut self.existed, size),
            Pushed::Mounted => (&mut self.mounted, size),
            Pushed::Uploaded(bytes) => (&mut self.sent, bytes),
        };
        count.objects += 1;
        count.bytes += bytes;
    }
}

impl AddAssign for Copied {
    fn add_assign(&mut self, other: Self) {
        for (count, more) in [
            (&mut self.sent, other.sent),
            (&mut self.mounted, other.mounted),
            (&mut self.existed, other.existed),
        ] {
            count.objects += more.objects;
            count.bytes += more.bytes;
        }
    }
}

impl Copy {
    /// Reads all manifests of the image that `from` was opened at, for `platform` or for all of
    /// them, and their referrers.
    ///
    /// # Errors
    /// One of them cannot be read, or names something in a way that is not understood: a copy would
    /// not be whole.
    pub async fn plan(
        from: Arc<dyn Repository>,
        platform: Option<Platform>,
    ) -> Result<Self, RegistryError> {
        let root = from.document(None).await?;
        let mut copy = Copy {
            from,
            platform,
            documents: Vec::new(),
            image: 0,
            blobs: Vec::new(),
            referrers: BTreeMap::new(),
            known: HashSet::new(),
            bytes: 0,
        };
        copy.visit(root, 0).await?;
        copy.image = copy.documents.len();
        let mut asked = 0;
        for _ in 0..DEPTH {
            let subjects: Vec<_> = copy.documents[asked..].iter().map(|it| it.digest).collect();
            asked = copy.documents.len();
            let from = &copy.from;
            let ask = subjects.into_iter().map(|subject| async move {
                let listed = from.referrers(&subject, None).await?;
                Ok::<_, RegistryError>((subject, listed))
            });
            let found: Vec<_> = stream::iter(ask).buffered(AT_ONCE).try_collect().await?;
            for (subject, listed) in found {
                for entry in listed {
                    copy.refer(&subject, &entry.digest).await?;
                }
            }
        }
        Ok(copy)
    }

    /// Plans the copies of cosign's content under tags of its own beside the image's manifests:
    /// signatures, attestations, SBOMs. `open` opens such a tag beside the image; `None` if it
    /// cannot exist there.
    ///
    /// # Errors
    /// Whether there is such a tag cannot be found out, or it cannot be read: a copy would lack a
    /// signature.
    pub async fn attachments(
        &self,
        open: impl Fn(&str) -> Result<Option<Arc<dyn Repository>>, RegistryError>,
    ) -> Result<Vec<(String, Copy)>, RegistryError> {
        let digests = self.documents[..self.image].iter().map(|document| document.digest);
        let tags = digests.flat_map(|digest| referrers::attachment_tags(&digest));
        let plans = tags.map(|tag| {
            let place = open(&tag);
            async move {
                let Some(place) = place? else { return Ok(None) };
                match Copy::plan(place, None).await {
                    Ok(copy) => Ok(Some((tag, copy))),
                    Err(error) if error.is_missing() => Ok(None),
                    Err(error) => Err(error),
                }
            }
        });
        let found: Vec<_> = stream::iter(plans).buffered(AT_ONCE).try_collect().await?;
        Ok(found.into_iter().flatten().collect())
    }

    /// The total size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes + self.blobs.iter().map(|blob| blob.size).sum::<u64>()
    }

    /// The digest of the manifest or index that was asked for.
    pub fn digest(&self) -> Digest {
        self.documents[self.image - 1].digest
    }

    /// Manifests that refer to the image, or to a part of it.
    pub fn referrers(&self) -> usize {
        self.referrers.values().map(Vec::len).sum()
    }

    /// Stores everything in `to`, under the name that it was opened at. `mount_from` is another
    /// repository of the same registry that has the image.
    ///
    /// # Errors
    /// Something could not be read or stored. The name in `to` changes only after the whole image
    /// is stored.
    pub async fn run(
        &self,
        to: &dyn Repository,
        mount_from: Option<&str>,
        progress: Progress<'_>,
    ) -> Result<Copied, RegistryError> {
        let mut copied = Copied::default();
        let pushes = self.blobs.iter().map(|Descriptor { digest, size, .. }| async move {
            let content = BlobContent::Stored(self.from.clone());
            let pushed = to.push_blob(digest, *size, content, mount_from, progress).await?;
            Ok::<_, RegistryError>((pushed, *size))
        });
        let mut pushes = stream::iter(pushes).buffer_unordered(AT_ONCE);
        while let Some((pushed, size)) = pushes.try_next().await? {
            copied.add(pushed, size);
        }
        for (number, document) in self.documents.iter().enumerate() {
            let size = document.raw.len() as u64;
            let by = if number + 1 == self.image { PushBy::Tag } else { PushBy::Digest };
            copied.add(to.push_document(document, by).await?, size);
            progress(size);
        }
        for (subject, entries) in &self.referrers {
            to.enlist_referrers(subject, entries).await?;
        }
        Ok(copied)
    }

    /// Adds a document behind everything that it names.
    fn visit(
        &mut self,
        document: Document,
        depth: usize,
    ) -> BoxFuture<'_, Result<(), RegistryError>> {
        Box::pin(async move {
            if !self.known.insert(document.digest) {
                return Ok(());
            }
            let object = format!("manifest {}", document.digest);
            self.bytes += document.raw.len() as u64;
            if self.bytes > LIMIT || depth > DEPTH {
                let problem =
                    format!("with all that it names it is more than {LIMIT} bytes, or too deep");
                return Err(RegistryError::malformed(&self.from.describe(), &object, problem));
            }
            let named = document.named(&self.from.describe())?;
            let wanted = self.platform.clone();
            let is_wanted = |entry: &Descriptor| match (&wanted, entry.runs_on()) {
                (Some(wanted), Some(platform)) => platform.satisfies(wanted),
                _ => true,
            };
            for entry in named.manifests.into_iter().flatten().filter(is_wanted) {
                let types = || IMAGE_TYPES.into_iter().chain(INDEX_TYPES);
                if types().any(|known| known == entry.media_type) {
                    let inner = self.from.document(Some(&entry.digest)).await?;
                    self.visit(inner, depth + 1).await?;
                } else {
                    // A build cache is an index of layers.
                    self.add_blob(entry);
                }
            }
            let layers = named.layers.into_iter().flatten();
            named.config.into_iter().chain(layers).for_each(|blob| self.add_blob(blob));
            self.documents.push(document);
            Ok(())
        })
    }

    fn add_blob(&mut self, blob: Descriptor) {
        if blob.is_distributable() && self.known.insert(blob.digest) {
            self.blobs.push(blob);
        }
    }

    /// Adds the manifest `referrer`, which a list gives as a referrer of `subject`. Any client that
    /// may push can write lists, and lists under tags keep deleted manifests.
    async fn refer(&mut self, subject: &Digest, referrer: &Digest) -> Result<(), RegistryError> {
        let document = match self.from.document(Some(referrer)).await {
            Err(RegistryError::Missing { .. }) => {
                tracing::warn!(%subject, %referrer, "listed as a referrer, but not there");
                return Ok(());
            }
            other => other?,
        };
        let named = document.named(&self.from.describe())?;
        if named.subject.is_none_or(|named| named.digest != *subject) {
            tracing::warn!(%subject, %referrer, "listed as a referrer, but it refers to something else");
            return Ok(());
        }
        let entry = Descriptor {
            artifact_type: named.artifact_type.or(named.config.map(|config| config.media_type)),
            annotations: named.annotations.unwrap_or_default(),
            ..Descriptor::plain(&document.media_type, document.digest, document.raw.len() as u64)
        };
        self.referrers.entry(*subject).or_default().push(entry);
        self.visit(document, 0).await
    }
}
