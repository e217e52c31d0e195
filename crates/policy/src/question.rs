//! Questions to the gate: may this manifest or index run under that name?

use lazuli_image::{
    Digest,
    oci::{Descriptor, annotation, media_type},
};
use lazuli_registry::{ImageName, Manifest, Options, Selector, manifest::INDEX_TYPES};

/// An image that is about to be served.
#[derive(Clone, Debug)]
pub struct Question {
    pub(crate) name: ImageName,
    pub(crate) manifest: Descriptor,
    pub(crate) index: Option<Descriptor>,
    pub(crate) replaces: Option<Digest>,
    pub(crate) source: Option<Digest>,
    /// Whether a client resolved the name, perhaps through an index that is not known here.
    pub(crate) by_client: bool,
    pub(crate) options: Options,
}

impl Question {
    /// Asks whether this manifest may run under `name`.
    pub fn of(name: &ImageName, manifest: &Manifest, options: &Options) -> Self {
        let source = manifest.parsed.annotations.get(annotation::SOURCE_DIGEST);
        let subject = manifest.parsed.subject.as_ref().filter(|_| !name.is_pinned());
        Question {
            name: name.clone(),
            manifest: manifest.descriptor(),
            index: manifest.index.clone(),
            replaces: subject.map(|subject| subject.digest),
            source: source.and_then(|digest| digest.parse().ok()),
            by_client: false,
            options: options.clone(),
        }
    }

    /// Asks whether the manifest or index may run to which a client resolved `name`, by a tag or by
    /// the digest of an index.
    pub fn resolved(name: &ImageName, manifest: Descriptor, options: &Options) -> Self {
        let (name, options) = (name.clone(), options.clone());
        let (index, replaces, source) = (None, None, None);
        Question { name, manifest, index, replaces, source, by_client: true, options }
    }

    /// The same question, where a client resolved the name.
    pub fn by_client(self) -> Self {
        Question { by_client: true, ..self }
    }

    /// Returns whether the name may stand for an unknown index that lists the manifest.
    pub(crate) fn may_have_index(&self) -> bool {
        self.by_client
            && self.index.is_none()
            && self.name.selector() != Some(Selector::Digest(self.manifest.digest))
            && !INDEX_TYPES.contains(&self.manifest.media_type.as_str())
    }
}

/// The descriptor of a manifest that is known by its digest alone.
pub fn manifest_descriptor(digest: Digest) -> Descriptor {
    Descriptor::plain(media_type::MANIFEST, digest, 0)
}
