//! Small images to serve.

use std::{
    collections::BTreeMap,
    fmt, fs,
    ops::Range,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

use async_trait::async_trait;
use bytes::Bytes;
use lazuli_image::{
    Algorithm, BlobIndex, Chunk, ChunkRef, Codec, Decoded, Inode, Kind, Metadata, Name, Stored,
    Tree,
    codec::Encoder,
    offset::round_up_to_block,
    rafs::{BlobRecord, BootstrapOptions, blob_tail, write_bootstrap},
};
use lazuli_runtime::source::{BlobSource, Progress, SourceError};

/// Bytes per chunk of these images.
pub(crate) const CHUNK: usize = 64 << 10;

/// An image with all files in its root directory.
pub(crate) struct Sample {
    pub(crate) files: BTreeMap<String, Vec<u8>>,
    pub(crate) blobs: Vec<BlobRecord>,
    pub(crate) stored: Vec<Bytes>,
    pub(crate) bootstrap: Vec<u8>,
}

impl Sample {
    /// Puts each file into the blob given with it; blobs are numbered from 0 without gaps.
    pub(crate) fn new(files: Vec<(String, usize, Vec<u8>)>) -> Self {
        Self::with(files, |_| {})
    }

    /// The same, with a tree that is changed before it becomes an image.
    pub(crate) fn with(
        files: Vec<(String, usize, Vec<u8>)>,
        change: impl FnOnce(&mut Tree),
    ) -> Self {
        let count = files.iter().map(|(_, blob, _)| blob + 1).max().unwrap_or_default();
        let mut packs: Vec<Pack> = (0..count).map(|_| Pack::default()).collect();
        let mut tree = Tree::new(Metadata { permissions: 0o755, ..Metadata::default() });
        let mut encoder = Encoder::new(Codec::Zstd, 1).unwrap();
        for (name, blob, content) in &files {
            let chunks = content.chunks(CHUNK).map(|chunk| ChunkRef {
                blob: BlobIndex(*blob as u8),
                number: packs[*blob].push(chunk, &mut encoder),
            });
            let kind = Kind::Regular { size: content.len() as u64, chunks: chunks.collect() };
            let metadata = Metadata { permissions: 0o755, ..Metadata::default() };
            let inode = tree.add(Inode { metadata, kind });
            let root = tree.children_mut(Tree::ROOT).unwrap();
            root.insert(Name::new(name.as_bytes()).unwrap(), inode);
        }
        change(&mut tree);
        let (blobs, stored): (Vec<_>, Vec<_>) = packs.into_iter().map(Pack::finish).unzip();
        let options = BootstrapOptions { chunk_size: CHUNK as u32, ..BootstrapOptions::default() };
        let bootstrap = write_bootstrap(&tree, &blobs, &options).unwrap();
        let files = files.into_iter().map(|(name, _, content)| (name, content)).collect();
        Sample { files, blobs, stored, bootstrap }
    }

    pub(crate) fn write_bootstrap(&self, dir: &Path) -> PathBuf {
        let path = dir.join("image.boot");
        fs::write(&path, &self.bootstrap).unwrap();
        path
    }

    /// Compares every file below `dir` with its expected bytes.
    pub(crate) fn compare(&self, dir: &Path) {
        for (name, content) in &self.files {
            assert!(fs::read(dir.join(name)).unwrap() == *content, "{name}");
        }
    }
}

#[derive(Default)]
struct Pack {
    stored: Vec<u8>,
    decoded: u64,
    chunks: Vec<Chunk>,
}

impl Pack {
    fn push(&mut self, content: &[u8], encoder: &mut Encoder) -> u32 {
        let number = self.chunks.len() as u32;
        let bytes = encoder.encode(content).unwrap_or(content);
        self.chunks.push(Chunk {
            number,
            digest: Algorithm::Blake3.digest(content),
            stored: Stored(self.stored.len() as u64),
            stored_size: bytes.len() as u32,
            decoded: Decoded(self.decoded),
            decoded_size: content.len() as u32,
            part: None,
        });
        self.stored.extend(bytes);
        self.decoded += round_up_to_block(content.len() as u64).unwrap();
        number
    }

    fn finish(mut self) -> (BlobRecord, Bytes) {
        let mut hasher = Algorithm::Sha256.hasher();
        hasher.update(&self.stored);
        let tail = blob_tail(&self.chunks, hasher, Codec::Zstd).unwrap();
        self.stored.extend(tail.bytes);
        let blob = lazuli_image::Blob {
            id: tail.id,
            codec: Codec::Zstd,
            points: lazuli_image::Points::default(),
            stored_size: tail.stored_size,
            decoded_size: tail.decoded_size,
            chunks: self.chunks.into(),
        };
        (BlobRecord { blob, tail: tail.info }, self.stored.into())
    }
}

/// A blob whose bytes and behaviour a test can change.
pub(crate) struct Moody {
    bytes: Bytes,
    mood: Mutex<Mood>,
}

/// The behaviour of a [`Moody`] source.
#[derive(Clone, Debug)]
pub(crate) enum Mood {
    Good,
    /// All bytes are wrong.
    Wrong,
    /// It panics.
    Panic,
    /// It answers once a permit is available.
    Blocked(Arc<tokio::sync::Semaphore>),
}

impl Moody {
    pub(crate) fn new(bytes: Bytes, mood: Mood) -> Arc<Self> {
        Arc::new(Moody { bytes, mood: Mutex::new(mood) })
    }

    pub(crate) fn set(&self, mood: Mood) {
        *self.mood.lock().unwrap() = mood;
    }
}

#[async_trait]
impl BlobSource for Moody {
    async fn read(
        &self,
        range: Range<Stored>,
        _arrived: Progress<'_>,
    ) -> Result<Bytes, SourceError> {
        let mood = self.mood.lock().unwrap().clone();
        let bytes = self.bytes.slice(range.start.0 as usize..range.end.0 as usize);
        match mood {
            Mood::Good => Ok(bytes),
            Mood::Wrong => Ok(bytes.iter().map(|byte| !byte).collect()),
            Mood::Panic => panic!("this test makes a source panic"),
            Mood::Blocked(gate) => {
                let _permit = gate.acquire().await.unwrap();
                Ok(bytes)
            }
        }
    }

    fn describe(&self) -> String {
        "a moody source".to_owned()
    }
}

impl fmt::Debug for Moody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Moody").field("mood", &self.mood).finish_non_exhaustive()
    }
}
