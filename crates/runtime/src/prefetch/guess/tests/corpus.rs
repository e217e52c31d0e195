//! Compares guesses for real images with the reads of their starts.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
};

use async_trait::async_trait;
use lazuli_builder::{Layer, LayerSource, Options, build};
use lazuli_image::{BlobIndex, Chunk, Decoded, Digest, rafs::Bootstrap};
use lazuli_testkit::kernel::{Feature, require};
use serde_json::Value;
use tokio::task::spawn_blocking;

use super::super::{Content, Piece, command::Process, guess};
use crate::{
    Cache, CachedBlob, Settings,
    keeper::Link,
    kernel::{
        fanotify,
        fanotify::Session,
        mount::{self, Suid},
    },
    source::Memory,
};

/// An OCI layout with one image.
struct Source(PathBuf);

impl Source {
    fn find(image: &'static str) -> Option<Self> {
        let corpus = require(Feature::Corpus(image)).then(|| std::env::var_os("LAZULI_CORPUS"));
        Some(Source(PathBuf::from(corpus??).join(image)))
    }

    fn blob(&self, descriptor: &Value) -> PathBuf {
        self.0.join("blobs").join(descriptor["digest"].as_str().unwrap().replace(':', "/"))
    }

    fn json(&self, descriptor: &Value) -> Value {
        serde_json::from_slice(&fs::read(self.blob(descriptor)).unwrap()).unwrap()
    }

    /// The image's config and its layers.
    fn open(&self) -> (Value, Vec<Layer>) {
        let index = fs::read(self.0.join("index.json")).unwrap();
        let index: Value = serde_json::from_slice(&index).unwrap();
        let manifest = self.json(&index["manifests"][0]);
        let layers = manifest["layers"].as_array().unwrap().iter().map(|layer| Layer {
            name: layer["digest"].to_string(),
            stored_size: layer["size"].as_u64(),
            source: LayerSource::Tar(Box::new(File::open(self.blob(layer)).unwrap())),
        });
        (self.json(&manifest["config"]), layers.collect())
    }
}

/// The files of an image, through its cache.
struct Cached {
    bootstrap: Bootstrap<Vec<u8>>,
    blobs: Vec<Arc<CachedBlob>>,
}

/// A chunk: its blob and its number there.
type Chunks = BTreeSet<(BlobIndex, u32)>;

impl Cached {
    fn chunk(&self, blob: BlobIndex, number: u32) -> &Chunk {
        self.bootstrap.blobs()[usize::from(blob.0)].chunk(number).unwrap()
    }

    fn stored_bytes<'a>(&self, chunks: impl IntoIterator<Item = &'a (BlobIndex, u32)>) -> u64 {
        let size = |(blob, number): &_| u64::from(self.chunk(*blob, *number).stored_size);
        chunks.into_iter().map(size).sum()
    }

    /// The chunks present.
    fn filled(&self) -> Chunks {
        let mut filled = Chunks::new();
        for (index, described) in (0..).map(BlobIndex).zip(self.bootstrap.blobs()) {
            let blob = &self.blobs[usize::from(index.0)];
            let is_there = |chunk: &&Chunk| blob.is_filled(&(chunk.decoded..chunk.decoded_end()));
            let there = described.chunks.iter().filter(is_there);
            filled.extend(there.map(|chunk| (index, chunk.number)));
        }
        filled
    }

    fn chunks_of(&self, piece: &Piece) -> Chunks {
        let size = u64::from(self.bootstrap.chunk_size());
        let first = (piece.range.start / size) as usize;
        let last = piece.range.end.div_ceil(size) as usize;
        let chunks = self.bootstrap.chunks(piece.file).unwrap().take(last).skip(first);
        chunks.map(|chunk| chunk.unwrap().0).map(|chunk| (chunk.blob, chunk.number)).collect()
    }
}

#[async_trait]
impl Content for Cached {
    async fn read(&self, piece: &Piece) -> Option<Vec<u8>> {
        let mut bytes = Vec::new();
        while let at = piece.range.start + bytes.len() as u64
            && at < piece.range.end
        {
            let extent = self.bootstrap.extent(piece.file, at).unwrap().unwrap();
            let blob = &self.blobs[usize::from(extent.blob.0)];
            let mut part = vec![0; extent.len.min(piece.range.end - at) as usize];
            let end = Decoded(extent.start.0 + part.len() as u64);
            blob.ensure(extent.start..end).await.unwrap();
            blob.file().read_exact_at(&mut part, extent.start.0).unwrap();
            bytes.extend(part);
        }
        Some(bytes)
    }
}

/// Runs the command of `config` on the image that is mounted at `root`.
fn start(config: &Value, root: &Path) {
    let process = Process::of(config);
    let texts = process.arguments.into_iter().map(|word| String::from_utf8(word).unwrap());
    let variables = config["config"]["Env"].as_array().unwrap().iter();
    let variables = variables.map(|variable| variable.as_str().unwrap().split_once('=').unwrap());
    let output = Command::new("chroot").arg(root).args(texts).env_clear().envs(variables).output();
    let output = output.unwrap();
    assert!(output.status.success() && output.stdout == b"hello\n", "{output:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn starts_of_real_images_are_foreseen() {
    if ![Feature::Root, Feature::Fanotify, Feature::ErofsFileBacked].into_iter().all(require) {
        return;
    }
    for image in ["busybox", "debian-slim", "lua"] {
        let Some(source) = Source::find(image) else { continue };
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let (config, layers) = source.open();
        let scratch = dir.path().to_owned();
        let built = spawn_blocking(|| build(layers, &Options::new(scratch), &()).unwrap());
        let built = built.await.unwrap();
        let settings = Settings { amplify: 0, ..Settings::default() };
        let cache = Cache::open(&dir.path().join("cache"), settings).unwrap();
        let blobs: Vec<_> = built
            .blobs
            .iter()
            .map(|blob| {
                let memory = Arc::new(Memory::new(fs::read(blob.file.as_ref().unwrap()).unwrap()));
                cache.blob(&blob.record.blob, memory).unwrap()
            })
            .collect();
        let path = dir.path().join("bootstrap");
        fs::write(&path, &built.bootstrap).unwrap();
        let root = dir.path().join("root");
        fs::create_dir(&root).unwrap();
        let session = Session::start(&Link::alone()).unwrap();
        drop(session.listen(Vec::new()).unwrap());
        let watch =
            |blob: &Arc<CachedBlob>| session.watch(blob.clone(), Digest::sha256([1; 32])).unwrap();
        let mut watches: Vec<_> = blobs.iter().map(watch).collect();
        let erofs = fanotify::mount(&path, &mut watches).unwrap();
        erofs.bind(&root, Suid::Keep).unwrap();
        let (at, what) = (root.clone(), config.clone());
        let started = spawn_blocking(move || start(&what, &at)).await;
        mount::detach(&root).unwrap();
        started.unwrap();

        let cached = Cached { bootstrap: Bootstrap::open(built.bootstrap).unwrap(), blobs };
        let touched = cached.filled();
        let mut guessed = Chunks::new();
        guess(&config, &cached.bootstrap, &cached, |pieces| {
            guessed.extend(pieces.iter().flat_map(|piece| cached.chunks_of(piece)));
        })
        .await;
        let missed: Vec<_> = touched.difference(&guessed).collect();
        assert!(missed.len() * 10 <= touched.len(), "{image}: {missed:?} of {touched:?}");
        let needed = cached.stored_bytes(&touched);
        assert!(cached.stored_bytes(missed) * 10 <= needed, "{image}: {needed} bytes");
        let extra = cached.stored_bytes(guessed.difference(&touched));
        assert!(extra * 5 <= needed, "{image}: {extra} bytes for nothing with {needed}");
    }
}
