//! A list of referrers, kept to the letter.

use std::collections::BTreeMap;

use lazuli_image::{
    Digest,
    oci::{Descriptor, media_type},
};
use serde::Deserialize;
use serde_json::value::{RawValue, to_raw_value};

use crate::manifest::{DOCUMENT_LIMIT, IMAGE_TYPES, INDEX_TYPES};

/// An image index that keeps the fields of other writers unchanged.
#[derive(Debug)]
pub(crate) struct ReferrerIndex {
    /// Everything but `manifests`.
    fields: BTreeMap<String, Box<RawValue>>,
    entries: Vec<Box<RawValue>>,
}

impl ReferrerIndex {
    /// An empty list.
    pub(crate) fn empty() -> Self {
        let values =
            [("schemaVersion", to_raw_value(&2)), ("mediaType", to_raw_value(media_type::INDEX))];
        // Numbers and strings always are JSON.
        let field = |(name, value): (&str, Result<_, _>)| Some((name.to_owned(), value.ok()?));
        ReferrerIndex {
            fields: values.into_iter().filter_map(field).collect(),
            entries: Vec::new(),
        }
    }

    /// Parses an index; the error is the problem. Entries may be of any kind.
    pub(crate) fn parse(raw: &[u8]) -> Result<Self, String> {
        let text = |error: serde_json::Error| error.to_string();
        let mut fields: BTreeMap<String, Box<RawValue>> =
            serde_json::from_slice(raw).map_err(text)?;
        if fields.get("schemaVersion").map(|version| version.get()) != Some("2") {
            return Err("schemaVersion is not 2".to_owned());
        }
        let entries = fields.remove("manifests").ok_or("it has no `manifests`")?;
        let entries = Option::<Vec<Box<RawValue>>>::deserialize(&*entries).map_err(text)?;
        Ok(ReferrerIndex { fields, entries: entries.unwrap_or_default() })
    }

    /// The entries of one type, or of all, that may be manifests.
    pub(crate) fn of_type(&self, artifact_type: Option<&str>) -> Vec<Descriptor> {
        let types = || IMAGE_TYPES.into_iter().chain(INDEX_TYPES);
        let fits = |entry: &Descriptor| {
            artifact_type.is_none_or(|wanted| entry.artifact_type.as_deref() == Some(wanted))
                && entry.size <= DOCUMENT_LIMIT
                && types().any(|known| known == entry.media_type)
        };
        self.descriptors().map(|(_, entry)| entry).filter(fits).collect()
    }

    /// Returns whether `manifest` is in the list.
    pub(crate) fn lists(&self, manifest: &Digest) -> bool {
        self.descriptors().any(|(_, entry)| entry.digest == *manifest)
    }

    /// Adds `entry` unless its manifest is in the list, and removes the one that it `replaces`.
    /// Returns whether the list changed.
    pub(crate) fn update(
        &mut self,
        entry: &Descriptor,
        replaces: Option<&Digest>,
    ) -> Result<bool, serde_json::Error> {
        let replaced =
            |known: &Descriptor| known.digest != entry.digest && Some(&known.digest) == replaces;
        let old: Vec<usize> =
            self.descriptors().filter(|(_, known)| replaced(known)).map(|(at, _)| at).collect();
        for at in old.iter().rev() {
            self.entries.remove(*at);
        }
        let add = !self.lists(&entry.digest);
        if add {
            self.entries.push(to_raw_value(entry)?);
        }
        Ok(add || !old.is_empty())
    }

    /// Removes these manifests from the list. Returns whether it had any of them.
    pub(crate) fn remove(&mut self, manifests: &[Digest]) -> bool {
        let removed = |entry: &Descriptor| manifests.contains(&entry.digest);
        let old: Vec<usize> =
            self.descriptors().filter(|(_, entry)| removed(entry)).map(|(at, _)| at).collect();
        for at in old.iter().rev() {
            self.entries.remove(*at);
        }
        !old.is_empty()
    }

    /// Returns whether nothing is listed, not even an entry of a kind that is unknown here.
    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub(crate) fn to_json(&self) -> Result<Vec<u8>, serde_json::Error> {
        let entries = to_raw_value(&self.entries)?;
        let mut fields: BTreeMap<&str, &RawValue> =
            self.fields.iter().map(|(name, value)| (name.as_str(), &**value)).collect();
        fields.insert("manifests", &entries);
        serde_json::to_vec(&fields)
    }

    /// The entries that are descriptors, and where.
    pub(crate) fn descriptors(&self) -> impl Iterator<Item = (usize, Descriptor)> {
        let parse = |raw: &RawValue| serde_json::from_str(raw.get()).ok();
        let entries = self.entries.iter().enumerate();
        entries.filter_map(move |(at, raw)| Some((at, parse(raw)?)))
    }
}

#[cfg(test)]
mod tests {
    use lazuli_image::Algorithm;

    use super::*;

    fn entry(content: &str) -> Descriptor {
        let digest = Algorithm::Sha256.digest(content.as_bytes());
        let plain = Descriptor::plain(media_type::MANIFEST, digest, 7);
        Descriptor { artifact_type: Some("application/x".to_owned()), ..plain }
    }

    #[test]
    fn entries_of_other_clients_stay_unchanged() {
        let theirs = r#"{"odd" : 1.50e0, "digest":"sha512:00"}"#;
        let note = r#"{ "a" : "b" }"#;
        let raw = format!(r#"{{"schemaVersion":2,"manifests":[{theirs},7],"annotations":{note}}}"#);
        let mut index = ReferrerIndex::parse(raw.as_bytes()).unwrap();
        assert!(index.update(&entry("one"), None).unwrap());
        assert!(!index.update(&entry("one"), Some(&entry("one").digest)).unwrap());
        assert!(index.update(&entry("two"), Some(&entry("one").digest)).unwrap());
        assert!(!index.update(&entry("two"), Some(&entry("one").digest)).unwrap());
        assert!(index.update(&entry("three"), None).unwrap());
        assert!(index.remove(&[entry("three").digest, entry("four").digest]));
        assert!(!index.remove(&[entry("three").digest]) && !index.is_empty());
        let json = String::from_utf8(index.to_json().unwrap()).unwrap();
        assert!(json.contains(theirs) && json.contains(note) && json.contains(",7,"), "{json}");
        let again = ReferrerIndex::parse(json.as_bytes()).unwrap();
        assert_eq!(again.of_type(Some("application/x")), [entry("two")]);
        assert!(again.of_type(Some("application/y")).is_empty());
    }

    #[test]
    fn entries_that_can_be_no_manifest_are_left_out() {
        let mut index = ReferrerIndex::empty();
        let false_entries = [
            Descriptor { size: u64::MAX, ..entry("big") },
            Descriptor { media_type: media_type::LAYER_GZIP.to_owned(), ..entry("layer") },
            Descriptor { artifact_type: None, ..entry("untyped") },
        ];
        for entry in &false_entries {
            index.update(entry, None).unwrap();
        }
        index.update(&entry("good"), None).unwrap();
        let index = ReferrerIndex::parse(&index.to_json().unwrap()).unwrap();
        assert_eq!(index.of_type(Some("application/x")), [entry("good")]);
    }

    #[test]
    fn a_document_that_is_no_index_is_refused() {
        for bad in [
            "",
            "[]",
            r#"{"schemaVersion":1,"manifests":[]}"#,
            r#"{"manifests":[]}"#,
            r#"{"schemaVersion":2}"#,
            r#"{"schemaVersion":2,"manifests":{}}"#,
        ] {
            assert!(ReferrerIndex::parse(bad.as_bytes()).is_err(), "{bad}");
        }
        assert!(ReferrerIndex::parse(br#"{"schemaVersion":2,"manifests":null}"#).is_ok());
    }
}
