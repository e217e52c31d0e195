//! Images of RAFS v5, as upstream wrote them before EROFS.

use std::collections::HashMap;

use lazuli_image::{
    Algorithm, Blob, ChunkRef, Codec, Digest, Inode, InodeId, Kind, Tree, rafs::BootstrapOptions,
};

const SUPERBLOCK: u64 = 8192;
const INODE: usize = 128;

/// The v5 bootstrap of `tree`, whose files consist of chunks of `blobs`. Only chunks in use are in
/// it, and decoded chunks lie one behind the other without gaps.
///
/// # Panics
/// When a file has a chunk that no blob has, or `blobs` is empty.
pub fn write(tree: &Tree, blobs: &[Blob], options: &BootstrapOptions) -> Vec<u8> {
    let names = names(tree);
    let inodes = SUPERBLOCK + (names.len() as u64 * 4).next_multiple_of(8);
    let blob_table = blob_table(blobs);
    let extended = inodes + blob_table.len() as u64;
    let mut at = extended + blobs.len() as u64 * 64;
    let mut table = Vec::new();
    let mut body = Vec::new();
    let rows = names.iter().enumerate().rev();
    let numbers = rows.map(|(row, named)| (named.id, row as u64 + 1)).collect();
    let writer = Writer { tree, blobs, options, names: &names, numbers };
    for row in 0..names.len() {
        let inode = writer.inode(row);
        table.extend(((at / 8) as u32).to_le_bytes());
        at += inode.len() as u64;
        body.extend(inode);
    }
    pad(&mut table);

    let codec = match blobs[0].codec {
        Codec::None => 0x1,
        Codec::Lz4 => 0x2,
        Codec::Gzip | Codec::ZstdLayer => 0x40,
        Codec::Zstd => 0x80,
    };
    let digest = match options.digest {
        Algorithm::Blake3 => 0x4,
        Algorithm::Sha256 => 0x8,
    };
    let mut image = b"SFAR".to_vec();
    words(&mut image, &[0x500, SUPERBLOCK as u32, options.chunk_size]);
    let inode_count = writer.numbers.len() as u64;
    long_words(&mut image, &[codec | digest | 0x10, inode_count, SUPERBLOCK, inodes, inodes]);
    words(&mut image, &[names.len() as u32, 0, blob_table.len() as u32, blobs.len() as u32]);
    long_words(&mut image, &[extended]);
    image.resize(SUPERBLOCK as usize, 0);
    image.extend(table);
    image.extend(blob_table);
    for blob in blobs {
        words(&mut image, &[blob.chunks.len() as u32, 0x4000_0000]);
        let decoded = blob.chunks.iter().map(|chunk| u64::from(chunk.decoded_size)).sum();
        long_words(&mut image, &[decoded, blob.stored_size, 0, 0, 0, 0, 0]);
    }
    image.extend(body);
    image
}

/// A row of the inode table.
struct Named<'a> {
    id: InodeId,
    parent: usize,
    name: &'a [u8],
    first_child: usize,
}

/// All names; those of one directory are together.
fn names(tree: &Tree) -> Vec<Named<'_>> {
    let mut names = vec![Named { id: Tree::ROOT, parent: 0, name: b"/", first_child: 0 }];
    let mut row = 0;
    while row < names.len() {
        names[row].first_child = names.len() + 1;
        for (name, id) in tree.children(names[row].id).into_iter().flatten() {
            names.push(Named { id: *id, parent: row, name: name.as_bytes(), first_child: 0 });
        }
        row += 1;
    }
    names
}

fn blob_table(blobs: &[Blob]) -> Vec<u8> {
    let mut table = Vec::new();
    for (index, blob) in blobs.iter().enumerate() {
        if index > 0 {
            table.push(0);
        }
        words(&mut table, &[0, 0]);
        table.extend(blob.id.hex().as_bytes());
    }
    pad(&mut table);
    table
}

struct Writer<'a> {
    tree: &'a Tree,
    blobs: &'a [Blob],
    options: &'a BootstrapOptions,
    names: &'a [Named<'a>],
    /// The row of the first name of each inode.
    numbers: HashMap<InodeId, u64>,
}

impl Writer<'_> {
    /// The inode of a name, with its data.
    fn inode(&self, row: usize) -> Vec<u8> {
        let named = &self.names[row];
        let Inode { metadata, kind } = &self.tree[named.id];
        let numbers = &self.numbers;
        let parent = if row == 0 { 0 } else { numbers[&self.names[named.parent].id] };
        let xattrs = xattrs(metadata.xattrs.iter());
        let (mut size, mut children, mut target, mut device) = (0, 0, &b""[..], 0);
        let mut content = Vec::new();
        match kind {
            Kind::Directory(entries) => children = entries.len(),
            Kind::Regular { size: bytes, chunks } => {
                size = *bytes;
                children = chunks.len();
                for (at, chunk) in chunks.iter().enumerate() {
                    self.chunk(at, *chunk, &mut content);
                }
            }
            Kind::Symlink(to) => (size, target) = (to.len() as u64, to),
            Kind::CharDevice(number) | Kind::BlockDevice(number) => device = number.encode(),
            Kind::Fifo | Kind::Socket => {}
        }
        let links = self.names.iter().filter(|other| other.id == named.id).count();

        let mut inode = vec![0; 32];
        long_words(&mut inode, &[parent, numbers[&named.id]]);
        let mode = kind.mode() | metadata.permissions;
        words(&mut inode, &[metadata.uid, metadata.gid, 0, mode.into()]);
        let flags = if xattrs.is_empty() { 0 } else { 4 };
        long_words(&mut inode, &[size, size.div_ceil(512), flags]);
        words(&mut inode, &[links as u32, named.first_child as u32, children as u32]);
        inode.extend((named.name.len() as u16).to_le_bytes());
        inode.extend((target.len() as u16).to_le_bytes());
        words(&mut inode, &[device, metadata.mtime.nanoseconds]);
        long_words(&mut inode, &[metadata.mtime.seconds.cast_unsigned(), 0]);
        assert_eq!(inode.len(), INODE);
        for piece in [named.name, target, &xattrs, &content] {
            inode.extend(piece);
            pad(&mut inode);
        }
        inode
    }

    fn chunk(&self, at: usize, chunk: ChunkRef, out: &mut Vec<u8>) {
        let blob = &self.blobs[usize::from(chunk.blob.0)];
        let found = blob.chunk(chunk.number).expect("a chunk of the blob");
        let before = blob.chunks.iter().take_while(|other| other.number < chunk.number);
        let decoded = before.map(|chunk| u64::from(chunk.decoded_size)).sum();
        let Digest { hash, .. } = found.digest;
        out.extend(hash);
        let compressed = u32::from(found.is_compressed());
        words(out, &[chunk.blob.0.into(), compressed, found.stored_size, found.decoded_size]);
        let file_offset = at as u64 * u64::from(self.options.chunk_size);
        long_words(out, &[found.stored.0, decoded, file_offset]);
        words(out, &[chunk.number, 0]);
    }
}

fn xattrs<'a>(pairs: impl Iterator<Item = (&'a Box<[u8]>, &'a Box<[u8]>)>) -> Vec<u8> {
    let mut content = Vec::new();
    for (name, value) in pairs {
        words(&mut content, &[(name.len() + 1 + value.len()) as u32]);
        content.extend([name, &b"\0"[..], value].concat());
    }
    if content.is_empty() {
        return content;
    }
    [&(content.len() as u64).to_le_bytes(), &content[..]].concat()
}

fn pad(bytes: &mut Vec<u8>) {
    bytes.resize(bytes.len().next_multiple_of(8), 0);
}

fn words(out: &mut Vec<u8>, words: &[u32]) {
    out.extend(words.iter().flat_map(|word| word.to_le_bytes()));
}

fn long_words(out: &mut Vec<u8>, words: &[u64]) {
    out.extend(words.iter().flat_map(|word| word.to_le_bytes()));
}
