//! Images of layers that were made lately.

use std::{collections::HashMap, sync::Mutex};

use lazuli_builder::index::KnownLayer;
use lazuli_image::{Algorithm, Digest};

use crate::sync::lock;

/// Images of which it is remembered what they were made of: some 100 kB.
const REMEMBERED: usize = 1024;

/// Layers of an ordinary image that are shown together.
#[derive(Clone, Copy, Debug)]
pub(super) enum Part {
    /// This many, from the lowest on.
    Lowest(u32),
    /// The one with this digest.
    One(Digest),
}

/// The digests of images that were made, by what they were made of.
#[derive(Debug, Default)]
pub(super) struct MadeImages(Mutex<HashMap<Digest, Digest>>);

impl MadeImages {
    pub(super) fn of(&self, inputs: &Digest) -> Option<Digest> {
        lock(&self.0).get(inputs).copied()
    }

    pub(super) fn note(&self, inputs: Digest, image: Digest) {
        let mut made = lock(&self.0);
        if made.len() == REMEMBERED {
            made.clear();
        }
        made.insert(inputs, image);
    }
}

/// The digest of what an image is made of: `part` of the ordinary image with this manifest, and the
/// `layers` of that.
pub(super) fn inputs(manifest: &Digest, part: Part, layers: &[KnownLayer]) -> Digest {
    let mut hasher = Algorithm::Blake3.hasher();
    hasher.update(format!("{manifest} {part:?}").as_bytes());
    for KnownLayer { digest, stored_size, diff_id, file, index } in layers {
        let size = index.len();
        let layer = format!("\n{digest} {stored_size} {diff_id} {file:?} {size}\n");
        hasher.update(layer.as_bytes());
        hasher.update(index);
    }
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_of_other_layers_or_of_another_part_are_others() {
        let digest = |text: &str| Algorithm::Sha256.digest(text.as_bytes());
        let layer = |name: &str, file: Option<&str>, index: &[u8]| KnownLayer {
            digest: digest(name),
            stored_size: 10,
            diff_id: digest("tar"),
            file: file.map(str::to_owned),
            index: index.to_vec(),
        };
        let plain = || vec![layer("a", None, b"index"), layer("b", None, b"")];
        let made =
            |manifest: &str, part, layers: &[KnownLayer]| inputs(&digest(manifest), part, layers);
        let all = [
            made("1", Part::Lowest(2), &plain()),
            made("2", Part::Lowest(2), &plain()),
            made("1", Part::Lowest(1), &plain()),
            made("1", Part::One(digest("a")), &plain()),
            made("1", Part::Lowest(2), &plain()[..1]),
            made("1", Part::Lowest(2), &[layer("b", None, b""), layer("a", None, b"index")]),
            made("1", Part::Lowest(2), &[layer("a", Some("f"), b"index"), layer("b", None, b"")]),
            made("1", Part::Lowest(2), &[layer("a", None, b"indeX"), layer("b", None, b"")]),
        ];
        assert_eq!(made("1", Part::Lowest(2), &plain()), all[0]);
        let different: std::collections::HashSet<_> = all.iter().collect();
        assert_eq!(different.len(), all.len());
    }
}
