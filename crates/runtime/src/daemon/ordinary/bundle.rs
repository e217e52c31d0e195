//! Indexes of layers in a bundle: a build machine reads the layers whole, so that nodes need not.
//!
//! A node trusts them as those that it has made itself: whoever can write to its state directory
//! can write both.

use std::{io::Read, path::Path};

use lazuli_image::{Algorithm, Decoded, Digest, oci::Descriptor};
use lazuli_sys::path_error::At as _;

use super::{
    claimed_layer::{ClaimedLayer, is_readable_tar},
    store::{IndexStore, LayerRecord},
    whole_layer::{self, LayerError},
};
use crate::daemon::DaemonError;

/// The directory of a bundle in a state directory.
pub const BUNDLE_DIRECTORY: &str = "bundle";

/// Reads a layer of the bundle in `directory` from `source`, and adds its index. Its tar must have
/// the digest `diff_id`. The result is the reason why no index can lead to its content, if none
/// can, so that containerd has to unpack it; a damaged layer may be the reason, too. Blocks.
///
/// # Errors
/// The layer has another DiffID, or the index cannot be written.
pub fn index_bundled_layer(
    directory: &Path,
    layer: &Descriptor,
    diff_id: Digest,
    source: impl Read + Send + 'static,
) -> Result<Option<String>, DaemonError> {
    let store = IndexStore::of_bundle(directory).at(directory)?;
    let claimed = ClaimedLayer { descriptor: layer.clone(), diff_id: Some(diff_id), file: None };
    if store.is_proven(&claimed) {
        return Ok(None);
    }
    if !is_readable_tar(layer) {
        return Ok(Some(format!("layers of type {} have no index", layer.media_type)));
    }
    let known = match whole_layer::read(&claimed, source, &mut |_: Decoded, _: &[u8]| Ok(())) {
        Ok(known) => known,
        Err(LayerError::Build(error)) => return Ok(Some(error.to_string())),
        Err(error) => {
            let (layer, source) = (layer.digest, Box::new(error));
            return Err(DaemonError::BundledLayer { layer, source });
        }
    };
    let index = Algorithm::Sha256.digest(&known.index);
    let record = LayerRecord { diff_id, index, is_proven: true };
    store.add(&layer.digest, &record, &known.index).at(store.root())?;
    Ok(None)
}
