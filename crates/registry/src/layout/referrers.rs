//! Referrers in a layout directory.
//!
//! The image specification has no place for them there. Tools that copy an image with its referrers keep the list under the
//! tag that registries without the referrers API have it under; that one is read.

use lazuli_image::{Digest, oci::Descriptor};

use super::{Layout, REF_NAME};
use crate::{
    error::RegistryError,
    referrers::{Index, tag},
};

impl Layout {
    /// The referrers of `subject` that are of `artifact_type`.
    pub(super) fn find_referrers(
        &self,
        subject: &Digest,
        artifact_type: &str,
    ) -> Result<Vec<Descriptor>, RegistryError> {
        let malformed =
            |object: &str, problem| RegistryError::malformed(&self.place(), object, problem);
        let raw = match self.read_bounded(&self.index_path(), "index.json") {
            Err(RegistryError::Missing { .. }) => return Ok(Vec::new()),
            raw => raw?,
        };
        let index = Index::parse(&raw).map_err(|problem| malformed("index.json", problem))?;
        let tag = tag(subject);
        let named = |entry: &Descriptor| entry.annotations.get(REF_NAME) == Some(&tag);
        let Some(list) = index.descriptors().map(|(_, entry)| entry).find(named) else {
            return Ok(Vec::new());
        };
        let object = format!("the list of referrers {tag}");
        let raw = self.read_bounded(&self.blob_path(&list.digest), &object)?;
        if !list.digest.matches(&raw) {
            return Err(malformed(&object, format!("it is not what {} names", list.digest)));
        }
        let index = Index::parse(&raw).map_err(|problem| malformed(&object, problem))?;
        Ok(index.of_type(artifact_type))
    }
}
