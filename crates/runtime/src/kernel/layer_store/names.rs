//! Names in the file system, and the numbers by which the kernel knows them.

use std::{collections::HashMap, fmt, sync::Mutex};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use lazuli_image::{Algorithm, Digest};

use crate::sync::lock;

/// Maximum number of names that are remembered. The kernel asks again for those that are not.
const REMEMBERED: usize = 16_384;

/// Longest name of a file in Linux.
const NAME_MAX: usize = 255;

/// A layer of an image, as clients name it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LayerName {
    /// The image's name.
    pub image: String,
    /// The layer's digest as stored, or that of its table of contents.
    pub layer: Digest,
}

impl fmt::Display for LayerName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", self.layer, self.image)
    }
}

/// A file in the directory of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LayerFile {
    Diff = 1,
    Info = 2,
    Blob = 3,
}

impl LayerFile {
    pub(super) fn parse(name: &[u8]) -> Option<Self> {
        match name {
            b"diff" => Some(LayerFile::Diff),
            b"info" => Some(LayerFile::Info),
            b"blob" => Some(LayerFile::Blob),
            _ => None,
        }
    }
}

/// A file or directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Node {
    /// Of an image, by its name.
    Image(String),
    Layer(LayerName),
    File(LayerName, LayerFile),
}

/// The image that the name of a directory means.
pub(super) fn image(name: &[u8]) -> Option<String> {
    if name.is_empty() || name.len() > NAME_MAX {
        return None;
    }
    let decoded = BASE64_STANDARD.decode(name).ok()?;
    let image = String::from_utf8(decoded).ok()?;
    // One name for each image.
    (BASE64_STANDARD.encode(&image).as_bytes() == name).then_some(image)
}

/// The layer that the name of a directory means.
pub(super) fn layer(name: &[u8]) -> Option<Digest> {
    let digest: Digest = std::str::from_utf8(name).ok()?.parse().ok()?;
    (digest.to_string().as_bytes() == name).then_some(digest)
}

/// Numbers follow from names: a worker that has replaced another one gives the same. Of the names
/// that its predecessor was asked for it knows those of layers that exist. It answers ESTALE for
/// others until they are looked up again, which the kernel does by itself.
#[derive(Debug, Default)]
pub(super) struct Numbers(Mutex<HashMap<u64, Directory>>);

#[derive(Clone, Debug)]
enum Directory {
    Image(String),
    Layer(LayerName),
}

/// The low bits of a number say which file of the layer it is.
const FILE_BITS: u64 = 3;

impl Numbers {
    /// Knows the numbers of these layers.
    pub(super) fn of(layers: Vec<LayerName>) -> Self {
        let numbers = Numbers::default();
        for layer in layers {
            numbers.number(Node::Image(layer.image.clone()));
            numbers.number(Node::Layer(layer));
        }
        numbers
    }

    /// The number of a node, by which it is found from now on.
    pub(super) fn number(&self, node: Node) -> u64 {
        let (directory, file) = match node {
            Node::Image(image) => (Directory::Image(image), 0),
            Node::Layer(layer) => (Directory::Layer(layer), 0),
            Node::File(layer, file) => (Directory::Layer(layer), file as u64),
        };
        let number = hash(&directory);
        let mut known = lock(&self.0);
        if known.len() >= REMEMBERED {
            known.clear();
        }
        known.insert(number, directory);
        number | file
    }

    /// The node with this number.
    pub(super) fn node(&self, number: u64) -> Option<Node> {
        let directory = lock(&self.0).get(&(number & !FILE_BITS))?.clone();
        Some(match (directory, number & FILE_BITS) {
            (Directory::Image(image), 0) => Node::Image(image),
            (Directory::Layer(layer), 0) => Node::Layer(layer),
            (Directory::Layer(layer), 1) => Node::File(layer, LayerFile::Diff),
            (Directory::Layer(layer), 2) => Node::File(layer, LayerFile::Info),
            (Directory::Layer(layer), 3) => Node::File(layer, LayerFile::Blob),
            _ => return None,
        })
    }
}

/// Never 0, which means no node, nor 1, the root.
fn hash(directory: &Directory) -> u64 {
    let name = match directory {
        Directory::Image(image) => format!("image\n{image}"),
        Directory::Layer(LayerName { image, layer }) => format!("layer\n{image}\n{layer}"),
    };
    let digest = Algorithm::Blake3.digest(name.as_bytes()).hex();
    let number = u64::from_str_radix(&digest[..16], 16).unwrap_or_default();
    (number | 1 << 63) & !FILE_BITS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_one_spelling() {
        let name = BASE64_STANDARD.encode("r.example/a:1");
        assert_eq!(image(name.as_bytes()).unwrap(), "r.example/a:1");
        for wrong in ["", "=", "r.example", "YQ", "YR==", &"A".repeat(300)] {
            assert!(image(wrong.as_bytes()).is_none(), "{wrong}");
        }
        let digest = format!("sha256:{}", "ab".repeat(32));
        assert_eq!(layer(digest.as_bytes()).unwrap().to_string(), digest);
        for wrong in ["use", "sha256:ab", &digest.to_uppercase(), &digest[..70], "\u{fffd}"] {
            assert!(layer(wrong.as_bytes()).is_none(), "{wrong}");
        }
    }

    #[test]
    fn numbers_follow_from_names() {
        let layer = LayerName { image: "r.example/a:1".into(), layer: Digest::sha256([7; 32]) };
        let nodes = [
            Node::Image(layer.image.clone()),
            Node::Layer(layer.clone()),
            Node::File(layer.clone(), LayerFile::Diff),
            Node::File(layer.clone(), LayerFile::Info),
            Node::File(layer, LayerFile::Blob),
        ];
        for node in nodes {
            let (one, other) = (Numbers::default(), Numbers::default());
            let number = one.number(node.clone());
            assert_eq!(one.node(number), Some(node.clone()));
            assert_eq!((other.node(number), other.number(node)), (None, number));
            assert!(number > 1);
        }
        assert_eq!(Numbers::default().node(2), None);
    }
}
