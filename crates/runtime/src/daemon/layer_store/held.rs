//! Records of layers that clients have found.

use std::time::{Duration, SystemTime};

use lazuli_image::{Algorithm, Digest};
use serde::{Deserialize, Serialize};

use crate::{
    daemon::{
        api::{DriverChoice, MountRequest},
        record::Record,
    },
    kernel::layer_store::LayerName,
};

/// How long a layer stays without a user: clients use it right after they have found it.
const UNUSED: Duration = Duration::from_secs(600);

/// How old its time may be when a client finds it again.
const RENEWED: Duration = Duration::from_secs(60);

/// A layer, as it was when a client found it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct HeldLayer {
    /// The image's name, as the client has it.
    pub(super) image: String,
    /// The layer as stored.
    pub(super) layer: Digest,
    /// Its table of contents, if the client named it by that and so sees the files of the table.
    #[serde(default)]
    pub(super) toc: Option<Digest>,
    /// The image's manifest.
    pub(super) manifest: Digest,
    /// The image's name with this digest.
    pub(super) pinned: String,
    /// SHA-256 of the layer's tar. Of a layer with `toc` only the image's configuration says so.
    pub(super) diff_id: Digest,
    /// SHA-256 of the index by which it is shown; earlier versions did not note it.
    #[serde(default)]
    pub(super) index: Option<Digest>,
    /// Bytes as stored.
    pub(super) stored_size: u64,
    /// Bytes of the tar, if that is known.
    pub(super) tar_size: Option<u64>,
    /// Whether it is stored with gzip.
    pub(super) is_gzip: bool,
    /// How many containers, images and pulls use it.
    pub(super) users: u64,
    /// When it was found last, as long as nobody uses it.
    pub(super) since: SystemTime,
}

impl Record for HeldLayer {
    fn key(&self) -> String {
        key(&self.name())
    }
}

/// The name of a layer's record and directory.
pub(super) fn key(name: &LayerName) -> String {
    let LayerName { image, layer } = name;
    Algorithm::Blake3.digest(format!("{image}\n{layer}").as_bytes()).hex()
}

/// containers/storage's numbers of compressions (`archive.Compression`); 0 for none is left out.
const GZIP: u64 = 2;
const ZSTD: u64 = 4;

/// Bytes of a tar that are not known, to containers/storage.
const UNKNOWN_SIZE: i64 = -1;

impl HeldLayer {
    pub(super) fn name(&self) -> LayerName {
        LayerName { image: self.image.clone(), layer: self.toc.unwrap_or(self.layer) }
    }

    pub(super) fn is_unused(&self) -> bool {
        self.users == 0 && self.since.elapsed().is_ok_and(|since| since > UNUSED)
    }

    /// Returns whether a client that finds it again has to be noted, so that it stays.
    pub(super) fn is_old(&self) -> bool {
        self.users == 0 && self.since.elapsed().map_or(true, |since| since > RENEWED)
    }

    /// The request that mounts it.
    pub(super) fn request(
        &self,
        mountpoint: std::path::PathBuf,
        driver: DriverChoice,
    ) -> MountRequest {
        MountRequest {
            layer: Some(self.name().layer),
            ..request(&self.image, &self.pinned, mountpoint, driver)
        }
    }

    /// The record of the layer in containers/storage (`storage.Layer`).
    pub(super) fn info(&self) -> Vec<u8> {
        if let Some(toc) = self.toc {
            return self.info_by_toc(toc).to_string().into_bytes();
        }
        let mut info = serde_json::json!({
            "compressed-diff-digest": self.layer,
            "compressed-size": self.stored_size,
            "diff-digest": self.diff_id,
        });
        if let Some(size) = self.tar_size {
            info["diff-size"] = size.into();
        }
        if self.is_gzip {
            info["compression"] = GZIP.into();
        }
        info.to_string().into_bytes()
    }

    /// The record of a layer that is known by its table of contents alone. Other images would get
    /// it by digests that are stated here, and nothing proves those of tar and stored layer. The
    /// claimed DiffID is what a push compares the layer with; containers/storage believes none.
    fn info_by_toc(&self, toc: Digest) -> serde_json::Value {
        serde_json::json!({
            "compressed-size": self.stored_size,
            "toc-digest": toc,
            "diff-size": UNKNOWN_SIZE,
            "compression": if self.is_gzip { GZIP } else { ZSTD },
            "flags": { "expected-layer-diffid": self.diff_id },
        })
    }
}

/// A request about the image that a client calls `image`, which resolved to `pinned`.
pub(super) fn request(
    image: &str,
    pinned: &str,
    mountpoint: std::path::PathBuf,
    driver: DriverChoice,
) -> MountRequest {
    MountRequest {
        asked: Some(image.to_owned()),
        mountpoint,
        driver,
        base: true,
        nosuid: false,
        ..MountRequest::of(pinned.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer() -> HeldLayer {
        HeldLayer {
            image: "r.example/a:1".into(),
            layer: Digest::sha256([1; 32]),
            toc: None,
            manifest: Digest::sha256([2; 32]),
            pinned: String::new(),
            diff_id: Digest::sha256([3; 32]),
            index: Some(Digest::sha256([4; 32])),
            stored_size: 4,
            tar_size: Some(5),
            is_gzip: true,
            users: 0,
            since: SystemTime::now(),
        }
    }

    #[test]
    fn info_has_the_words_of_containers_storage() {
        let info = String::from_utf8(layer().info()).unwrap();
        let [stored, tar] = ["01", "03"].map(|byte| byte.repeat(32));
        let expected = format!(
            r#"{{"compressed-diff-digest":"sha256:{stored}","compressed-size":4,"compression":2,"diff-digest":"sha256:{tar}","diff-size":5}}"#
        );
        assert_eq!(info, expected);
    }

    #[test]
    fn of_a_layer_that_is_named_by_its_table_no_digest_but_the_tables_is_stated() {
        let toc = Digest::sha256([5; 32]);
        for (is_gzip, compression) in [(true, 2), (false, 4)] {
            let layer = HeldLayer { toc: Some(toc), is_gzip, tar_size: None, ..layer() };
            assert_eq!(layer.name().layer, toc);
            let info: serde_json::Value = serde_json::from_slice(&layer.info()).unwrap();
            let expected = serde_json::json!({
                "toc-digest": toc,
                "compressed-size": 4,
                "diff-size": -1,
                "compression": compression,
                "flags": { "expected-layer-diffid": layer.diff_id },
            });
            assert_eq!(info, expected);
        }
    }
}
