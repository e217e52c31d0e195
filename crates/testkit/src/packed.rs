//! Images made straight from a directory, for tests of the serving side.

use std::{
    collections::HashMap,
    fs::{self, File, Metadata as Found},
    io,
    os::unix::{
        ffi::OsStrExt as _,
        fs::{FileExt as _, FileTypeExt as _, MetadataExt as _},
    },
    path::Path,
};

use lazuli_image::{
    Algorithm, Blob, BlobIndex, Chunk, ChunkRef, Codec, Decoded, FormatError, Inode, InodeId, Kind,
    Metadata, Mtime, Name, Stored, Tree,
    rafs::{BlobRecord, BootstrapOptions, blob_tail, write_bootstrap},
    tree::Device,
};

use crate::listing::xattrs;

/// An image of one blob, without compression and without duplicates removed.
#[derive(Debug)]
pub struct Packed {
    /// The bootstrap.
    pub bootstrap: Vec<u8>,
    /// The decoded blob, as a complete cache file has it. Without a name in any directory.
    pub decoded: File,
    /// Bytes in `decoded`.
    pub decoded_size: u64,
}

/// Makes an image of the directory `root`. Errors name the path; the tree must have some file
/// content.
pub fn pack(root: &Path) -> io::Result<Packed> {
    let found = fs::symlink_metadata(root)?;
    let mut packer = Packer {
        tree: Tree::new(metadata(root, &found)?),
        chunks: Vec::new(),
        stored: Algorithm::Sha256.hasher(),
        decoded: tempfile::tempfile()?,
        known: HashMap::new(),
    };
    packer.fill(Tree::ROOT, root)?;
    let damaged = |error: FormatError| io::Error::other(error);
    let tail = blob_tail(&packer.chunks, packer.stored, Codec::None).map_err(damaged)?;
    let blob = Blob {
        id: tail.id,
        codec: Codec::None,
        points: lazuli_image::Points::default(),
        stored_size: tail.stored_size,
        decoded_size: tail.decoded_size,
        chunks: packer.chunks.into(),
    };
    let records = [BlobRecord { blob, tail: tail.info }];
    let options = BootstrapOptions::default();
    let bootstrap = write_bootstrap(&packer.tree, &records, &options).map_err(damaged)?;
    packer.decoded.set_len(tail.decoded_size)?;
    Ok(Packed { bootstrap, decoded: packer.decoded, decoded_size: tail.decoded_size })
}

struct Packer {
    tree: Tree,
    chunks: Vec<Chunk>,
    stored: lazuli_image::digest::Hasher,
    decoded: File,
    /// Inodes by device and number of the file that they were made from.
    known: HashMap<(u64, u64), InodeId>,
}

impl Packer {
    fn fill(&mut self, parent: InodeId, dir: &Path) -> io::Result<()> {
        for entry in fs::read_dir(dir)? {
            let path = entry?.path();
            let named = |error: io::Error| {
                io::Error::new(error.kind(), format!("{}: {error}", path.display()))
            };
            let found = fs::symlink_metadata(&path).map_err(named)?;
            let name = path.file_name().unwrap_or_default().as_bytes();
            let name = Name::new(name).map_err(io::Error::other)?;
            let key = (found.dev(), found.ino());
            let id = match self.known.get(&key) {
                Some(id) => *id,
                None => {
                    let kind = self.kind(&path, &found).map_err(named)?;
                    let metadata = metadata(&path, &found).map_err(named)?;
                    self.tree.add(Inode { metadata, kind })
                }
            };
            self.known.insert(key, id);
            let children = self.tree.children_mut(parent).expect("a directory");
            children.insert(name, id);
            if found.is_dir() {
                self.fill(id, &path)?;
            }
        }
        Ok(())
    }

    fn kind(&mut self, path: &Path, found: &Found) -> io::Result<Kind> {
        let device = Device {
            major: rustix::fs::major(found.rdev()),
            minor: rustix::fs::minor(found.rdev()),
        };
        Ok(match found.file_type() {
            kind if kind.is_dir() => Kind::Directory(Default::default()),
            kind if kind.is_symlink() => {
                Kind::Symlink(fs::read_link(path)?.as_os_str().as_bytes().into())
            }
            kind if kind.is_char_device() => Kind::CharDevice(device),
            kind if kind.is_block_device() => Kind::BlockDevice(device),
            kind if kind.is_fifo() => Kind::Fifo,
            kind if kind.is_socket() => Kind::Socket,
            _ => {
                let content = fs::read(path)?;
                let chunk_size = BootstrapOptions::default().chunk_size as usize;
                let chunks = content.chunks(chunk_size).map(|data| self.chunk(data));
                Kind::Regular {
                    size: content.len() as u64,
                    chunks: chunks.collect::<io::Result<_>>()?,
                }
            }
        })
    }

    fn chunk(&mut self, data: &[u8]) -> io::Result<ChunkRef> {
        let number = self.chunks.len() as u32;
        let size = data.len() as u32;
        let last = self.chunks.last();
        let stored = last.map_or(Stored(0), Chunk::stored_end);
        let decoded = Decoded(last.map_or(0, |last| last.decoded_end().0.next_multiple_of(4096)));
        self.stored.update(data);
        self.decoded.write_all_at(data, decoded.0)?;
        let digest = Algorithm::Blake3.digest(data);
        self.chunks.push(Chunk {
            number,
            digest,
            stored,
            stored_size: size,
            decoded,
            decoded_size: size,
            part: None,
        });
        Ok(ChunkRef { blob: BlobIndex(0), number })
    }
}

fn metadata(path: &Path, found: &Found) -> io::Result<Metadata> {
    let attributes = xattrs(path)?.into_iter();
    Ok(Metadata {
        permissions: (found.mode() & 0o7777) as u16,
        uid: found.uid(),
        gid: found.gid(),
        mtime: Mtime { seconds: found.mtime(), nanoseconds: found.mtime_nsec() as u32 },
        xattrs: attributes.map(|(name, value)| (name.into(), value.into())).collect(),
    })
}
