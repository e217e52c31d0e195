//! The evidence beside an image, as a client of the registry sees it.

use std::{path::Path, sync::Arc};

use lazuli_image::{
    Digest,
    oci::{Descriptor, Manifest},
};
use lazuli_policy::{
    Bundle, Conversion, Payload, PublicKey, Statement, media_type, sign::SignatureManifest,
    statement::SIGNED,
};
use lazuli_registry::{ImageName, Options, Repository};
use serde::Deserialize;
use tokio::runtime::Runtime;

/// The evidence beside an image that a key verifies.
#[derive(Debug, PartialEq)]
pub(super) struct Evidence {
    /// The digest that the name means.
    pub(super) digest: Digest,
    /// If that is an index, its manifests.
    pub(super) manifests: Vec<Digest>,
    /// Names that payloads under the `.sig` tag are for.
    pub(super) payloads: Vec<String>,
    /// Names that signed statements are for.
    pub(super) signed: Vec<String>,
    /// The signed statements about its conversion.
    pub(super) conversions: Vec<Conversion>,
}

#[derive(Deserialize)]
struct Index {
    manifests: Option<Vec<Descriptor>>,
}

impl Evidence {
    /// Reads the evidence beside `image`, whose name is relative to `directory`, and drops
    /// everything that `key`, in PEM, does not verify.
    pub(super) fn of(directory: &Path, image: &str, key: Option<&[u8]>) -> Self {
        let mut name: ImageName = image.parse().unwrap();
        if let ImageName::Layout(layout) = &mut name {
            layout.directory = directory.join(&layout.directory);
        }
        let key = key.map(|pem| PublicKey::from_pem(pem).unwrap());
        Runtime::new().unwrap().block_on(Self::read(&name, key.as_ref()))
    }

    async fn read(name: &ImageName, key: Option<&PublicKey>) -> Self {
        let open = |name: &ImageName| lazuli_registry::open(name, &Options::default()).unwrap();
        let repository = open(name);
        let document = repository.document(None).await.unwrap();
        let index: Index = serde_json::from_slice(&document.raw).unwrap();
        let manifests = index.manifests.into_iter().flatten().map(|entry| entry.digest).collect();
        let digest = document.digest;
        let (payloads, signed, conversions) = (Vec::new(), Vec::new(), Vec::new());
        let mut found = Evidence { digest, manifests, payloads, signed, conversions };
        let Some(key) = key else { return found };
        let tagged = name.tagged(&media_type::signature_tag(&digest)).unwrap();
        found.payloads = payloads_of(open(&tagged), digest, key).await;
        for entry in repository.referrers(&digest, Some(media_type::BUNDLE)).await.unwrap() {
            let raw = repository.document(Some(&entry.digest)).await.unwrap().raw;
            let manifest = Manifest::parse(&raw).unwrap();
            assert_eq!(manifest.subject.unwrap().digest, digest);
            let layer = &manifest.layers[0];
            // cosign has no such hint.
            if let Some(hint) = manifest.annotations.get(media_type::BUNDLE_BLOB) {
                assert_eq!(media_type::parse_blob_hint(hint), Some((layer.digest, layer.size)));
                assert_eq!(manifest.annotations, entry.annotations);
            }
            let bundle = repository.small_blob(layer).await.unwrap();
            found.add(&bundle.content, key);
        }
        found
    }

    fn add(&mut self, bundle: &[u8], key: &PublicKey) {
        let envelope = Bundle::parse(bundle).unwrap().envelope;
        let bytes = envelope.signed_bytes();
        if !envelope.signatures.iter().any(|signature| key.verifies(&bytes, signature)) {
            return;
        }
        let statement = Statement::parse(&envelope.payload).unwrap();
        assert_eq!(statement.subjects[0].digest, self.digest);
        self.conversions.extend(statement.conversion().unwrap());
        if statement.predicate_type == SIGNED {
            self.signed.push(statement.subjects[0].name.clone().unwrap_or_default());
        }
    }
}

async fn payloads_of(place: Arc<dyn Repository>, digest: Digest, key: &PublicKey) -> Vec<String> {
    let document = match place.document(None).await {
        Err(error) if error.is_missing() => return Vec::new(),
        document => document.unwrap(),
    };
    let signatures = SignatureManifest::parse(&document.raw).unwrap();
    let manifest = Manifest::parse(&document.raw).unwrap();
    let mut names = Vec::new();
    for layer in &manifest.layers {
        let content = place.small_blob(layer).await.unwrap().content;
        let payload = Payload::parse(&content).unwrap();
        assert_eq!(payload.digest, digest);
        if signatures.has(&content, key) && !names.contains(&payload.reference) {
            names.push(payload.reference);
        }
    }
    names
}
