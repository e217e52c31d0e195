//! Referrers in a layout directory.
//!
//! The image specification has no place for them there. Tools that copy an image with its referrers
//! keep the list under the tag that registries without the referrers API have it under; so does
//! [`Layout::enlist`].

use lazuli_image::{
    Algorithm, Digest,
    oci::{Descriptor, media_type},
};

use super::{Layout, files::write_whole, index_json::REF_NAME};
use crate::{
    distribution::referrers::{ReferrerIndex, tag},
    error::RegistryError,
    manifest::DOCUMENT_LIMIT,
    name::Selector,
};

impl Layout {
    /// The list of referrers of `subject`.
    pub(super) fn list_of(&self, subject: &Digest) -> Result<ReferrerIndex, RegistryError> {
        self.expected_size(subject, &format!("manifest {subject}"))?;
        let raw = match self.read_bounded(&self.index_path(), "index.json") {
            Err(RegistryError::Missing { .. }) => return Ok(ReferrerIndex::empty()),
            raw => raw?,
        };
        let malformed = |problem| RegistryError::malformed(&self.place(), "index.json", problem);
        let index = ReferrerIndex::parse(&raw).map_err(malformed)?;
        let tag = tag(subject);
        let named = |entry: &Descriptor| entry.annotations.get(REF_NAME) == Some(&tag);
        let Some(list) = index.descriptors().map(|(_, entry)| entry).find(named) else {
            return Ok(ReferrerIndex::empty());
        };
        self.read_list(&list)
    }

    /// The list in the entry `list` of index.json.
    pub(super) fn read_list(&self, list: &Descriptor) -> Result<ReferrerIndex, RegistryError> {
        let object = format!("the list of referrers {}", list.digest);
        let malformed = |problem| RegistryError::malformed(&self.place(), &object, problem);
        let raw = self.read_bounded(&self.blob_path(&list.digest), &object)?;
        if !list.digest.matches(&raw) {
            return Err(malformed("it has another digest".to_owned()));
        }
        ReferrerIndex::parse(&raw).map_err(malformed)
    }

    /// Adds the pushed manifest to the list of referrers of `subject`.
    pub(super) fn enlist(
        &self,
        subject: &Digest,
        entries: &[Descriptor],
    ) -> Result<(), RegistryError> {
        let (place, tag) = (self.place(), tag(subject));
        let object = format!("the list of referrers {tag}");
        let json =
            |error: serde_json::Error| RegistryError::malformed(&place, &object, error.to_string());
        self.prepare()?;
        let _lock = self.lock()?;
        let mut list = self.list_of(subject)?;
        let mut changed = false;
        for entry in entries {
            changed |= list.update(entry, None).map_err(json)?;
        }
        if changed {
            let raw = list.to_json().map_err(json)?;
            if raw.len() as u64 > DOCUMENT_LIMIT {
                return Err(RegistryError::TooLarge { place, object, limit: DOCUMENT_LIMIT });
            }
            let digest = Algorithm::Sha256.digest(&raw);
            write_whole(&self.blob_path(&digest), &raw)?;
            self.update_index(Some(&Selector::Tag(tag)), raw.len(), &digest, media_type::INDEX)?;
        }
        self.unnamed.named();
        Ok(())
    }
}
