//! The images of one repository in a bundle, which has those of several.
//!
//! A digest names content, but does not entitle to it: a repository has what its own images name,
//! and what refers to them.
//!
//! ```text
//! entry ─▶ index ─▶ manifest ─▶ configuration, layers
//!            ▲          ▲
//!        referrer    referrer ─▶ configuration, layers
//! ```

use std::sync::Arc;

use lazuli_image::{Digest, oci::Descriptor};

use super::{Layout, index_json::tag};
use crate::{
    distribution::referrers,
    error::RegistryError,
    file_version::FileVersion,
    manifest::{IMAGE_TYPES, INDEX_TYPES},
    name::Reference,
    route::bundle::{Bundle, Content, Known},
};

/// Biggest size of all manifests of a repository that are read, in bytes.
const LIMIT: u64 = 64 << 20;

impl Layout {
    /// Opens the image `reference` in `bundle`, if that has any image of its repository. Reads
    /// manifests if the bundle has changed.
    pub fn in_bundle(bundle: &Bundle, reference: &Reference) -> Option<Self> {
        let layout = Layout::open(bundle.content(reference));
        let mut known = bundle.known();
        let version = FileVersion::of(&layout.index_path());
        if known.version != version {
            let entries = match layout.entries() {
                Ok(entries) => entries,
                Err(error) if error.is_missing() => Vec::new(),
                Err(error) => {
                    tracing::warn!(%error, "the bundle cannot be used now");
                    return None;
                }
            };
            *known = Known { version, entries, ..Known::default() };
        }
        let repository = reference.in_registry();
        if let Some(content) = known.content.get(&repository) {
            return Some(Layout { content: Some(content.clone()), ..layout });
        }
        let is_of = |name: String| {
            name.strip_prefix(&repository).is_some_and(|rest| rest.starts_with([':', '@']))
        };
        let images = known.entries.iter().filter(|entry| tag(entry).is_some_and(is_of));
        let images: Vec<_> = images.map(|entry| entry.digest).collect();
        if images.is_empty() {
            return None;
        }
        let (content, is_whole) = layout.content_of(images, &known.entries);
        let content = Arc::new(content);
        if is_whole {
            known.content.insert(repository, content.clone());
        }
        Some(Layout { content: Some(content), ..layout })
    }

    /// What `images` consist of, and what the lists among `entries` name as their referrers; and
    /// whether all could be read.
    fn content_of(&self, images: Vec<Digest>, entries: &[Descriptor]) -> (Content, bool) {
        let (mut content, mut manifests, mut bytes) = (Content::new(), images, 0);
        let mut is_whole = true;
        while let Some(digest) = manifests.pop() {
            if content.contains_key(&digest) {
                continue;
            }
            // What is damaged is the registry's to deliver, with all that it names.
            let document = match self.find_document(Some(&digest)) {
                Ok(document) => document,
                Err(error) => {
                    // Manifests of other platforms are not here.
                    is_whole &= error.is_missing();
                    continue;
                }
            };
            let Ok(named) = document.named(&self.place()) else { continue };
            let size = document.raw.len() as u64;
            bytes += size;
            if bytes > LIMIT {
                tracing::warn!(limit = LIMIT, "the bundle has too many manifests of a repository");
                break;
            }
            content.insert(digest, size);
            let is_manifest = |entry: &Descriptor| {
                IMAGE_TYPES.into_iter().chain(INDEX_TYPES).any(|known| known == entry.media_type)
            };
            let entries_of_index = named.manifests.into_iter().flatten();
            let (inner, others): (Vec<_>, Vec<_>) = entries_of_index.partition(is_manifest);
            manifests.extend(inner.iter().map(|entry| entry.digest));
            let blobs = named.config.into_iter().chain(named.layers.into_iter().flatten());
            for blob in blobs.chain(others).filter(Descriptor::is_distributable) {
                content.entry(blob.digest).or_insert(blob.size);
            }
            let list = referrers::tag(&digest);
            let list = entries.iter().find(|entry| tag(entry).as_ref() == Some(&list));
            if let Some(Ok(list)) = list.map(|list| self.read_list(list)) {
                manifests.extend(list.descriptors().map(|(_, entry)| entry.digest));
            }
        }
        (content, is_whole)
    }

    /// The size that `object`, the content with this digest, has to have; `None` in a layout that
    /// is not a bundle. Content of other repositories is missing.
    pub(super) fn expected_size(
        &self,
        digest: &Digest,
        object: &str,
    ) -> Result<Option<u64>, RegistryError> {
        let Some(content) = &self.content else { return Ok(None) };
        content.get(digest).copied().map(Some).ok_or_else(|| self.missing(object))
    }
}
