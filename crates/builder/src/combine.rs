//! Combines several images into one; their blobs stay as they are.

use std::collections::{BTreeSet, HashMap};

use lazuli_image::{
    BlobIndex, InodeId, Tree,
    rafs::{BlobRecord, Bootstrap, BootstrapOptions, write_bootstrap_with_prefetch},
};

use crate::{
    build::check_blobs,
    error::BuildError,
    overlay::Overlay,
    pack::for_each_chunk,
    source::image::{self, TreeOf},
};

/// One image to combine.
#[derive(Debug)]
pub struct SourceImage<'a, B> {
    /// Its name in messages.
    pub name: String,
    /// Its metadata.
    pub image: &'a Bootstrap<B>,
    /// Whether it is a whole image or a single layer, as made by [`crate::build_layer`] or
    /// upstream's builder.
    pub of: TreeOf,
}

/// The result of [`combine`].
#[derive(Debug)]
pub struct Combined {
    /// The combined tree.
    pub tree: Tree,
    /// The blobs that are in use.
    pub blobs: Vec<BlobRecord>,
    /// The first image that has each of them.
    pub homes: Vec<usize>,
    options: BootstrapOptions,
}

impl Combined {
    /// The metadata file. Readers of upstream fetch `prefetch` first.
    pub fn bootstrap(&self, prefetch: &[InodeId]) -> Result<Vec<u8>, BuildError> {
        Ok(write_bootstrap_with_prefetch(&self.tree, &self.blobs, &self.options, prefetch)?)
    }
}

/// Lays the trees of `sources` over each other, lowest first, as if they were layers.
///
/// # Errors
/// The sources differ in chunk size, digest algorithm or codec, of which an image has one each, or
/// disagree about a blob that they share.
pub fn combine<B: AsRef<[u8]>>(sources: &[SourceImage<'_, B>]) -> Result<Combined, BuildError> {
    let mut known = Blobs::default();
    let mut overlay = Overlay::new();
    for (number, source) in sources.iter().enumerate() {
        let numbers = known.add(source, number)?;
        let tree = source.image.tree()?;
        // The reader has checked that references are to blobs of the image.
        let place = |blob: BlobIndex| numbers[usize::from(blob.0)];
        let entries = image::entries(&tree, source.of, place)
            .map_err(|problem| BuildError::Layer { layer: source.name.clone(), problem })?;
        overlay.apply(&source.name, entries)?;
    }
    let mut tree = overlay.finish();
    let mut used = BTreeSet::new();
    for_each_chunk(&mut tree, |chunk| {
        used.insert(chunk.blob);
    });
    let new: HashMap<_, _> = used.iter().copied().zip((0..).map(BlobIndex)).collect();
    for_each_chunk(&mut tree, |chunk| chunk.blob = new[&chunk.blob]);
    let all = known.blobs.into_iter().zip((0..).map(BlobIndex));
    let (blobs, homes) = all.filter(|(_, at)| used.contains(at)).map(|(blob, _)| blob).unzip();
    Ok(Combined { tree, blobs, homes, options: known.options.unwrap_or_default() })
}

/// The blobs of the images added so far.
#[derive(Default)]
struct Blobs {
    /// Each blob once, with the first image that has it.
    blobs: Vec<(BlobRecord, usize)>,
    /// Those of the first image with blobs.
    options: Option<BootstrapOptions>,
}

impl Blobs {
    /// Adds the blobs of an image. Returns their numbers in the combined image.
    fn add<B: AsRef<[u8]>>(
        &mut self,
        source: &SourceImage<'_, B>,
        number: usize,
    ) -> Result<Vec<BlobIndex>, BuildError> {
        let SourceImage { name, image, .. } = source;
        if !image.blobs().is_empty() {
            let options = BootstrapOptions {
                chunk_size: image.chunk_size(),
                digest: image.digest_algorithm(),
            };
            let below = *self.options.get_or_insert(options);
            same(name, "the chunk size", options.chunk_size, below.chunk_size)?;
            same(name, "the digest of chunks", options.digest, below.digest)?;
        }
        let mut numbers = Vec::new();
        for record in image.blob_records() {
            if let Some((first, _)) = self.blobs.first() {
                same(name, "the compression", record.blob.codec, first.blob.codec)?;
            }
            let known = self.blobs.iter().position(|(known, _)| known.blob.id == record.blob.id);
            let at = match known {
                Some(at) => {
                    join(name, &mut self.blobs[at].0, record)?;
                    at
                }
                None => {
                    self.blobs.push((record, number));
                    self.blobs.len() - 1
                }
            };
            check_blobs("blobs", self.blobs.len())?;
            numbers.push(BlobIndex(at as u8));
        }
        Ok(numbers)
    }
}

/// Merges another image's description of a known blob: each may list only the chunks that it uses.
fn join(image: &str, known: &mut BlobRecord, other: BlobRecord) -> Result<(), BuildError> {
    let blob = format!("{image}, blob {}", other.blob.id);
    same(&blob, "the number of chunks", other.tail.chunk_count, known.tail.chunk_count)?;
    same(&blob, "the decoded size", other.blob.decoded_size, known.blob.decoded_size)?;
    let chunks = &mut known.blob.chunks;
    if *chunks == other.blob.chunks {
        return Ok(());
    }
    let chunks = chunks.to_mut();
    for &chunk in &other.blob.chunks {
        match chunks.binary_search_by_key(&chunk.number, |chunk| chunk.number) {
            Ok(at) if chunks[at] == chunk => {}
            Ok(at) => {
                let (found, expected) = (format!("{chunk:?}"), format!("{:?}", chunks[at]));
                return Err(BuildError::Unlike { image: blob, what: "a chunk", found, expected });
            }
            Err(at) => chunks.insert(at, chunk),
        }
    }
    Ok(())
}

fn same<T: PartialEq + std::fmt::Debug>(
    image: &str,
    what: &'static str,
    found: T,
    expected: T,
) -> Result<(), BuildError> {
    if found == expected {
        return Ok(());
    }
    let (found, expected) = (format!("{found:?}"), format!("{expected:?}"));
    Err(BuildError::Unlike { image: image.to_owned(), what, found, expected })
}
