//! One repository that is searched for evidence.

use std::sync::Arc;

use bytes::Bytes;
use lazuli_image::{
    Digest,
    oci::{Descriptor, Manifest},
};
use lazuli_registry::{ImageName, Options, RegistryError, Repository, manifest::INDEX_TYPES, open};

use crate::{
    bundle::BUNDLE_LIMIT,
    evidence::{Evidence, SIGNATURES, SignatureLayer},
    media_type,
    name::Asked,
};

/// The goal of a search: its image has the repository.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Task {
    /// The index that the name means, if it means one.
    Index,
    /// Signatures under the tag of this digest.
    Tag(Digest),
    /// Bundles that refer to this digest.
    Referrers(Digest),
    /// A bundle's manifest.
    Manifest(Digest),
    /// A bundle.
    Bundle(Digest, u64),
}

/// The result of a task.
#[derive(Default)]
pub(super) struct TaskResult {
    pub(super) evidence: Evidence,
    pub(super) index: Option<Descriptor>,
    pub(super) next: Vec<Task>,
    pub(super) layers: Vec<SignatureLayer>,
}

/// A repository, and how images in it are named in payloads.
#[derive(Clone)]
pub(super) struct SearchedRepository {
    pub(super) name: ImageName,
    pub(super) repository: Arc<dyn Repository>,
    references: Vec<String>,
}

/// Fetches size and type of an image at `place`, if only its digest is known yet.
pub(super) async fn described(place: Option<SearchedRepository>, image: Descriptor) -> Descriptor {
    let (0, Some(place)) = (image.size, place) else { return image };
    match place.repository.document(Some(&image.digest)).await {
        Ok(found) => Descriptor::plain(&found.media_type, found.digest, found.raw.len() as u64),
        Err(_) => image,
    }
}

impl SearchedRepository {
    pub(super) fn open(name: &ImageName, options: &Options) -> Result<Self, RegistryError> {
        let repository = open(name, options)?;
        let asked = Asked::of(name);
        let mut references = vec![asked.repository.clone(), asked.to_string()];
        if let Some(path) = asked.repository.strip_prefix("docker.io/") {
            references.push(format!("index.docker.io/{path}"));
        }
        Ok(SearchedRepository { name: name.clone(), repository, references })
    }

    pub(super) async fn perform(
        &self,
        task: Task,
        manifest: Digest,
        options: &Options,
    ) -> Result<TaskResult, RegistryError> {
        let done = match task {
            Task::Index => self.index(manifest).await,
            Task::Tag(digest) => self.signatures(digest, options).await,
            Task::Referrers(digest) => self.referrers(digest).await,
            Task::Manifest(digest) => self.bundle_layer(digest).await,
            Task::Bundle(digest, size) => self.bundle(digest, size).await,
        };
        match done {
            Err(error) if error.is_missing() => Ok(TaskResult::default()),
            other => other,
        }
    }

    /// The index that the name means, if it lists the image.
    async fn index(&self, manifest: Digest) -> Result<TaskResult, RegistryError> {
        #[derive(serde::Deserialize)]
        struct Index {
            manifests: Vec<Descriptor>,
        }
        let document = self.repository.document(None).await?;
        let lists = INDEX_TYPES.contains(&document.media_type.as_str())
            && serde_json::from_slice::<Index>(&document.raw)
                .is_ok_and(|index| index.manifests.iter().any(|it| it.digest == manifest));
        let size = document.raw.len() as u64;
        let index = Descriptor::plain(&document.media_type, document.digest, size);
        Ok(TaskResult { index: lists.then_some(index), ..TaskResult::default() })
    }

    async fn signatures(
        &self,
        digest: Digest,
        options: &Options,
    ) -> Result<TaskResult, RegistryError> {
        let Some(name) = self.name.tagged(&media_type::signature_tag(&digest)) else {
            return Ok(TaskResult::default());
        };
        let document = open(&name, options)?.document(None).await?;
        let mut found = TaskResult::default();
        for layer in SignatureLayer::all(&document.raw) {
            match layer.guess(&self.references, digest) {
                Some(payload) => found.evidence.signatures.push(layer.with(payload)),
                None => found.layers.push(layer),
            }
        }
        Ok(found)
    }

    async fn referrers(&self, digest: Digest) -> Result<TaskResult, RegistryError> {
        let listed = self.repository.referrers(&digest, Some(media_type::BUNDLE)).await?;
        let task = |entry: Descriptor| {
            let hint = entry.annotations.get(media_type::BUNDLE_BLOB);
            match hint.and_then(|hint| media_type::parse_blob_hint(hint)) {
                Some((digest, size)) => Task::Bundle(digest, size),
                None => Task::Manifest(entry.digest),
            }
        };
        let next = listed.into_iter().take(SIGNATURES).map(task).collect();
        Ok(TaskResult { next, ..TaskResult::default() })
    }

    async fn bundle_layer(&self, digest: Digest) -> Result<TaskResult, RegistryError> {
        let document = self.repository.document(Some(&digest)).await?;
        let layers = Manifest::parse(&document.raw).map(|manifest| manifest.layers);
        let bundles = layers.unwrap_or_default().into_iter();
        let bundles = bundles.filter(|layer| layer.media_type == media_type::BUNDLE);
        let next = bundles.take(1).map(|layer| Task::Bundle(layer.digest, layer.size));
        Ok(TaskResult { next: next.collect(), ..TaskResult::default() })
    }

    async fn bundle(&self, digest: Digest, size: u64) -> Result<TaskResult, RegistryError> {
        if size > BUNDLE_LIMIT as u64 {
            return Ok(TaskResult::default());
        }
        let blob = Descriptor::plain(media_type::BUNDLE, digest, size);
        let bundle: Bytes = self.repository.small_blob(&blob).await?.content;
        let evidence = Evidence { bundles: vec![bundle], ..Evidence::default() };
        Ok(TaskResult { evidence, ..TaskResult::default() })
    }
}
