//! `index.json`: the images of a directory by their tags.

use std::fs::File;

use lazuli_image::{Digest, oci::Descriptor};
use lazuli_sys::path_error::At as _;
use rustix::fs::{FlockOperation, flock};
use serde_json::{Map, Value, json};

use super::{Layout, files::write_whole};
use crate::{
    distribution::referrers::is_beside_image,
    error::RegistryError,
    manifest::{self, Parsed},
    name::Selector,
};

/// The annotation that holds the tag.
pub(super) const REF_NAME: &str = "org.opencontainers.image.ref.name";

impl Layout {
    pub(super) fn entries(&self) -> Result<Vec<Descriptor>, RegistryError> {
        let raw = self.read_bounded(&self.index_path(), "image (there is no index.json)")?;
        match manifest::parse(&self.place(), raw, None, None)? {
            Parsed::Index(_, entries) => Ok(entries),
            Parsed::Image(_) => {
                Err(RegistryError::malformed(&self.place(), "index.json", "it is not an index"))
            }
        }
    }

    pub(super) fn tags(&self) -> Result<Vec<String>, RegistryError> {
        match self.entries() {
            Ok(entries) => Ok(entries.iter().filter_map(tag).collect()),
            Err(RegistryError::Missing { .. }) => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    }

    /// Those that the name selects.
    pub(super) fn selected(&self) -> Result<Vec<Descriptor>, RegistryError> {
        let entries = self.entries()?;
        let found: Vec<Descriptor> = match &self.name.image {
            Some(Selector::Tag(wanted)) => entries
                .iter()
                .filter(|entry| tag(entry).as_ref() == Some(wanted))
                .cloned()
                .collect(),
            Some(Selector::Digest(wanted)) => {
                entries.iter().filter(|entry| entry.digest == *wanted).take(1).cloned().collect()
            }
            None => {
                let beside = |entry: &&Descriptor| tag(entry).is_some_and(|t| is_beside_image(&t));
                let images: Vec<_> = entries.iter().filter(|e| !beside(e)).cloned().collect();
                if images.len() != 1 {
                    let tags = images.iter().filter_map(tag).collect();
                    return Err(RegistryError::Ambiguous { place: self.place(), tags });
                }
                images
            }
        };
        if found.is_empty() {
            let tags: Vec<String> = entries.iter().filter_map(tag).collect();
            let known = if tags.is_empty() { "none".to_owned() } else { tags.join(", ") };
            return Err(self.missing(&format!("such image (tags: {known})")));
        }
        Ok(found)
    }

    /// Locks index.json against changes by other processes.
    pub(super) fn lock(&self) -> Result<File, RegistryError> {
        let path = self.name.directory.join(".lazuli.lock");
        let lock = File::options().create(true).append(true).open(&path);
        let lock = lock.at(&path)?;
        flock(&lock, FlockOperation::LockExclusive).at(&path)?;
        Ok(lock)
    }

    /// Replaces the entry of `image`. The caller holds the lock. Entries of others are kept to the
    /// letter.
    pub(super) fn update_index(
        &self,
        image: Option<&Selector>,
        size: usize,
        digest: &Digest,
        media_type: &str,
    ) -> Result<(), RegistryError> {
        let path = self.index_path();
        let mut index = if path.exists() {
            let raw = self.read_bounded(&path, "index.json")?;
            let malformed = |e: serde_json::Error| {
                RegistryError::malformed(&self.place(), "index.json", e.to_string())
            };
            serde_json::from_slice::<Map<String, Value>>(&raw).map_err(malformed)?
        } else {
            let media_type = manifest::INDEX_TYPES[0];
            let empty = json!({"schemaVersion": 2, "mediaType": media_type, "manifests": []});
            empty.as_object().cloned().unwrap_or_default()
        };
        let manifests = index.entry("manifests").or_insert_with(|| json!([]));
        let entries = manifests.as_array_mut().ok_or_else(|| {
            RegistryError::malformed(&self.place(), "index.json", "`manifests` is not a list")
        })?;
        let mut entry = json!({"mediaType": media_type, "digest": digest, "size": size});
        match image {
            Some(Selector::Tag(tag)) => {
                entries.retain(|entry| entry["annotations"][REF_NAME] != tag.as_str());
                entry["annotations"] = json!({ REF_NAME: tag });
            }
            Some(Selector::Digest(_)) if entries.iter().any(|e| e["digest"] == entry["digest"]) => {
                return Ok(());
            }
            Some(Selector::Digest(_)) => {}
            None => entries.retain(|entry| !entry["annotations"][REF_NAME].is_null()),
        }
        entries.push(entry);
        write_whole(&path, Value::Object(index).to_string().as_bytes())
    }
}

pub(super) fn tag(entry: &Descriptor) -> Option<String> {
    entry.annotations.get(REF_NAME).cloned()
}
