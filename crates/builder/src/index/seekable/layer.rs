//! Reads the table of contents of one layer.

use lazuli_image::{
    FormatError, Metadata, Stored,
    rafs::{BlobRecord, seekable_layer},
    seekable::{TocEntry, TocKind, read_toc},
    tree::Device,
};

use super::{
    super::memory::Share,
    LayerToc,
    pieces::{File, Pieces},
};
use crate::{
    entry::{Entry, EntryKind, EntryPath, InvalidPath},
    error::BuildError,
    whiteout,
};

/// Files that the formats themselves put in the root of a layer.
const LANDMARK: &[u8] = b".prefetch.landmark";
const NO_LANDMARK: &[u8] = b".no.prefetch.landmark";
const TOC: &[u8] = b"stargz.index.json";

/// The content of a layer's table.
pub(super) struct Read {
    /// Chunks are in `BlobIndex(number)`.
    pub(super) entries: Vec<Entry>,
    pub(super) record: BlobRecord,
    /// Place of the landmark: a start reads the content stored before it. `None` without one.
    pub(super) landmark: Option<Stored>,
    /// The largest power of two of which all chunks have a multiple in bytes, but for the last of
    /// each file.
    pub(super) divisor: u32,
}

/// Memory of a piece of a file: as it is read, and as a chunk.
const PIECE: u64 = 256;

/// Reads layer `number`.
pub(super) fn read(toc: &LayerToc, number: u8, memory: &mut Share<'_>) -> Result<Read, BuildError> {
    let LayerToc { layer, toc, end } = toc;
    let mut reader = Reader {
        number,
        has_landmarks: layer.has_landmarks(),
        entries: Vec::new(),
        open: None,
        pieces: Pieces::default(),
        landmark: None,
        memory,
    };
    let failed =
        |problem: String| FormatError::new(("table of contents of", layer.digest), 0, problem);
    read_toc(toc, layer.digest, |entry| reader.entry(entry))?;
    reader.close().map_err(failed)?;
    let Reader { mut entries, pieces, landmark, .. } = reader;
    let divisor = pieces.divisor();
    let (chunks, numbers) = pieces.into_chunks(*end).map_err(failed)?;
    for entry in &mut entries {
        if let EntryKind::Regular { chunks, .. } = &mut entry.kind {
            chunks.iter_mut().for_each(|chunk| chunk.number = numbers[chunk.number as usize]);
        }
    }
    let record = seekable_layer(layer.digest, layer.size, layer.codec(), chunks)?;
    Ok(Read { entries, record, landmark, divisor })
}

struct Reader<'a, 'm> {
    number: u8,
    has_landmarks: bool,
    entries: Vec<Entry>,
    /// The last entry, if it is a file that may have more pieces.
    open: Option<File>,
    pieces: Pieces,
    landmark: Option<Stored>,
    memory: &'a mut Share<'m>,
}

impl Reader<'_, '_> {
    fn entry(&mut self, entry: &TocEntry<'_>) -> Result<(), String> {
        let kind = entry.kind.ok_or("it has no type")?;
        if kind == TocKind::Chunk {
            let file = self.open.as_mut().ok_or("a piece of no file")?;
            return file.add(entry);
        }
        self.close()?;
        let path = match EntryPath::parse(entry.name.as_bytes()) {
            Err(InvalidPath::Empty) => EntryPath::default(),
            path => path.map_err(|problem| problem.to_string())?,
        };
        match path.as_bytes() {
            _ if !self.has_landmarks => {}
            LANDMARK => {
                self.landmark = Some(Stored(entry.offset));
                return Ok(());
            }
            NO_LANDMARK | TOC => return Ok(()),
            _ => {}
        }
        let hidden = whiteout::hidden(&path).transpose()?;
        let (path, kind) = match hidden {
            Some(hidden) => hidden,
            None => (path, kind_of(entry, kind)?),
        };
        if let EntryKind::Regular { size, .. } = kind {
            let mut file = File::new(size, entry);
            file.add(entry)?;
            self.open = Some(file);
        }
        let metadata = metadata(entry)?;
        let entry = Entry { path, offset: 0, metadata, kind };
        self.memory.take_entry(&entry).map_err(|error| error.to_string())?;
        self.entries.push(entry);
        Ok(())
    }

    /// Adds the pieces of the last file.
    fn close(&mut self) -> Result<(), String> {
        let Some(file) = self.open.take() else { return Ok(()) };
        let Some(Entry { path, kind: EntryKind::Regular { chunks, .. }, .. }) =
            self.entries.last_mut()
        else {
            return Ok(());
        };
        let added = self.pieces.add(file, self.number);
        *chunks = added.map_err(|problem| format!("`{path}`: {problem}"))?;
        self.memory.take(PIECE * chunks.len() as u64).map_err(|error| error.to_string())?;
        Ok(())
    }
}

fn kind_of(entry: &TocEntry<'_>, kind: TocKind) -> Result<EntryKind, String> {
    let link = entry.link_name.as_bytes();
    let device = || Device { major: entry.dev_major, minor: entry.dev_minor };
    Ok(match kind {
        TocKind::Dir => EntryKind::Directory,
        TocKind::Reg | TocKind::Chunk => {
            EntryKind::Regular { size: entry.size, chunks: Vec::new() }
        }
        TocKind::Symlink => {
            if !(1..EntryPath::MAX).contains(&link.len()) || link.contains(&0) {
                let bytes = link.len();
                return Err(format!(
                    "a symbolic link to {bytes} bytes, expected 1 to 4095 without NUL"
                ));
            }
            EntryKind::Symlink(link.into())
        }
        TocKind::Hardlink => {
            let target = EntryPath::parse(link);
            let target = target.map_err(|problem| {
                format!("hard link target `{}`: {problem}", link.escape_ascii())
            })?;
            EntryKind::HardLink(target)
        }
        TocKind::Char => EntryKind::CharDevice(device()),
        TocKind::Block => EntryKind::BlockDevice(device()),
        TocKind::Fifo => EntryKind::Fifo,
    })
}

fn metadata(entry: &TocEntry<'_>) -> Result<Metadata, String> {
    Ok(Metadata {
        permissions: (entry.mode & 0o7777) as u16,
        uid: entry.uid,
        gid: entry.gid,
        mtime: entry.mtime().ok_or("its time is none of RFC 3339")?,
        xattrs: entry.xattrs().ok_or("a value of its extended attributes is not base64")?,
    })
}
