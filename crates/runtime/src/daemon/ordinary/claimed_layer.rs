//! Layers as their images describe them, before any of that is proven.

use lazuli_builder::index::KnownLayer;
use lazuli_image::{
    Algorithm, Digest,
    oci::{ArtifactLayer, Descriptor, ImageConfig, Manifest},
};

/// A layer, as the manifest and the configuration of its image describe it.
#[derive(Clone, Debug)]
pub(super) struct ClaimedLayer {
    pub(super) descriptor: Descriptor,
    /// SHA-256 of its tar; `None` in an artifact, whose configuration says nothing of it.
    pub(super) diff_id: Option<Digest>,
    /// The path of the file that it is, in an artifact; `None` for a tar.
    pub(super) file: Option<String>,
}

impl ClaimedLayer {
    /// The layers of an image or artifact; none if its configuration lists others than its
    /// manifest, which is containerd's to complain about.
    pub(super) fn all_of(manifest: &Manifest, config: &[u8]) -> Vec<Self> {
        let mut layers = Self::by_manifest(manifest);
        if manifest.is_artifact() {
            return layers;
        }
        let diff_ids = ImageConfig::parse(config).and_then(|config| config.diff_ids());
        let diff_ids = diff_ids.unwrap_or_default();
        if diff_ids.len() != layers.len() {
            return Vec::new();
        }
        for (layer, diff_id) in layers.iter_mut().zip(diff_ids) {
            layer.diff_id = Some(diff_id);
        }
        layers
    }

    /// The layers without what the configuration says of them.
    pub(super) fn by_manifest(manifest: &Manifest) -> Vec<Self> {
        let is_artifact = manifest.is_artifact();
        let layer = |descriptor: &Descriptor| {
            let content = is_artifact.then(|| descriptor.artifact_layer());
            let file = match content {
                Some(ArtifactLayer::File(path)) => Some(path),
                Some(ArtifactLayer::Tar) | None => None,
            };
            ClaimedLayer { descriptor: descriptor.clone(), diff_id: None, file }
        };
        manifest.layers.iter().map(layer).collect()
    }

    /// The layer with its index, when its tar has this digest.
    pub(super) fn with_index(&self, diff_id: Digest, index: Vec<u8>) -> KnownLayer {
        let Descriptor { digest, size: stored_size, .. } = self.descriptor;
        KnownLayer { digest, stored_size, diff_id, file: self.file.clone(), index }
    }

    /// SHA-256 of it as stored.
    pub(super) fn digest(&self) -> Digest {
        self.descriptor.digest
    }

    /// The key of what this node knows of it. As a file it has another index than as a tar.
    pub(super) fn key(&self) -> Digest {
        match self.file {
            Some(_) => Algorithm::Sha256.digest(format!("file {}", self.digest()).as_bytes()),
            None => self.digest(),
        }
    }

    /// Returns whether it may be readable in places; the first bytes of a tar decide.
    pub(super) fn is_readable(&self) -> bool {
        self.file.is_some() || is_readable_tar(&self.descriptor)
    }
}

/// Returns whether a tar may be readable in places; its first bytes decide.
pub(super) fn is_readable_tar(layer: &Descriptor) -> bool {
    let kind = layer.media_type.as_str();
    kind.contains("tar") && !kind.ends_with("zstd") && !kind.contains("+encrypted")
}

#[cfg(test)]
mod tests {
    use lazuli_image::oci::media_type;

    use super::*;

    fn manifest(config: &str, layers: [&str; 2]) -> Manifest {
        let document = |kind| {
            serde_json::json!({
                "mediaType": kind, "size": 2, "digest": Algorithm::Sha256.digest(b"{}").to_string(),
            })
        };
        let manifest = serde_json::json!({
            "schemaVersion": 2,
            "mediaType": media_type::MANIFEST,
            "config": document(config),
            "layers": layers.map(document),
        });
        Manifest::parse(manifest.to_string().as_bytes()).unwrap()
    }

    #[test]
    fn a_layer_is_known_as_a_file_or_as_a_tar() {
        let model = "application/vnd.cncf.model.config.v1+json";
        let layers = [media_type::LAYER_GZIP, "application/vnd.cncf.model.weight.v1.raw"];
        let [tar, file] = &ClaimedLayer::all_of(&manifest(model, layers), b"{}")[..] else {
            panic!("there are two")
        };
        assert_eq!((&tar.file, tar.key()), (&None, tar.digest()));
        assert!(file.file.is_some() && file.digest() == tar.digest() && file.key() != tar.key());
        assert!(file.is_readable() && tar.is_readable());
        assert!(!is_readable_tar(&file.descriptor));
    }

    #[test]
    fn an_image_has_the_layers_that_its_configuration_lists() {
        let image = manifest(media_type::CONFIG, [media_type::LAYER_GZIP; 2]);
        let diff_id = Algorithm::Sha256.digest(b"tar");
        let config = |ids: &[Digest]| {
            serde_json::json!({ "rootfs": { "type": "layers", "diff_ids": ids } }).to_string()
        };
        let layers = ClaimedLayer::all_of(&image, config(&[diff_id; 2]).as_bytes());
        assert!(layers.len() == 2 && layers.iter().all(|layer| layer.diff_id == Some(diff_id)));
        for other in [&config(&[diff_id]), "{}", ""] {
            assert!(ClaimedLayer::all_of(&image, other.as_bytes()).is_empty(), "{other}");
        }
    }
}
