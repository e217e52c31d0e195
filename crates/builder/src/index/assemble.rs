//! Makes the tree of an image, or of one of its layers, from indexes of layers, without the layers.

use lazuli_image::{
    Algorithm, BlobIndex, ChunkRef, Digest,
    rafs::{ReadIndex, WrittenIndex},
};

use super::{
    ImageIndex, check_forms, join,
    layer::Indexed,
    memory::{Share, share},
    skeleton::Joined,
};
use crate::{
    entry::{Entry, EntryKind},
    error::{BuildError, SourceError},
    options::Options,
    source::{lone_file, stream::Allowance, tar::Archive},
    whiteout,
};

/// A layer of which the index is known.
#[derive(Clone, Debug)]
pub struct KnownLayer {
    /// SHA-256 of it as stored.
    pub digest: Digest,
    /// Bytes as stored; limits the unpacked size.
    pub stored_size: u64,
    /// SHA-256 of its tar.
    pub diff_id: Digest,
    /// The path of the file that the layer is, in an artifact; `None` for a tar.
    pub file: Option<String>,
    /// Its index, with its skeleton.
    pub index: Vec<u8>,
}

/// Makes the index of the image that consists of `layers`, lowest first: equal to that of
/// [`super::index`] from the layers themselves. The tree comes from the skeletons only.
///
/// # Errors
/// An index is damaged, has no skeleton, or one that does not go with its chunks, or the image
/// takes too much memory.
pub fn assemble(layers: Vec<KnownLayer>) -> Result<ImageIndex, BuildError> {
    check_forms(layers.iter().map(|layer| (layer.digest, layer.file.is_some())))?;
    let names = layers.iter().map(|layer| layer.digest.to_string()).collect();
    let mut memory = share();
    let read = layers.into_iter().zip(0..).map(|(layer, number)| read(layer, number, &mut memory));
    join(read.collect::<Result<_, _>>()?, names)
}

/// Makes the index of the image that has the tree of `layer` alone, as a lower directory of
/// overlayfs: whiteouts are character devices and attributes.
///
/// # Errors
/// As [`assemble`]. The layer has files in directories that it does not list, whose owner and mode
/// are those of lower layers, or other content that depends on these.
pub fn assemble_one(layer: KnownLayer) -> Result<ImageIndex, BuildError> {
    let name = layer.digest.to_string();
    let mut read = read(layer, 0, &mut share())?;
    whiteout::to_overlayfs(&mut read.entries)
        .map_err(|problem| BuildError::Layer { layer: name.clone(), problem })?;
    join(vec![read], vec![name])
}

/// Memory of a row of an index: its chunk has 32 bytes of digest in the index, and about three
/// times as much when it is read.
const ROW: u64 = 3;

fn read(layer: KnownLayer, number: u8, memory: &mut Share<'_>) -> Result<Indexed, BuildError> {
    let KnownLayer { digest, stored_size, diff_id, file, index: bytes } = layer;
    memory.take(ROW * bytes.len() as u64)?;
    let index = ReadIndex::parse(&bytes, digest, stored_size)?;
    let entries = match file {
        None => entries(&index, number, stored_size, memory),
        Some(path) => lone_entry(&path, &index, number, stored_size, memory),
    };
    let entries = entries.map_err(|error| match error {
        ReadError::Build(error) => error,
        ReadError::Source(problem) => BuildError::Layer { layer: digest.to_string(), problem },
    })?;
    let tables = index.record.tail.meta_end().min(bytes.len() as u64) as usize;
    let has_chunks = !index.starts.is_empty();
    let tables = Algorithm::Sha256.digest(&bytes[..if has_chunks { tables } else { 0 }]);
    let index = WrittenIndex { bytes, tables, record: index.record };
    Ok(Indexed { entries, index, beside: None, diff_id })
}

/// Why the entries of a layer were not read.
enum ReadError {
    Source(SourceError),
    Build(BuildError),
}

impl From<SourceError> for ReadError {
    fn from(error: SourceError) -> Self {
        ReadError::Source(error)
    }
}

fn entries(
    index: &ReadIndex,
    number: u8,
    stored_size: u64,
    memory: &mut Share<'_>,
) -> Result<Vec<Entry>, ReadError> {
    let failed = |offset| {
        move |error: std::io::Error| SourceError::Archive { offset, problem: error.to_string() }
    };
    // Content is not needed here.
    let mut fill = |_: &_, _: &mut [u8]| Ok(());
    let joined = Joined::new(index, &mut fill).map_err(failed(0))?;
    let mut archive = Archive::new(joined);
    let allowance = Allowance::of(stored_size);
    let mut entries = Vec::new();
    while let Some(mut entry) = archive.next_entry()? {
        let fail = |problem: String| SourceError::Entry {
            entry: entry.path.to_string(),
            offset: entry.offset,
            problem,
        };
        if let EntryKind::Regular { size, chunks } = &mut entry.kind {
            if archive.is_sparse() {
                return Err(fail("it is sparse, and so in no chunk".to_owned()).into());
            }
            if archive.offset().saturating_add(*size) > allowance.limit() {
                return Err(fail(allowance.exceeded()).into());
            }
            let mut left = *size;
            while left > 0 {
                let length = left.min(Options::CHUNK_SIZE.into());
                let chunk = archive.get_ref().chunk_at(archive.offset());
                let chunk = chunk.filter(|chunk| u64::from(chunk.decoded_size) == length);
                let chunk = chunk.ok_or_else(|| fail("its content is in no chunk".to_owned()))?;
                chunks.push(ChunkRef { blob: BlobIndex(number), number: chunk.number });
                archive.pass_content(length, Joined::pass_chunk);
                left -= length;
            }
        }
        memory.take_entry(&entry).map_err(ReadError::Build)?;
        entries.push(entry);
    }
    let offset = archive.offset();
    let mut joined = archive.into_inner();
    let rest = &mut std::io::Read::take(&mut joined, allowance.limit());
    std::io::copy(rest, &mut std::io::sink()).map_err(failed(offset))?;
    if !joined.has_read_all() {
        let problem = "it has chunks that are in no file".to_owned();
        return Err(SourceError::Archive { offset, problem }.into());
    }
    Ok(entries)
}

/// The entry of a layer that is one file.
fn lone_entry(
    path: &str,
    index: &ReadIndex,
    number: u8,
    stored_size: u64,
    memory: &mut Share<'_>,
) -> Result<Vec<Entry>, ReadError> {
    let mut entry = lone_file(path, stored_size)?;
    let mut rows = index.starts.iter().zip(&index.record.blob.chunks);
    let (mut chunks, mut at) = (Vec::new(), 0);
    while at < stored_size {
        let length = (stored_size - at).min(Options::CHUNK_SIZE.into());
        let row = rows.next();
        let row =
            row.filter(|(start, chunk)| **start == at && u64::from(chunk.decoded_size) == length);
        let Some((_, chunk)) = row else {
            let problem = "its content is in no chunk".to_owned();
            return Err(SourceError::Archive { offset: at, problem }.into());
        };
        chunks.push(ChunkRef { blob: BlobIndex(number), number: chunk.number });
        at += length;
    }
    if rows.next().is_some() {
        let problem = "it has chunks that are in no file".to_owned();
        return Err(SourceError::Archive { offset: at, problem }.into());
    }
    entry.kind = EntryKind::Regular { size: stored_size, chunks };
    memory.take_entry(&entry).map_err(ReadError::Build)?;
    Ok(vec![entry])
}
