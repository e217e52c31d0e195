//! One more blob with the hot chunks of an image that exists.

use std::{
    collections::{BTreeSet, HashMap},
    path::Path,
};

use lazuli_image::{
    Blob, BlobIndex, Chunk, ChunkRef, Codec,
    codec::Decoder,
    rafs::{BlobRecord, Bootstrap, BootstrapOptions},
};

use super::{Hot, rewrite, writer::BlobWriter};
use crate::{
    build::check_blobs, built_blob::BuiltBlob, error::BuildError, pack::for_each_chunk,
    scratch::Scratch,
};

/// A blob of hot chunks, each checked before it is added.
#[derive(Debug)]
pub struct HotBlob {
    writer: BlobWriter,
    codec: Codec,
    decoder: Decoder,
    decoded: Vec<u8>,
}

impl HotBlob {
    /// Creates an empty hot blob in the directory `scratch`, with chunks compressed with `codec`.
    pub fn create(scratch: &Path, codec: Codec) -> Result<Self, BuildError> {
        let writer = BlobWriter::create(Scratch::new(scratch)?, "hot", codec)?;
        Ok(HotBlob { writer, codec, decoder: Decoder::new(), decoded: Vec::new() })
    }

    /// Adds a chunk of `blob` after checking these stored bytes. One from a batch is stored on its
    /// own.
    ///
    /// # Errors
    /// The bytes are wrong, or the blob has another codec: an image has one codec.
    pub fn add(&mut self, blob: &Blob, chunk: &Chunk, stored: &[u8]) -> Result<(), BuildError> {
        let fail =
            |problem| Err(BuildError::Content { number: chunk.number, blob: blob.id, problem });
        if blob.codec != self.codec {
            return fail(format!("compressed with {}, expected {}", blob.codec, self.codec));
        }
        if stored.len() != chunk.stored_size as usize {
            return fail(format!("{} bytes, expected {}", stored.len(), chunk.stored_size));
        }
        let unit = match self.decoder.unit(&blob.unit(chunk), stored, &mut self.decoded) {
            Ok(unit) => unit,
            Err(problem) => return fail(problem.to_string()),
        };
        let Some(content) = chunk.part_of(unit) else {
            return fail(format!("its batch has {} bytes", unit.len()));
        };
        if !chunk.digest.matches(content) {
            let got = chunk.digest.algorithm.digest(content);
            return fail(format!("its digest is {got}, expected {}", chunk.digest));
        }
        match chunk.part {
            None => self.writer.add(&[*chunk], stored),
            Some(_) => self.writer.add_anew(&[(*chunk, content)]),
        }
    }

    /// Ends the blob.
    ///
    /// # Errors
    /// It has no chunks, or more than the format has numbers for.
    pub fn finish(self) -> Result<BuiltBlob, BuildError> {
        let hot_bytes = self.writer.chunks().last().map_or(0, |last| last.stored_end().0);
        self.writer.finish(hot_bytes)
    }
}

/// The result of [`optimize`].
#[derive(Debug)]
pub struct Optimized {
    /// The metadata file. Its blobs are [`Optimized::kept`] in this order, and then the hot one.
    pub bootstrap: Vec<u8>,
    /// Blobs of the old image that still have chunks in use.
    pub kept: Vec<BlobRecord>,
}

/// The bootstrap of the same image with all content of `hot`, which has the chunks of `order`,
/// taken from there. Content that an earlier hot blob had is taken from the first blob that has it,
/// so hot blobs do not pile up.
pub fn optimize<B: AsRef<[u8]>>(
    image: &Bootstrap<B>,
    order: &Hot,
    hot: &BuiltBlob,
) -> Result<Optimized, BuildError> {
    let mut tree = image.tree()?;
    let old = image.blob_records();
    // The place of each content: the hot blob, which follows the old ones, or the first blob that
    // has it.
    let mut homes = HashMap::new();
    let all = old.iter().zip((0..).map(BlobIndex));
    let hot_blob = (&hot.record, BlobIndex(old.len() as u8));
    for (record, blob) in std::iter::once(hot_blob).chain(all) {
        for chunk in &record.blob.chunks {
            let place = ChunkRef { blob, number: chunk.number };
            homes.entry(chunk.digest).or_insert(place);
        }
    }
    let home = |chunk: ChunkRef| {
        let known = old.get(usize::from(chunk.blob.0)).and_then(|old| old.blob.chunk(chunk.number));
        known.and_then(|known| homes.get(&known.digest).copied()).unwrap_or(chunk)
    };
    let mut used = BTreeSet::from([hot_blob.1]);
    for_each_chunk(&mut tree, |chunk| {
        used.insert(home(*chunk).blob);
    });
    let new: HashMap<_, _> = used.iter().copied().zip((0..).map(BlobIndex)).collect();
    let place = |chunk: ChunkRef| {
        let ChunkRef { blob, number } = home(chunk);
        ChunkRef { blob: new.get(&blob).copied().unwrap_or(blob), number }
    };
    let kept = used.iter().filter_map(|blob| old.get(usize::from(blob.0)).cloned());
    let kept: Vec<BlobRecord> = kept.collect();
    let mut records = kept.clone();
    records.push(hot.record.clone());
    check_blobs("blobs", records.len())?;
    let first: Vec<_> = order.chunks.iter().copied().map(place).collect();
    let options =
        BootstrapOptions { chunk_size: image.chunk_size(), digest: image.digest_algorithm() };
    let bootstrap = rewrite(tree, &records, &options, place, &first)?;
    Ok(Optimized { bootstrap, kept })
}
