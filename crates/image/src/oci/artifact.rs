//! Artifacts: manifests whose layers are files, such as those of models.
//!
//! ```text
//! manifest ─ artifactType, or a config that is no image's
//!          └ layers[n]    a file as it is, or a tar; named by an annotation
//! ```
//! The rules cover ModelPack, KitOps, ORAS, Ollama and Docker Model Runner, and tools that name
//! layers as one of these does.

use super::{Descriptor, Manifest, annotation, media_type};

/// What a layer of an artifact holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ArtifactLayer {
    /// A tar, perhaps compressed, of files in the artifact's directory.
    Tar,
    /// One file, byte for byte. The path is as the artifact has it, and unchecked.
    File(String),
}

impl Manifest {
    /// Returns whether this is an artifact, of which no container can be made: the manifest or its
    /// configuration says so, or no layer is a tar.
    pub fn is_artifact(&self) -> bool {
        if self.lazy_base().is_some() {
            return false;
        }
        let configs = [
            media_type::CONFIG,
            media_type::DOCKER_CONFIG,
            media_type::LAZY_CONFIG,
            media_type::UNTYPED,
            "",
        ];
        self.artifact_type.is_some()
            || !configs.contains(&self.config.media_type.as_str())
            || !self.layers.is_empty() && !self.layers.iter().any(Descriptor::is_tar)
    }
}

impl Descriptor {
    /// What this layer of an artifact holds, by its annotations and its media type.
    pub fn artifact_layer(&self) -> ArtifactLayer {
        let note = |name: &str| self.annotations.get(name);
        let path = annotation::MODEL_PATHS.into_iter().find_map(note);
        if let Some(path) = path.filter(|_| !self.is_tar()) {
            return ArtifactLayer::File(path.clone());
        }
        // ORAS gives files the media type of a tar by default, and marks tars of directories.
        let title = note(annotation::TITLE).filter(|_| path.is_none());
        let is_marked = note(annotation::UNPACK).is_some_and(|value| value == "true");
        match title {
            Some(title) if !is_marked => ArtifactLayer::File(title.clone()),
            Some(_) => ArtifactLayer::Tar,
            None if self.is_tar() => ArtifactLayer::Tar,
            // As Ollama names files of layers.
            None => {
                let (algorithm, hex) = (self.digest.algorithm.name(), self.digest.hex());
                ArtifactLayer::File(format!("{algorithm}-{hex}"))
            }
        }
    }

    /// Returns whether the media type is that of a tar, perhaps compressed.
    fn is_tar(&self) -> bool {
        let kind = self.media_type.split('+').next().unwrap_or_default();
        [".tar", ".tar.gzip", ".tar.zstd"].into_iter().any(|tar| kind.ends_with(tar))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Algorithm;

    const RAW: &str = "application/vnd.cncf.model.weight.v1.raw";
    const TAR: &str = "application/vnd.cncf.model.weight.v1.tar+gzip";
    const DEFAULT: &str = "application/vnd.oci.image.layer.v1.tar";

    fn layer(media_type: &str, notes: &[(&str, &str)]) -> Descriptor {
        Descriptor::new(media_type, Algorithm::Sha256.digest(b"layer"), 5, notes)
    }

    fn manifest(config: &str, layers: Vec<Descriptor>) -> Manifest {
        Manifest {
            schema_version: 2,
            media_type: Some(media_type::MANIFEST.to_owned()),
            artifact_type: None,
            config: Descriptor::plain(config, Algorithm::Sha256.digest(b"{}"), 2),
            layers,
            subject: None,
            annotations: Default::default(),
        }
    }

    #[test]
    fn layers_of_each_tool_are_files_or_tars() {
        let file = |path: &str| ArtifactLayer::File(path.to_owned());
        let [modelpack, older] = annotation::MODEL_PATHS;
        let (title, unpack) = (annotation::TITLE, annotation::UNPACK);
        let unnamed = format!("sha256-{}", Algorithm::Sha256.digest(b"layer").hex());
        for (media_type, notes, expected) in [
            (RAW, &[(modelpack, "a/model.safetensors")][..], file("a/model.safetensors")),
            (RAW, &[(older, "model.gguf"), (title, "other")], file("model.gguf")),
            (TAR, &[(modelpack, "tokenizer")], ArtifactLayer::Tar),
            (TAR, &[(modelpack, "tokenizer"), (title, "tokenizer")], ArtifactLayer::Tar),
            (DEFAULT, &[(title, "notes.txt")], file("notes.txt")),
            (TAR, &[(title, "directory"), (unpack, "true")], ArtifactLayer::Tar),
            ("application/vnd.kitops.modelkit.model.v1.tar", &[], ArtifactLayer::Tar),
            (media_type::DOCKER_LAYER_GZIP, &[], ArtifactLayer::Tar),
            ("application/vnd.ollama.image.model", &[], file(&unnamed)),
        ] {
            let found = layer(media_type, notes).artifact_layer();
            assert_eq!(found, expected, "{media_type} {notes:?}");
        }
    }

    #[test]
    fn images_are_not_artifacts() {
        let image = |config| manifest(config, vec![layer(media_type::LAYER_GZIP, &[])]);
        assert!(!image(media_type::CONFIG).is_artifact());
        assert!(!image(media_type::DOCKER_CONFIG).is_artifact());
        assert!(!image(media_type::UNTYPED).is_artifact(), "old registries call it so");
        assert!(!manifest(media_type::CONFIG, Vec::new()).is_artifact());
        assert!(image(media_type::EMPTY).is_artifact());
        let typed = Some("application/vnd.cncf.model.manifest.v1+json".to_owned());
        assert!(Manifest { artifact_type: typed, ..image(media_type::CONFIG) }.is_artifact());
        let ollama = layer("application/vnd.ollama.image.model", &[]);
        assert!(manifest(media_type::DOCKER_CONFIG, vec![ollama]).is_artifact());
        let bootstrap = [(annotation::BOOTSTRAP, "true"), (annotation::FS_VERSION, "6")];
        let lazy = layer(media_type::LAYER_ZSTD, &bootstrap);
        assert!(!manifest(media_type::LAZY_CONFIG, vec![lazy]).is_artifact());
    }
}
