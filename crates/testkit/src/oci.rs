//! Image layouts on disk, written without the code under test.

use std::{
    fs,
    io::{self, Write as _},
    path::Path,
};

use lazuli_image::{Algorithm, Digest};
use serde_json::{Value, json};

/// How a layer is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// Uncompressed.
    None,
    /// The form of most layers in registries.
    Gzip,
    /// The form of newer builders.
    Zstd,
}

/// A layer of an image.
#[derive(Clone, Debug)]
pub struct Layer {
    /// The tar file, not compressed.
    pub tar: Vec<u8>,
    /// How a layout stores it.
    pub compression: Compression,
    ready: Option<Ready>,
}

/// A layer as a layout stores it.
#[derive(Clone, Debug)]
struct Ready {
    stored: Vec<u8>,
    media_type: &'static str,
    annotations: Vec<(&'static str, String)>,
}

impl Layer {
    /// A layer of this tar file.
    pub fn new(tar: Vec<u8>, compression: Compression) -> Self {
        Layer { tar, compression, ready: None }
    }

    /// A layer of this tar file that is stored as `stored`.
    pub fn stored_as(
        tar: Vec<u8>,
        stored: Vec<u8>,
        media_type: &'static str,
        annotations: Vec<(&'static str, String)>,
    ) -> Self {
        let ready = Some(Ready { stored, media_type, annotations });
        Layer { tar, compression: Compression::None, ready }
    }

    /// The media type of the stored bytes in a manifest.
    pub fn media_type(&self) -> &'static str {
        if let Some(ready) = &self.ready {
            return ready.media_type;
        }
        match self.compression {
            Compression::None => "application/vnd.oci.image.layer.v1.tar",
            Compression::Gzip => "application/vnd.oci.image.layer.v1.tar+gzip",
            Compression::Zstd => "application/vnd.oci.image.layer.v1.tar+zstd",
        }
    }

    /// The bytes as stored.
    pub fn stored(&self) -> io::Result<Vec<u8>> {
        if let Some(ready) = &self.ready {
            return Ok(ready.stored.clone());
        }
        match self.compression {
            Compression::None => Ok(self.tar.clone()),
            Compression::Gzip => {
                let mut encoder =
                    flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
                encoder.write_all(&self.tar)?;
                encoder.finish()
            }
            Compression::Zstd => zstd::encode_all(&self.tar[..], 1),
        }
    }

    /// The annotations that a manifest has of it.
    pub fn annotations(&self) -> &[(&'static str, String)] {
        self.ready.as_ref().map(|ready| &ready.annotations[..]).unwrap_or_default()
    }

    /// The digest of the tar file: the layer's `diff_id`.
    pub fn diff_id(&self) -> Digest {
        Algorithm::Sha256.digest(&self.tar)
    }
}

/// An image: its layers, lowest first, and its config.
#[derive(Clone, Debug)]
pub struct Image {
    /// Lowest first.
    pub layers: Vec<Layer>,
    /// Everything of the image config but `rootfs`, which follows from the layers.
    pub config: Value,
}

impl Image {
    /// An image for Linux on amd64 that runs `/bin/sh`.
    pub fn new(layers: impl IntoIterator<Item = Layer>) -> Self {
        let config = json!({
            "architecture": "amd64",
            "os": "linux",
            "config": {
                "Entrypoint": ["/bin/sh"],
                "Cmd": ["-c", "true"],
                "Env": ["PATH=/usr/bin:/bin", "ODD=a value with = and spaces"],
                "WorkingDir": "/",
            },
        });
        Image { layers: layers.into_iter().collect(), config }
    }

    /// The image with every layer stored with `compression`, for readers that support only some.
    pub fn compressed_with(mut self, compression: Compression) -> Self {
        for layer in &mut self.layers {
            layer.compression = compression;
        }
        self
    }

    /// Writes an OCI image layout with this image as `tag` into `dir`, which is created when
    /// missing. Other images there are forgotten. Returns the digest of the manifest.
    pub fn write_layout(&self, dir: &Path, tag: &str) -> io::Result<Digest> {
        let mut layers = Vec::new();
        for layer in &self.layers {
            let (_, mut descriptor) = put(dir, layer.media_type(), &layer.stored()?)?;
            for (key, value) in layer.annotations() {
                descriptor["annotations"][key] = value.clone().into();
            }
            layers.push(descriptor);
        }
        let mut config = self.config.clone();
        let diff_ids: Vec<_> =
            self.layers.iter().map(|layer| layer.diff_id().to_string()).collect();
        config["rootfs"] = json!({ "type": "layers", "diff_ids": diff_ids });
        let (_, config) =
            put(dir, "application/vnd.oci.image.config.v1+json", config.to_string().as_bytes())?;
        let media_type = "application/vnd.oci.image.manifest.v1+json";
        let manifest = json!({ "schemaVersion": 2, "mediaType": media_type, "config": config, "layers": layers });
        let (digest, mut descriptor) = put(dir, media_type, manifest.to_string().as_bytes())?;
        descriptor["annotations"] = json!({ "org.opencontainers.image.ref.name": tag });
        let index = json!({ "schemaVersion": 2, "manifests": [descriptor] });
        fs::write(dir.join("index.json"), index.to_string())?;
        fs::write(dir.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#)?;
        Ok(digest)
    }
}

/// Stores a blob and describes it.
fn put(dir: &Path, media_type: &str, content: &[u8]) -> io::Result<(Digest, Value)> {
    let digest = Algorithm::Sha256.digest(content);
    let blobs = dir.join("blobs/sha256");
    fs::create_dir_all(&blobs)?;
    fs::write(blobs.join(digest.hex()), content)?;
    let descriptor =
        json!({ "mediaType": media_type, "digest": digest.to_string(), "size": content.len() });
    Ok((digest, descriptor))
}
