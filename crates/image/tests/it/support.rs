//! A small builder: trees with content, and their blobs.

use std::collections::BTreeMap;

use lazuli_image::{
    Algorithm, Blob, BlobIndex, Chunk, ChunkRef, Codec, Decoded, Inode, InodeId, Kind, Metadata,
    Mtime, Name, Stored, Tree,
    chunk::Part,
    codec::Encoder,
    offset::round_up_to_block,
    rafs::{BlobRecord, Bootstrap, BootstrapOptions, Tail, blob_tail, write_bootstrap},
    tree::Device,
};

/// A blob that grows chunk by chunk.
pub(crate) struct BlobBuilder {
    pub(crate) codec: Codec,
    pub(crate) options: BootstrapOptions,
    pub(crate) stored: Vec<u8>,
    pub(crate) decoded: Vec<u8>,
    pub(crate) chunks: Vec<Chunk>,
}

/// A finished blob.
pub(crate) struct FinishedBlob {
    pub(crate) record: BlobRecord,
    pub(crate) tail: Tail,
    /// The blob as a registry would hold it.
    pub(crate) stored: Vec<u8>,
    /// The blob as the kernel reads it.
    pub(crate) decoded: Vec<u8>,
}

impl BlobBuilder {
    pub(crate) fn new(codec: Codec, options: BootstrapOptions) -> Self {
        BlobBuilder { codec, options, stored: vec![], decoded: vec![], chunks: vec![] }
    }

    /// Adds the chunks of a file with this content, without looking for equal ones.
    pub(crate) fn file(&mut self, blob: u8, content: &[u8]) -> Kind {
        let mut encoder = Encoder::new(self.codec, 3).unwrap();
        let chunks = content.chunks(self.options.chunk_size as usize).map(|piece| {
            let number = self.chunks.len() as u32;
            let stored = encoder.encode(piece).unwrap_or(piece);
            self.chunks.push(Chunk {
                number,
                digest: self.options.digest.digest(piece),
                stored: Stored(self.stored.len() as u64),
                stored_size: stored.len() as u32,
                decoded: Decoded(self.decoded.len() as u64),
                decoded_size: piece.len() as u32,
                part: None,
            });
            self.stored.extend_from_slice(stored);
            self.decoded.extend_from_slice(piece);
            let end = round_up_to_block(self.decoded.len() as u64).unwrap();
            self.decoded.resize(end as usize, 0);
            ChunkRef { blob: BlobIndex(blob), number }
        });
        Kind::Regular { size: content.len() as u64, chunks: chunks.collect() }
    }

    /// Adds files with these contents as one batch.
    pub(crate) fn batch(&mut self, blob: u8, contents: &[&[u8]]) -> Vec<Kind> {
        let joined = contents.concat();
        let mut encoder = Encoder::new(self.codec, 3).unwrap();
        let unit = encoder.encode(&joined).unwrap_or(&joined);
        let (stored, stored_size) = (Stored(self.stored.len() as u64), unit.len() as u32);
        self.stored.extend_from_slice(unit);
        let mut offset = 0;
        let file = |content: &&[u8]| {
            let number = self.chunks.len() as u32;
            self.chunks.push(Chunk {
                number,
                digest: self.options.digest.digest(content),
                stored,
                stored_size,
                decoded: Decoded(self.decoded.len() as u64),
                decoded_size: content.len() as u32,
                part: Some(Part { offset, size: joined.len() as u32 }),
            });
            offset += content.len() as u32;
            self.decoded.extend_from_slice(content);
            let end = round_up_to_block(self.decoded.len() as u64).unwrap();
            self.decoded.resize(end as usize, 0);
            let chunks = vec![ChunkRef { blob: BlobIndex(blob), number }];
            Kind::Regular { size: content.len() as u64, chunks }
        };
        contents.iter().map(file).collect()
    }

    pub(crate) fn finish(self) -> FinishedBlob {
        let mut hasher = Algorithm::Sha256.hasher();
        hasher.update(&self.stored);
        let tail = blob_tail(&self.chunks, hasher, self.codec).unwrap();
        let stored = [self.stored, tail.bytes.clone()].concat();
        assert_eq!(tail.id, Algorithm::Sha256.digest(&stored));
        let blob = Blob {
            id: tail.id,
            codec: self.codec,
            points: lazuli_image::Points::default(),
            stored_size: tail.stored_size,
            decoded_size: tail.decoded_size,
            chunks: self.chunks.into(),
        };
        assert_eq!(blob.stored_size, stored.len() as u64);
        assert_eq!(blob.decoded_size, self.decoded.len() as u64);
        FinishedBlob {
            record: BlobRecord { blob, tail: tail.info },
            tail,
            stored,
            decoded: self.decoded,
        }
    }
}

/// Adds `kind` under `parent`.
pub(crate) fn add(tree: &mut Tree, parent: InodeId, name: &[u8], kind: Kind) -> InodeId {
    let id = tree.add(Inode { metadata: metadata(0o644), kind });
    link(tree, parent, name, id);
    id
}

/// Gives `id` one more name.
pub(crate) fn link(tree: &mut Tree, parent: InodeId, name: &[u8], id: InodeId) {
    let name = Name::new(name).unwrap();
    tree.children_mut(parent).unwrap().insert(name, id);
}

pub(crate) fn metadata(permissions: u16) -> Metadata {
    let mtime = Mtime { seconds: 1_600_000_000, nanoseconds: 7 };
    Metadata { permissions, uid: 1000, gid: 70_000, mtime, xattrs: BTreeMap::new() }
}

/// Bytes that do not compress, the same every time.
pub(crate) fn noise(len: usize) -> Vec<u8> {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    })
    .take(len)
    .collect()
}

/// Chunks small enough that files of some KiB have several.
pub(crate) fn small_chunks() -> BootstrapOptions {
    BootstrapOptions { chunk_size: 0x4000, ..BootstrapOptions::default() }
}

/// An image with its blobs.
pub(crate) struct Sample {
    pub(crate) tree: Tree,
    pub(crate) blobs: Vec<FinishedBlob>,
    pub(crate) bootstrap: Vec<u8>,
}

/// One file of each type, with a directory of several blocks and data too big to follow its inode.
pub(crate) fn sample() -> Sample {
    build(Codec::Zstd, |tree| {
        let big = add(tree, Tree::ROOT, b"big", Kind::Directory(BTreeMap::new()));
        for number in 0..80_u8 {
            add(tree, big, &[b'a' + number % 26, number + 100].repeat(60), Kind::Fifo);
        }
        // Too much to follow its inode, though less than a block.
        let wide = add(tree, Tree::ROOT, b"wide", Kind::Directory(BTreeMap::new()));
        add(tree, wide, &[b'w'; 255], Kind::Fifo);
        let value = noise(4000).into_boxed_slice();
        tree[wide].metadata.xattrs.insert(b"user.big".as_slice().into(), value);
        let long = add(tree, Tree::ROOT, b"long", Kind::Symlink(vec![b'x'; 4095].into()));
        link(tree, Tree::ROOT, b"again", long);
    })
}

/// One small file of each type. Its bytes don't depend on the versions of the codecs.
pub(crate) fn small_sample() -> Sample {
    build(Codec::None, |_| {})
}

fn build(codec: Codec, more: impl FnOnce(&mut Tree)) -> Sample {
    let options = small_chunks();
    let mut blobs = [BlobBuilder::new(codec, options), BlobBuilder::new(codec, options)];
    let mut tree = Tree::new(Metadata {
        mtime: Mtime { seconds: -315_619_200, nanoseconds: 999_999_999 },
        ..metadata(0o755)
    });
    let root = Tree::ROOT;
    let directory = || Kind::Directory(BTreeMap::new());
    add(&mut tree, root, b"empty", Kind::Regular { size: 0, chunks: vec![] });
    let text = blobs[0].file(0, &b"lazy ".repeat(9000));
    let text = add(&mut tree, root, b"text", text);
    let raw = blobs[1].file(1, &noise(0x4000 + 5));
    add(&mut tree, root, b"noise", raw);
    let first = blobs[0].file(0, b"hello\n");
    let Kind::Regular { chunks: mut scattered, .. } = blobs[1].file(1, &[7; 0x8000]) else {
        unreachable!()
    };
    let Kind::Regular { chunks, .. } = &first else { unreachable!() };
    scattered.extend(chunks);
    add(&mut tree, root, b"hello", first);
    let scattered = Kind::Regular { size: 0x8006, chunks: scattered };
    add(&mut tree, root, b"scattered", scattered);
    let etc = add(&mut tree, root, b"etc", directory());
    tree[etc].metadata = metadata(0o1777);
    link(&mut tree, etc, b"same", text);
    add(&mut tree, etc, b"link", Kind::Symlink(b"../text".as_slice().into()));
    add(&mut tree, etc, b"null", Kind::CharDevice(Device { major: 1, minor: 3 }));
    add(&mut tree, etc, b"disk", Kind::BlockDevice(Device { major: 259, minor: 70_000 }));
    add(&mut tree, etc, b"pipe", Kind::Fifo);
    add(&mut tree, etc, b"socket", Kind::Socket);
    add(&mut tree, etc, b"!before the dots", directory());
    add(&mut tree, etc, b"caf\xe9 \x01", directory());
    more(&mut tree);
    let xattrs = &mut tree[text].metadata.xattrs;
    for (name, value) in [
        ("security.capability", &b"\x01\0\0\x02\0\x04\0\0\0\0\0\0\0\0\0\0\0\0\0\0"[..]),
        ("trusted.empty", b""),
        ("user.mime", b"text/plain"),
    ] {
        xattrs.insert(name.as_bytes().into(), value.into());
    }
    let blobs: Vec<FinishedBlob> = blobs.into_iter().map(BlobBuilder::finish).collect();
    let bootstrap = write_bootstrap(&tree, &records(&blobs), &options).unwrap();
    Sample { tree, blobs, bootstrap }
}

/// Small files in batches, and one file that a batch would not compress better.
pub(crate) fn batched_sample(codec: Codec) -> Sample {
    let options = small_chunks();
    let mut blobs = [BlobBuilder::new(codec, options), BlobBuilder::new(codec, options)];
    let mut tree = Tree::new(metadata(0o755));
    let mut put = |name: &str, kind: Kind| add(&mut tree, Tree::ROOT, name.as_bytes(), kind);
    let texts: Vec<Vec<u8>> =
        (0..5_usize).map(|n| format!("text {n} ").repeat(10 + n).into()).collect();
    let texts: Vec<&[u8]> = texts.iter().map(Vec::as_slice).collect();
    put("alone", blobs[0].file(0, &b"lazy ".repeat(9000)));
    for (number, kind) in blobs[0].batch(0, &texts).into_iter().enumerate() {
        put(&format!("first{number}"), kind);
    }
    // Two batches one behind the other; the second does not compress.
    let noise = noise(300);
    for (number, kind) in blobs[0].batch(0, &[&noise[..100], &noise[100..]]).into_iter().enumerate()
    {
        put(&format!("second{number}"), kind);
    }
    put("raw", blobs[0].file(0, &noise));
    put("other", blobs[1].file(1, b"in a blob without batches"));
    let blobs: Vec<FinishedBlob> = blobs.into_iter().map(BlobBuilder::finish).collect();
    let bootstrap = write_bootstrap(&tree, &records(&blobs), &options).unwrap();
    Sample { tree, blobs, bootstrap }
}

/// The same bootstrap as upstream writes it: without the places of chunks in batches.
pub(crate) fn without_places(bootstrap: &[u8]) -> Vec<u8> {
    let mut bootstrap = bootstrap.to_vec();
    // The extended superblock at 1152 has place and size of the chunk table at 24.
    let word = |at: usize| u64::from_le_bytes(bootstrap[at..at + 8].try_into().unwrap()) as usize;
    let (start, size) = (word(1152 + 24), word(1152 + 32));
    for row in bootstrap[start..start + size].chunks_exact_mut(80) {
        if row[36] & 8 != 0 {
            row[36] = 0;
            row[40..44].fill(0);
            row[48..56].fill(0);
            row[64..72].fill(0);
        }
    }
    bootstrap
}

pub(crate) fn records(blobs: &[FinishedBlob]) -> Vec<BlobRecord> {
    blobs.iter().map(|blob| blob.record.clone()).collect()
}

/// Every path with its inode and the first path of the same inode: equal for equal trees, whatever
/// the order in which inodes were added.
pub(crate) fn flatten(tree: &Tree) -> BTreeMap<Vec<u8>, (Inode, Vec<u8>)> {
    let mut first: BTreeMap<InodeId, Vec<u8>> = BTreeMap::new();
    let mut paths = BTreeMap::from([(Vec::new(), Tree::ROOT)]);
    let mut pending = vec![(Vec::new(), Tree::ROOT)];
    while let Some((path, id)) = pending.pop() {
        for (name, &child) in tree.children(id).into_iter().flatten() {
            let path = [&path[..], b"/", name.as_bytes()].concat();
            paths.insert(path.clone(), child);
            pending.push((path, child));
        }
    }
    for (path, id) in &paths {
        first.entry(*id).or_insert_with(|| path.clone());
    }
    let strip = |id: InodeId| {
        let mut inode = tree[id].clone();
        if let Kind::Directory(children) = &mut inode.kind {
            children.clear();
        }
        inode
    };
    paths.into_iter().map(|(path, id)| (path, (strip(id), first[&id].clone()))).collect()
}

/// Compares what a reader shows of a file with the digests of its chunks, of 16 KiB each.
pub(crate) fn assert_chunks(
    bootstrap: &Bootstrap<&[u8]>,
    chunks: &[ChunkRef],
    content: &[u8],
    shown: &str,
) {
    assert_eq!(content.len().div_ceil(0x4000), chunks.len(), "{shown}");
    for (piece, chunk) in content.chunks(0x4000).zip(chunks) {
        let blob = &bootstrap.blobs()[usize::from(chunk.blob.0)];
        assert!(blob.chunk(chunk.number).unwrap().digest.matches(piece), "{shown}");
    }
}
