//! The manifest's description of a seekable layer.

use crate::{
    Codec, Digest, FormatError,
    oci::{Descriptor, Manifest, annotation, media_type},
};

/// Maximum size of a table of contents in bytes, stored and unpacked. A file takes some 300 of them
/// unpacked, a twentieth of that as stored.
pub const MAX_TOC: u64 = 128 << 20;

/// A layer that has a table of contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeekableLayer {
    /// SHA-256 of the stored layer.
    pub digest: Digest,
    /// Its stored size in bytes.
    pub size: u64,
    /// Place of its table of contents.
    pub toc: TocPlace,
}

/// Place of a layer's table of contents, and the digest that proves it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TocPlace {
    /// In a gzip member to which the footer leads (eStargz).
    Member {
        /// SHA-256 of the unpacked table.
        digest: Digest,
    },
    /// In a skippable frame of zstd:chunked.
    Frame {
        /// First byte in the layer.
        offset: u64,
        /// Bytes as stored, one zstd frame.
        stored_size: u64,
        /// Unpacked bytes.
        size: u64,
        /// SHA-256 of the table.
        digest: FrameDigest,
    },
}

/// The form of the table that a digest covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameDigest {
    /// Digest of the table as stored (containers/storage).
    Stored(Digest),
    /// Digest of the unpacked table (stargz-snapshotter).
    Unpacked(Digest),
}

impl SeekableLayer {
    /// The layers of an ordinary image, if all of them are seekable.
    pub fn all_of(manifest: &Manifest) -> Option<Vec<Self>> {
        let is_ordinary = manifest.artifact_type.is_none() && !manifest.layers.is_empty();
        let layers = manifest.layers.iter().filter(|_| is_ordinary).map(SeekableLayer::of);
        layers.collect::<Option<Vec<_>>>().filter(|layers| !layers.is_empty())
    }

    /// Parses a layer's description; `None` if its annotations name no table of contents, or two.
    pub fn of(layer: &Descriptor) -> Option<Self> {
        let note = |name: &str| layer.annotations.get(name).map(String::as_str);
        let digest = |name: &str| note(name)?.parse().ok();
        let stargz = note(annotation::STARGZ_TOC);
        let containers = note(annotation::CHUNKED_DIGEST);
        let toc = match (stargz, containers) {
            (Some(_), None) => {
                let digest = digest(annotation::STARGZ_TOC)?;
                match (note(annotation::STARGZ_CHUNKED_POSITION), &layer.media_type[..]) {
                    (Some(position), _) => frame(position, FrameDigest::Unpacked(digest))?,
                    (None, media_type::LAYER_GZIP | media_type::DOCKER_LAYER_GZIP) => {
                        TocPlace::Member { digest }
                    }
                    _ => return None,
                }
            }
            (None, Some(_)) => {
                let digest = digest(annotation::CHUNKED_DIGEST)?;
                frame(note(annotation::CHUNKED_POSITION)?, FrameDigest::Stored(digest))?
            }
            _ => return None,
        };
        Some(SeekableLayer { digest: layer.digest, size: layer.size, toc })
    }

    /// The digest of its table of contents, as its annotation has it.
    pub fn toc_digest(&self) -> Digest {
        match self.toc {
            TocPlace::Member { digest }
            | TocPlace::Frame {
                digest: FrameDigest::Stored(digest) | FrameDigest::Unpacked(digest),
                ..
            } => digest,
        }
    }

    /// Returns whether its root has files of the format that are not part of the image.
    pub fn has_landmarks(&self) -> bool {
        !matches!(self.toc, TocPlace::Frame { digest: FrameDigest::Stored(_), .. })
    }

    /// The compression of its pieces.
    pub fn codec(&self) -> Codec {
        match self.toc {
            TocPlace::Member { .. } => Codec::Gzip,
            TocPlace::Frame { .. } => Codec::ZstdLayer,
        }
    }
}

/// Parses `offset:stored:unpacked:1`.
fn frame(position: &str, digest: FrameDigest) -> Option<TocPlace> {
    let numbers: Vec<u64> =
        position.split(':').map(|number| number.parse().ok()).collect::<Option<_>>()?;
    let [offset, stored_size, size, 1] = numbers[..] else { return None };
    Some(TocPlace::Frame { offset, stored_size, size, digest })
}

/// Unpacks the table of contents whose stored bytes are `stored`, and compares it with its digest.
///
/// # Errors
/// It is another one, too large, or damaged.
pub fn toc_of_frame(
    stored: &[u8],
    size: u64,
    digest: FrameDigest,
    layer: Digest,
) -> Result<Vec<u8>, FormatError> {
    let error = |problem: String| FormatError::new(("table of contents of", layer), 0, problem);
    let wrong = |digest: Digest| error(format!("its digest is not {digest}, as its image says"));
    if size > MAX_TOC {
        return Err(error(format!("{size} bytes, expected at most {MAX_TOC}")));
    }
    match digest {
        FrameDigest::Stored(digest) if !digest.matches(stored) => return Err(wrong(digest)),
        _ => {}
    }
    let unpacked = zstd::bulk::decompress(stored, size as usize);
    let unpacked = unpacked.map_err(|problem| error(problem.to_string()))?;
    if unpacked.len() as u64 != size {
        return Err(error(format!("{} bytes, expected {size}", unpacked.len())));
    }
    match digest {
        FrameDigest::Unpacked(digest) if !digest.matches(&unpacked) => Err(wrong(digest)),
        _ => Ok(unpacked),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Algorithm;

    fn layer(media_type: &str, notes: &[(&str, &str)]) -> Descriptor {
        let digest = Algorithm::Sha256.digest(b"layer");
        let mut layer = Descriptor::plain(media_type, digest, 9);
        layer.annotations = notes.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect();
        layer
    }

    #[test]
    fn annotations_lead_to_the_table() {
        let digest = Algorithm::Sha256.digest(b"toc");
        let text = digest.to_string();
        let of = |media_type: &str, notes: &[(&str, &str)]| {
            SeekableLayer::of(&layer(media_type, notes)).map(|layer| layer.toc)
        };
        let frame = |digest| TocPlace::Frame { offset: 5, stored_size: 6, size: 7, digest };
        let stargz = (annotation::STARGZ_TOC, &text[..]);
        let containers = (annotation::CHUNKED_DIGEST, &text[..]);
        let (gzip, zstd) = (media_type::LAYER_GZIP, media_type::LAYER_ZSTD);
        assert_eq!(of(gzip, &[stargz]), Some(TocPlace::Member { digest }));
        assert_eq!(
            of(zstd, &[stargz, (annotation::STARGZ_CHUNKED_POSITION, "5:6:7:1")]),
            Some(frame(FrameDigest::Unpacked(digest)))
        );
        assert_eq!(
            of(zstd, &[containers, (annotation::CHUNKED_POSITION, "5:6:7:1")]),
            Some(frame(FrameDigest::Stored(digest)))
        );
        for notes in [
            &[][..],
            &[stargz, containers, (annotation::CHUNKED_POSITION, "5:6:7:1")],
            &[containers],
            &[containers, (annotation::CHUNKED_POSITION, "5:6:7:2")],
            &[containers, (annotation::CHUNKED_POSITION, "5:6:-7:1")],
            &[containers, (annotation::CHUNKED_POSITION, "5:6:7:1:1")],
            &[(annotation::STARGZ_TOC, "sha256:12")],
        ] {
            assert_eq!(of(zstd, notes), None, "{notes:?}");
        }
        assert_eq!(of(zstd, &[stargz]), None);
    }

    #[test]
    fn a_table_with_another_digest_or_size_is_refused() {
        let (toc, layer) = (b"{}".repeat(100), Algorithm::Sha256.digest(b"layer"));
        let stored = zstd::bulk::compress(&toc, 3).unwrap();
        let [of_stored, unpacked] = [&stored, &toc].map(|bytes| Algorithm::Sha256.digest(bytes));
        for digest in [FrameDigest::Stored(of_stored), FrameDigest::Unpacked(unpacked)] {
            assert_eq!(toc_of_frame(&stored, 200, digest, layer).unwrap(), toc);
            for size in [199, 201, MAX_TOC + 1, u64::MAX] {
                assert!(toc_of_frame(&stored, size, digest, layer).is_err(), "{size}");
            }
        }
        for digest in [FrameDigest::Stored(unpacked), FrameDigest::Unpacked(of_stored)] {
            assert!(toc_of_frame(&stored, 200, digest, layer).is_err());
        }
    }
}
