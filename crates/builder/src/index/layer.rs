//! The index of one layer.

use std::{
    fmt,
    io::{self, Read},
    thread,
};

use lazuli_image::{
    Algorithm, BlobIndex, Chunk, ChunkRef, Codec, Decoded, Digest, FormatError, Stored,
    chunk::MAX_UNIT,
    offset::round_up_to_block,
    rafs::{LayerIndex, Piece, WrittenIndex, layout::MAX_CHUNKS},
};

use super::{
    background_chunks::{BackgroundChunks, ChunkSink},
    gunzip::Mark,
    memory::Share,
    unpacked::{Place, Unpacked, Whole},
};
use crate::{
    bake::writer::BlobWriter,
    built_blob::BuiltBlob,
    entry::{Entry, EntryKind},
    error::{BuildError, SourceError},
    scratch::Scratch,
    source::{lone_file, tar::Archive},
};

/// A layer of an ordinary image.
pub struct IndexLayer {
    /// SHA-256 of it as stored.
    pub digest: Digest,
    /// Bytes as stored; limits the unpacked size.
    pub stored_size: u64,
    /// The path of the file that the layer is, in an artifact; `None` for a tar.
    pub file: Option<String>,
    /// Its stored bytes. They are read to the last, so that a reader that checks a digest sees them
    /// all.
    pub source: Box<dyn Read + Send>,
}

impl fmt::Debug for IndexLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IndexLayer").field("digest", &self.digest).finish_non_exhaustive()
    }
}

/// The blobs of a layer while an image is made.
#[derive(Clone, Copy, Debug)]
pub(super) struct Numbers {
    /// The layer.
    pub(super) own: BlobIndex,
    /// Its content that no index leads to. A layer that is one file has none.
    pub(super) beside: BlobIndex,
}

/// A layer that was read.
pub(super) struct Indexed {
    /// Chunks are in the layer's [`Numbers`]. None of a layer whose content is
    /// [`ChunkContent::Taken`].
    pub(super) entries: Vec<Entry>,
    pub(super) index: WrittenIndex,
    pub(super) beside: Option<(BlobIndex, BuiltBlob)>,
    pub(super) diff_id: Digest,
}

/// The place of a chunk, and the point at which the way to it begins.
struct LocatedChunk {
    decoded: Decoded,
    size: u32,
    mark: Option<usize>,
    start: Place,
    end: Place,
}

/// Bytes that a chunk takes until the index is written.
const LOCATED: u64 = (size_of::<LocatedChunk>() + size_of::<Digest>() + size_of::<Chunk>()) as u64;

/// A layer while it is read.
struct Reader<'a, 'scope> {
    input: Input<'a>,
    numbers: Numbers,
    chunk_size: u32,
    found: Vec<LocatedChunk>,
    beside: Option<BlobWriter>,
    content: ChunkContent<'a>,
    /// The place of the next chunk among the decoded bytes of the layer's blob.
    next: Decoded,
    chunks: BackgroundChunks<'scope>,
}

/// How to handle the content of chunks.
pub(super) enum ChunkContent<'a> {
    /// It stays in the layer. Content that the index cannot lead to is stored again here.
    Stays(&'a Scratch),
    /// All of it is passed on, by a node: the chunks count in the memory of an image. The thread
    /// that passes them on takes the sink.
    Taken(Option<&'a mut ChunkSink<'a>>, Share<'a>),
}

/// The files of a layer.
enum Input<'a> {
    Tar(Box<Archive<Unpacked<'a>>>),
    /// One file, until it was read.
    File(Option<Entry>, Box<Unpacked<'a>>),
}

impl<'a> Input<'a> {
    fn open(
        layer: IndexLayer,
        on_read: &'a dyn Fn(u64),
        unreadable: impl Fn(io::Error) -> SourceError,
    ) -> Result<Self, SourceError> {
        let IndexLayer { stored_size, file, source, .. } = layer;
        Ok(match file {
            None => {
                let unpacked = Unpacked::new(source, stored_size, on_read).map_err(unreadable)?;
                Input::Tar(Box::new(Archive::new(unpacked)))
            }
            Some(path) => {
                let entry = lone_file(&path, stored_size)?;
                let layer = Unpacked::as_it_is(source, stored_size, on_read);
                Input::File(Some(entry), Box::new(layer.map_err(unreadable)?))
            }
        })
    }

    fn next_entry(&mut self) -> Result<Option<Entry>, SourceError> {
        match self {
            Input::Tar(archive) => archive.next_entry(),
            Input::File(file, _) => Ok(file.take()),
        }
    }

    /// Fills `content` with the next bytes of the file.
    fn read_content(&mut self, content: &mut [u8]) -> io::Result<()> {
        self.layer_mut().skeleton().pause();
        let read = match self {
            Input::Tar(archive) => archive.content().read_exact(content),
            Input::File(_, layer) => layer.read_exact(content),
        };
        self.layer_mut().skeleton().resume();
        read
    }

    fn is_sparse(&self) -> bool {
        matches!(self, Input::Tar(archive) if archive.is_sparse())
    }

    fn layer(&self) -> &Unpacked<'a> {
        match self {
            Input::Tar(archive) => archive.get_ref(),
            Input::File(_, layer) => layer,
        }
    }

    fn layer_mut(&mut self) -> &mut Unpacked<'a> {
        match self {
            Input::Tar(archive) => archive.get_mut(),
            Input::File(_, layer) => layer,
        }
    }

    fn into_layer(self) -> Unpacked<'a> {
        match self {
            Input::Tar(archive) => archive.into_inner(),
            Input::File(_, layer) => *layer,
        }
    }
}

/// Reads a layer, from its first byte to its last.
pub(super) fn read<'a>(
    layer: IndexLayer,
    numbers: Numbers,
    chunk_size: u32,
    mut content: ChunkContent<'a>,
    on_read: &'a dyn Fn(u64),
) -> Result<Indexed, BuildError> {
    let (digest, stored_size) = (layer.digest, layer.stored_size);
    let failed = |problem| BuildError::Layer { layer: digest.to_string(), problem };
    let unreadable = |offset| {
        move |error: io::Error| SourceError::Archive { offset, problem: error.to_string() }
    };
    let input = Input::open(layer, on_read, unreadable(0)).map_err(failed)?;
    let sink = match &mut content {
        ChunkContent::Stays(_) => None,
        ChunkContent::Taken(sink, _) => sink.take(),
    };
    thread::scope(|scope| {
        let chunks = BackgroundChunks::new(scope, chunk_size as usize, sink);
        let chunks = chunks.map_err(|error| failed(unreadable(0)(error)))?;
        let (found, beside, next) = (Vec::new(), None, Decoded(0));
        let mut reader =
            Reader { input, numbers, chunk_size, found, beside, content, next, chunks };
        let entries = reader.entries(&failed);
        // The memory counts until the index is written.
        let Reader { input, found, beside, content: _content, chunks, .. } = reader;
        let unpacked = input.into_layer();
        let offset = unpacked.place().decoded;
        let unreadable = |error| failed(unreadable(offset)(error));
        // Where the sink fails, entries end as well.
        let digests = chunks.finish().map_err(unreadable)?;
        let entries = entries?;
        let is_gzip = unpacked.is_gzip();
        let whole = unpacked.finish().map_err(unreadable)?;
        let diff_id = whole.diff_id;
        let index = layer_index(digest, stored_size, found, &digests, whole, is_gzip)?.write()?;
        let beside = beside.map(|beside| beside.finish(0)).transpose()?;
        let beside = beside.map(|beside| (numbers.beside, beside));
        Ok(Indexed { entries, index, beside, diff_id })
    })
}

impl Reader<'_, '_> {
    fn entries(
        &mut self,
        failed: &dyn Fn(SourceError) -> BuildError,
    ) -> Result<Vec<Entry>, BuildError> {
        let mut entries = Vec::new();
        let mut content = 0_u64;
        while let Some(mut entry) = self.input.next_entry().map_err(failed)? {
            if let EntryKind::Regular { size, chunks } = &mut entry.kind {
                let fail = |problem: String| SourceError::Entry {
                    entry: entry.path.to_string(),
                    offset: entry.offset,
                    problem,
                };
                // Holes cost the archive nothing, so they count like unpacked bytes.
                content = content.saturating_add(*size);
                let allowance = self.input.layer().allowance();
                if content > allowance.limit() {
                    return Err(failed(fail(allowance.exceeded())));
                }
                let mut left = *size;
                while left > 0 {
                    let length = left.min(self.chunk_size.into()) as usize;
                    let read = self.chunk(length);
                    chunks.push(read.map_err(|error| match error {
                        ChunkError::Read(problem) => failed(fail(problem)),
                        ChunkError::Build(error) => error,
                    })?);
                    left -= length as u64;
                }
                chunks.shrink_to_fit();
            }
            if let ChunkContent::Stays(_) = self.content {
                entries.push(entry);
            }
        }
        Ok(entries)
    }

    /// Reads the next `length` bytes of a file. Returns where they are stored.
    fn chunk(&mut self, length: usize) -> Result<ChunkRef, ChunkError> {
        let start = self.input.layer().place();
        let is_sparse = self.input.is_sparse();
        let content = self.chunks.next(length);
        let read = self.input.read_content(content);
        read.map_err(|error| ChunkError::Read(error.to_string()))?;
        let unpacked = self.input.layer();
        let end = unpacked.place();
        let mark = unpacked.mark_before(start.decoded);
        // Bytes that have to be decoded to get these.
        let way = mark.map_or(0, |(_, mark)| end.decoded - mark.decoded);
        let mark = mark.map(|(number, _)| number);
        if is_sparse || way > MAX_UNIT.into() {
            // Not all of the layer can be put together again from its chunks.
            self.input.layer_mut().skeleton().give_up();
            return self.put_beside(Stored(start.stored), length);
        }
        let number = self.found.len() as u32;
        if number >= MAX_CHUNKS {
            return Err(ChunkError::Read(format!("it has more chunks than {MAX_CHUNKS}")));
        }
        let decoded = self.next;
        let next = decoded.0.checked_add(length as u64).and_then(round_up_to_block);
        self.next = Decoded(next.ok_or_else(|| ChunkError::Read("it is too big".to_owned()))?);
        if let ChunkContent::Taken(_, memory) = &mut self.content {
            memory.take(LOCATED).map_err(ChunkError::Build)?;
        }
        self.chunks.add(decoded, length);
        if !self.chunks.is_taking() {
            return Err(ChunkError::Read("its content is not taken".to_owned()));
        }
        self.found.push(LocatedChunk { decoded, size: length as u32, mark, start, end });
        Ok(ChunkRef { blob: self.numbers.own, number })
    }

    /// Stores the chunk read last again, in a blob of its own.
    fn put_beside(&mut self, stored: Stored, length: usize) -> Result<ChunkRef, ChunkError> {
        let ChunkContent::Stays(scratch) = &self.content else {
            let problem =
                if self.input.is_sparse() { "it is sparse" } else { "it is in one block" };
            let store = "and has to be stored once more, by `lazuli index`";
            return Err(ChunkError::Read(format!("{problem}, {store}")));
        };
        let beside = match &mut self.beside {
            Some(beside) => beside,
            none => {
                let name = format!("beside{}", self.numbers.own.0);
                let created = BlobWriter::create((*scratch).clone(), &name, Codec::Zstd);
                none.insert(created.map_err(ChunkError::Build)?)
            }
        };
        let number = beside.chunks().len() as u32;
        let content = &*self.chunks.next(length);
        let chunk = Chunk {
            number,
            digest: Algorithm::Blake3.digest(content),
            stored,
            stored_size: 0,
            decoded: self.next,
            decoded_size: length as u32,
            part: None,
        };
        beside.add_anew(&[(chunk, content)]).map_err(ChunkError::Build)?;
        Ok(ChunkRef { blob: self.numbers.beside, number })
    }
}

/// Why a chunk was not read.
enum ChunkError {
    Read(String),
    Build(BuildError),
}

/// Makes pieces of chunks that begin at one point.
fn layer_index(
    layer: Digest,
    stored_size: u64,
    found: Vec<LocatedChunk>,
    digests: &[Digest],
    whole: Whole,
    is_gzip: bool,
) -> Result<LayerIndex, FormatError> {
    let (mut chunks, mut pieces) = (Vec::with_capacity(found.len()), Vec::<Piece>::new());
    let mut last_mark = None;
    for ((located, digest), number) in found.into_iter().zip(digests).zip(0..) {
        let LocatedChunk { decoded, size, mark, start, end } = located;
        let end = Place { stored: stored_end(&whole.ends, end), ..end };
        let too_big = |_| {
            let problem = format!("{size} bytes in {stored_size} stored ones");
            FormatError::new(("index of", layer), start.stored, problem)
        };
        chunks.push(Chunk {
            number,
            digest: *digest,
            stored: Stored(start.stored),
            stored_size: u32::try_from(end.stored - start.stored).map_err(too_big)?,
            decoded,
            decoded_size: size,
            part: None,
        });
        let Some(number) = mark.filter(|_| is_gzip) else { continue };
        let Mark { point, decoded: from } = &whole.marks[number];
        if last_mark != Some(number) {
            last_mark = Some(number);
            pieces.push(Piece {
                point: point.clone(),
                decoded: *from,
                stored_size: 0,
                decoded_size: 0,
                offsets: Vec::new(),
            });
        }
        if let Some(piece) = pieces.last_mut() {
            let way = end.stored - piece.point.stored.0;
            piece.stored_size = u32::try_from(way).map_err(too_big)?;
            // At most a unit, or it would be elsewhere.
            piece.decoded_size = (end.decoded - from) as u32;
            piece.offsets.push((start.decoded - from) as u32);
        }
    }
    let skeleton = whole.skeleton;
    Ok(LayerIndex { layer, stored_size, chunks, pieces, skeleton })
}

/// The stored end of a chunk. If it ends with a member, the trailer is included, which some readers
/// need.
fn stored_end(ends: &[(u64, u64)], end: Place) -> u64 {
    let at = ends.partition_point(|(decoded, _)| *decoded < end.decoded);
    match ends.get(at) {
        Some((decoded, stored)) if *decoded == end.decoded => *stored,
        _ => end.stored,
    }
}
