//! Lessons: which files starts read, by paths and chunk digests that hold for other images too.
//!
//! A trace names chunks by blob and number, which change with the next version of an image. A
//! lesson names them by file and by content, so it holds for the next version, and for a rebuilt
//! base. Like a trace, it is only a hint. As bytes (integers are LEB128 of at most 32 bits):
//!
//! ```text
//! "lazuli trace 2\n"
//! starts                             recorded starts, 1 to 16
//! files                              number of files, then for each, in ascending order of paths:
//!   shared                           bytes that its path has in common with the one before
//!   rest                             number of further bytes, then these
//! chunks, to the end:
//!   file                             position in the list above
//!   number                           which chunk of the file, from 0
//!   digest                           the first 8 bytes of the digest of the decoded chunk
//!   milliseconds                     since the chunk before, from the first touch on
//!   starts                           in which it was touched
//! ```

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use crate::{
    Digest, FormatError,
    leb128::{Reader, write},
};

const MAGIC: &[u8] = b"lazuli trace 2\n";

/// Maximum size of an encoded lesson, in bytes: 64 KiB as base64, as of a trace.
pub const MAX_BYTES: usize = 48 << 10;

/// Maximum number of chunks. Those touched last are left out.
pub const MAX_CHUNKS: usize = 8192;

/// Maximum size of a path in bytes, as in Linux.
const MAX_PATH: u32 = 4096;

/// Starts after which older ones begin to count less.
const MAX_STARTS: u32 = 16;

/// A chunk is hot when at least one in this many starts touched it.
const HOT: u32 = 4;

/// The beginning of a chunk's digest. Two chunks that have it in common cost bytes at most.
pub type Mark = [u8; 8];

/// The mark of a digest.
pub fn mark(digest: &Digest) -> Mark {
    let [a, b, c, d, e, f, g, h, ..] = digest.hash;
    [a, b, c, d, e, f, g, h]
}

/// A chunk of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileChunk {
    /// The path of the file from the root, without a slash before it.
    pub path: Arc<[u8]>,
    /// The chunk's number in the file.
    pub number: u32,
    /// The beginning of its digest.
    pub mark: Mark,
    /// Milliseconds from the first touch of the start to this one.
    pub at: u32,
    /// Recorded starts in which it was touched, at least 1.
    pub starts: u32,
}

/// The reads of starts of related images.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lesson {
    starts: u32,
    chunks: Vec<FileChunk>,
}

impl Lesson {
    /// A lesson of one start from the chunks that it touched, in order.
    pub fn of_start(touched: impl IntoIterator<Item = FileChunk>) -> Self {
        let chunks = touched.into_iter().filter(|chunk| chunk.path.len() <= MAX_PATH as usize);
        let mut chunks: Vec<_> = chunks.map(|chunk| FileChunk { starts: 1, ..chunk }).collect();
        chunks.sort_by_key(|chunk| chunk.at);
        chunks.truncate(MAX_CHUNKS);
        Lesson { starts: 1, chunks }
    }

    /// Starts that were recorded.
    pub fn starts(&self) -> u32 {
        self.starts
    }

    /// All chunks that were touched, the first one first.
    pub fn chunks(&self) -> &[FileChunk] {
        &self.chunks
    }

    /// The chunks that the next start will most likely touch: those of at least a quarter of the
    /// starts, in order.
    pub fn hot(&self) -> impl Iterator<Item = &FileChunk> {
        self.chunks.iter().filter(|chunk| chunk.starts * HOT >= self.starts)
    }

    /// Merges a later lesson. Chunks that later starts no longer read fade out.
    pub fn merge(&mut self, later: &Lesson) {
        let mut known: HashMap<(Arc<[u8]>, u32), FileChunk> = HashMap::new();
        for chunk in self.chunks.drain(..) {
            known.insert((chunk.path.clone(), chunk.number), chunk);
        }
        for chunk in &later.chunks {
            let key = (chunk.path.clone(), chunk.number);
            let known =
                known.entry(key).or_insert_with(|| FileChunk { starts: 0, ..chunk.clone() });
            known.starts += chunk.starts;
            known.at = known.at.min(chunk.at);
            known.mark = chunk.mark;
        }
        self.starts += later.starts;
        while self.starts > MAX_STARTS {
            self.starts /= 2;
            known.values_mut().for_each(|chunk| chunk.starts /= 2);
            known.retain(|_, chunk| chunk.starts > 0);
        }
        let most = self.starts;
        let chunks =
            known.into_values().map(|chunk| FileChunk { starts: chunk.starts.min(most), ..chunk });
        self.chunks = chunks.collect();
        self.chunks.sort_by(|a, b| (a.at, &a.path, a.number).cmp(&(b.at, &b.path, b.number)));
        self.chunks.truncate(MAX_CHUNKS);
    }

    /// Encodes the lesson in at most [`MAX_BYTES`] bytes. If it is too long, it leaves out the
    /// chunks touched last.
    pub fn encode(&self) -> Vec<u8> {
        let mut count = self.chunks.len();
        loop {
            let bytes = self.encode_first(count);
            if bytes.len() <= MAX_BYTES {
                return bytes;
            }
            count = (count * MAX_BYTES / bytes.len()).min(count - 1);
        }
    }

    fn encode_first(&self, count: usize) -> Vec<u8> {
        let chunks = &self.chunks[..count];
        let files: BTreeSet<&[u8]> = chunks.iter().map(|chunk| &*chunk.path).collect();
        let numbers: HashMap<&[u8], u32> = files.iter().copied().zip(0..).collect();
        let mut bytes = MAGIC.to_vec();
        write(&mut bytes, self.starts);
        write(&mut bytes, files.len() as u32);
        let mut before: &[u8] = b"";
        for path in files {
            let shared = before.iter().zip(path).take_while(|(a, b)| a == b).count();
            write(&mut bytes, shared as u32);
            write(&mut bytes, (path.len() - shared) as u32);
            bytes.extend_from_slice(&path[shared..]);
            before = path;
        }
        let mut now = 0;
        for chunk in chunks {
            write(&mut bytes, numbers[&*chunk.path]);
            write(&mut bytes, chunk.number);
            bytes.extend_from_slice(&chunk.mark);
            write(&mut bytes, chunk.at.saturating_sub(now));
            write(&mut bytes, chunk.starts);
            now = chunk.at.max(now);
        }
        bytes
    }

    /// Decodes the output of [`Lesson::encode`].
    ///
    /// # Errors
    /// If the bytes are something else, with the place and what was expected there.
    pub fn decode(bytes: &[u8]) -> Result<Self, FormatError> {
        let mut reader = Reader::new("lesson", bytes);
        if bytes.len() > MAX_BYTES {
            let problem = format!("{} bytes, at most {MAX_BYTES} are allowed", bytes.len());
            return Err(reader.error(problem));
        }
        if !bytes.starts_with(MAGIC) {
            return Err(reader.error("does not begin with `lazuli trace 2`"));
        }
        reader.take(MAGIC.len())?;
        let starts = reader.number(1, MAX_STARTS, "starts")?;
        let paths = read_paths(&mut reader)?;
        let mut chunks = Vec::new();
        let mut now = 0_u32;
        while !reader.is_empty() {
            if paths.is_empty() {
                return Err(reader.error("a chunk without a file"));
            }
            if chunks.len() == MAX_CHUNKS {
                return Err(reader.error(format!("more than {MAX_CHUNKS} chunks")));
            }
            let file = reader.number(0, paths.len() as u32 - 1, "file of a chunk")? as usize;
            let number = reader.number(0, u32::MAX, "number of a chunk")?;
            let mark = *reader.array()?;
            let wait = reader.number(0, u32::MAX, "milliseconds of a chunk")?;
            now = now.checked_add(wait).ok_or_else(|| reader.error("milliseconds of a chunk"))?;
            let starts = reader.number(1, starts, "starts of a chunk")?;
            chunks.push(FileChunk { path: paths[file].clone(), number, mark, at: now, starts });
        }
        Ok(Lesson { starts, chunks })
    }
}

/// Limit on the total length of all paths in bytes. Prefix compression would allow paths a thousand
/// times longer than their stored form.
const PATHS: usize = 1 << 20;

fn read_paths(reader: &mut Reader<'_>) -> Result<Vec<Arc<[u8]>>, FormatError> {
    let count = reader.number(0, MAX_CHUNKS as u32, "files")?;
    let mut paths: Vec<Arc<[u8]>> = Vec::new();
    let mut bytes = 0;
    for _ in 0..count {
        let before = paths.last().map(|path| &**path).unwrap_or_default();
        let shared = reader.number(0, before.len() as u32, "shared bytes of a path")?;
        let rest = reader.number(0, MAX_PATH - shared, "further bytes of a path")?;
        let path = [&before[..shared as usize], reader.take(rest as usize)?].concat();
        bytes += path.len();
        if bytes > PATHS {
            return Err(reader.error(format!("more than {PATHS} bytes of paths")));
        }
        paths.push(path.into());
    }
    Ok(paths)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn chunk(path: &str, number: u32, at: u32) -> FileChunk {
        FileChunk { path: path.as_bytes().into(), number, mark: [at as u8; 8], at, starts: 1 }
    }

    fn lesson(chunks: &[(&str, u32)]) -> Lesson {
        Lesson::of_start(chunks.iter().map(|(path, at)| chunk(path, 0, *at)))
    }

    #[test]
    fn paths_are_stored_once_and_without_what_they_share() {
        let chunks =
            [chunk("usr/lib/a.so", 0, 0), chunk("usr/lib/a.so", 1, 2), chunk("usr/lib/b", 0, 9)];
        let lesson = Lesson::of_start(chunks);
        let bytes = lesson.encode();
        assert_eq!(bytes.len(), MAGIC.len() + 2 + (2 + 12) + (2 + 1) + 3 * 12);
        assert_eq!(Lesson::decode(&bytes).unwrap(), lesson);
    }

    #[test]
    fn paths_that_later_starts_skip_fade() {
        let mut known = lesson(&[("old", 0), ("both", 1)]);
        for _ in 0..3 {
            known.merge(&lesson(&[("both", 5), ("new", 6)]));
        }
        let hot =
            |lesson: &Lesson| -> Vec<_> { lesson.hot().map(|chunk| chunk.path.to_vec()).collect() };
        assert_eq!(hot(&known), [&b"old"[..], b"both", b"new"]);
        known.merge(&lesson(&[("both", 5)]));
        assert_eq!(hot(&known), [&b"both"[..], b"new"]);
        for _ in 0..100 {
            known.merge(&lesson(&[("both", 5)]));
        }
        assert!(known.starts() <= MAX_STARTS);
        assert_eq!(known.chunks().len(), 1);
        assert_eq!(known.chunks()[0].mark, [5; 8], "the latest content counts");
    }

    #[test]
    fn the_last_touches_are_left_out_of_a_full_trace() {
        let chunks = (0..MAX_CHUNKS as u32 + 9).map(|at| chunk(&format!("{at:x}"), 0, at));
        let lesson = Lesson::of_start(chunks);
        let read = Lesson::decode(&lesson.encode()).unwrap();
        assert!(read.chunks().len() > 2000);
        assert_eq!(read.chunks(), &lesson.chunks()[..read.chunks().len()]);
    }

    #[test]
    fn damage_is_named() {
        let good = lesson(&[("a", 0), ("b", 9)]).encode();
        let first = MAGIC.len();
        let at = |offset: usize, byte: u8| {
            let mut bytes = good.clone();
            bytes[offset] = byte;
            bytes
        };
        for (bytes, expected) in [
            (at(0, b'L'), "does not begin"),
            (at(first, 17), "starts: 17, expected 1 to 16"),
            (at(first + 2, 1), "shared bytes of a path: 1, expected 0 to 0"),
            (at(first + 8, 2), "file of a chunk: 2, expected 0 to 1"),
            (at(first + 19, 2), "starts of a chunk: 2, expected 1 to 1"),
            (good[..good.len() - 1].to_vec(), "ends too early"),
            ([MAGIC, &[1, 0, 0]].concat(), "a chunk without a file"),
            (vec![0; MAX_BYTES + 1], "at most"),
        ] {
            let error = Lesson::decode(&bytes).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}, expected {expected}");
        }
    }

    proptest! {
        #[test]
        fn parsed_lessons_survive_a_round_trip(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(lesson) = Lesson::decode(&[MAGIC, &bytes].concat()) {
                let again = Lesson::decode(&lesson.encode()).unwrap();
                prop_assert_eq!(again, lesson);
            }
        }
    }
}
