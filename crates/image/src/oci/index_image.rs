//! The manifest of an index: a referrer that makes an ordinary image readable in places.
//!
//! ```text
//! manifest ─ subject                the ordinary image
//!          ├ config                 the ordinary image's own
//!          ├ layers[0..n]           indexes of its layers, each with the digest of that layer
//!          ├ layers[n..m]           data blobs with what these cannot lead to
//!          └ layers[m]              bootstrap
//! ```

use std::collections::BTreeMap;

use super::{
    BlobLayer, Descriptor, Manifest, NotedGuess, OciError, annotation, data_layer, media_type,
};
use crate::{Algorithm, Digest, rafs::WrittenIndex};

/// The index of one layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IndexedLayer {
    /// The layer.
    pub layer: Digest,
    /// SHA-256 of its index as stored.
    pub digest: Digest,
    /// Bytes of its index.
    pub size: u64,
    /// SHA-256 of the stored chunk tables in the index.
    pub tables: Digest,
}

impl IndexedLayer {
    /// The index of a layer; `None` of one that is no layer's.
    pub fn of(index: &WrittenIndex) -> Option<Self> {
        let written = index.record.tail.index?;
        let (layer, tables) = (index.record.blob.id, index.tables);
        let (digest, size) = (written.digest, written.size);
        Some(IndexedLayer { layer, digest, size, tables })
    }
}

/// The documents of an index. The same input gives the same bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IndexImage {
    /// The manifest.
    pub manifest: Vec<u8>,
    /// Its descriptor in a list of referrers.
    pub descriptor: Descriptor,
}

impl IndexImage {
    /// Describes the index of `subject`, an image with the configuration `config`. `guess` is what
    /// its start most likely reads.
    ///
    /// # Errors
    /// The manifest cannot be written as JSON.
    pub fn new(
        subject: Descriptor,
        config: &Descriptor,
        indexes: &[IndexedLayer],
        beside: &[BlobLayer],
        bootstrap: BlobLayer,
        guess: Option<&NotedGuess>,
    ) -> Result<Self, OciError> {
        let mut annotations = BTreeMap::new();
        if let Some(guess) = guess {
            guess.note(&mut annotations);
        }
        let mut layers: Vec<_> = indexes.iter().map(index_layer).collect();
        layers.extend(beside.iter().map(data_layer));
        layers.push(super::bootstrap_layer(&bootstrap));
        let manifest = Manifest {
            schema_version: 2,
            media_type: Some(media_type::MANIFEST.to_owned()),
            artifact_type: Some(media_type::LAYER_INDEX.to_owned()),
            config: Descriptor::plain(&config.media_type, config.digest, config.size),
            layers,
            subject: Some(subject),
            annotations,
        };
        let document = "manifest";
        let manifest =
            serde_json::to_vec(&manifest).map_err(|source| OciError::Json { document, source })?;
        let digest = Algorithm::Sha256.digest(&manifest);
        let plain = Descriptor::plain(media_type::MANIFEST, digest, manifest.len() as u64);
        let artifact_type = Some(media_type::LAYER_INDEX.to_owned());
        Ok(IndexImage { manifest, descriptor: Descriptor { artifact_type, ..plain } })
    }
}

/// The configuration of manifests without one.
pub const EMPTY_CONFIG: &[u8] = b"{}";

/// The tag under which a repository of indexes has that of `layer`.
pub fn layer_index_tag(layer: &Digest) -> String {
    format!("{}-{}.index", layer.algorithm.name(), layer.hex())
}

/// The manifest for the index of a single layer, whatever image has it. The same input gives the
/// same bytes.
///
/// # Errors
/// It cannot be written as JSON.
pub fn layer_index_manifest(index: &IndexedLayer) -> Result<Vec<u8>, OciError> {
    let config = Algorithm::Sha256.digest(EMPTY_CONFIG);
    let manifest = Manifest {
        schema_version: 2,
        media_type: Some(media_type::MANIFEST.to_owned()),
        artifact_type: Some(media_type::LAYER_INDEX.to_owned()),
        config: Descriptor::plain(media_type::EMPTY, config, EMPTY_CONFIG.len() as u64),
        layers: vec![index_layer(index)],
        subject: None,
        annotations: Default::default(),
    };
    let document = "manifest";
    serde_json::to_vec(&manifest).map_err(|source| OciError::Json { document, source })
}

/// The descriptor of a layer's index.
pub(super) fn index_layer(index: &IndexedLayer) -> Descriptor {
    let (layer, tables) = (index.layer.to_string(), index.tables.to_string());
    let notes = [
        (annotation::DATA_BLOB, "true"),
        (annotation::INDEX_OF, layer.as_str()),
        (annotation::INDEX_TABLES, tables.as_str()),
    ];
    Descriptor::new(media_type::DATA_BLOB, index.digest, index.size, &notes)
}

impl Manifest {
    /// The index of `layer`, if this is a manifest for it and nothing else.
    pub fn layer_index(&self, layer: &Digest) -> Option<&Descriptor> {
        let [index] = &self.layers[..] else { return None };
        let is_it = self.artifact_type.as_deref() == Some(media_type::LAYER_INDEX)
            && self.subject.is_none()
            && index.index_of() == Some(*layer);
        is_it.then_some(index)
    }

    /// Returns whether this is an index of `image`: it has the same configuration and no layers but
    /// those of `image`.
    pub fn is_index_of(&self, digest: &Digest, image: &Manifest) -> bool {
        let is_its_layer = |layer: Digest| image.layers.iter().any(|own| own.digest == layer);
        let mut indexed = self.layers.iter().filter_map(Descriptor::index_of);
        self.artifact_type.as_deref() == Some(media_type::LAYER_INDEX)
            && self.subject.as_ref().map(|subject| subject.digest) == Some(*digest)
            && self.config.digest == image.config.digest
            && self.bootstrap().is_some()
            && indexed.all(is_its_layer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Trace;

    fn digest(text: &str) -> Digest {
        Algorithm::Sha256.digest(text.as_bytes())
    }

    fn ordinary() -> Manifest {
        Manifest {
            schema_version: 2,
            media_type: Some(media_type::MANIFEST.to_owned()),
            artifact_type: None,
            config: Descriptor::plain(media_type::CONFIG, digest("config"), 6),
            layers: vec![Descriptor::plain(media_type::LAYER_GZIP, digest("layer"), 5)],
            subject: None,
            annotations: Default::default(),
        }
    }

    fn index(layer: &str) -> Manifest {
        let image = ordinary();
        let subject = Descriptor::plain(media_type::MANIFEST, digest("image"), 9);
        let (layer, index, tables) = (digest(layer), digest("index"), digest("tables"));
        let indexed = IndexedLayer { layer, digest: index, size: 7, tables };
        let blob = |text| BlobLayer::new(digest(text), 1);
        let (beside, boot) = ([blob("beside")], blob("bootstrap"));
        let guess = NotedGuess::of(&Trace::of_start(vec![layer], [(0, 3, 0)]));
        let written =
            IndexImage::new(subject, &image.config, &[indexed], &beside, boot, guess.as_ref());
        let written = written.unwrap();
        assert_eq!(written.descriptor.digest, Algorithm::Sha256.digest(&written.manifest));
        Manifest::parse(&written.manifest).unwrap()
    }

    #[test]
    fn an_index_belongs_to_its_image() {
        let (image, index) = (ordinary(), index("layer"));
        assert!(index.is_index_of(&digest("image"), &image));
        assert_eq!(index.layers[0].index_tables(), Some(digest("tables")));
        let guess = index.guess().unwrap().decode().unwrap();
        assert_eq!(guess.hot().collect::<Vec<_>>(), [(digest("layer"), 3)]);
        assert_eq!(index.lazy_base().unwrap().0.len(), 2);
    }

    #[test]
    fn a_layers_own_index_is_of_that_layer() {
        let [layer, index, tables] = ["layer", "index", "tables"].map(digest);
        let indexed = IndexedLayer { layer, digest: index, size: 7, tables };
        let written = layer_index_manifest(&indexed).unwrap();
        let manifest = Manifest::parse(&written).unwrap();
        assert_eq!(manifest.layer_index(&layer).unwrap().digest, index);
        assert!(manifest.layer_index(&digest("another layer")).is_none());
        let mut of_image = manifest.clone();
        of_image.subject = Some(Descriptor::plain(media_type::MANIFEST, digest("image"), 9));
        assert!(of_image.layer_index(&layer).is_none());
        assert!(!manifest.is_index_of(&digest("image"), &ordinary()));
        let tag = layer_index_tag(&layer);
        assert!(tag.len() <= 128 && tag.ends_with(".index"), "{tag}");
    }

    #[test]
    fn index_of_another_image_is_refused() {
        let image = ordinary();
        assert!(!index("layer").is_index_of(&digest("another image"), &image));
        assert!(!index("another layer").is_index_of(&digest("image"), &image));
        let changes: [fn(&mut Manifest); 3] = [
            |index| index.config.digest = digest("another config"),
            |index| index.artifact_type = None,
            |index| drop(index.layers.pop()),
        ];
        for change in changes {
            let mut index = index("layer");
            change(&mut index);
            assert!(!index.is_index_of(&digest("image"), &image), "{index:?}");
        }
    }
}
