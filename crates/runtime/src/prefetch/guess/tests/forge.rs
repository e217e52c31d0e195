//! Trees and ELF files that tests make up.

use std::{
    fs::{self, File},
    ops::Range,
    os::unix::fs::{FileExt as _, PermissionsExt as _, symlink},
    path::PathBuf,
    sync::Mutex,
};

use async_trait::async_trait;
use lazuli_image::rafs::Bootstrap;
use lazuli_testkit::packed;
use serde_json::Value;
use tempfile::TempDir;

use super::super::{Content, Piece, guess, paths::Paths};

/// A file tree that becomes an image.
pub(super) struct Image {
    directory: TempDir,
    files: Vec<String>,
}

impl Default for Image {
    fn default() -> Self {
        Image { directory: tempfile::tempdir().unwrap(), files: Vec::new() }
    }
}

impl Image {
    fn path(&self, path: &str) -> PathBuf {
        let path = self.directory.path().join(path.trim_start_matches('/'));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        path
    }

    pub(super) fn file(mut self, path: &str, content: &[u8]) -> Self {
        fs::write(self.path(path), content).unwrap();
        self.files.push(path.to_owned());
        self
    }

    pub(super) fn program(self, path: &str, content: &[u8]) -> Self {
        let image = self.file(path, content);
        fs::set_permissions(image.path(path), fs::Permissions::from_mode(0o755)).unwrap();
        image
    }

    pub(super) fn link(self, path: &str, target: &str) -> Self {
        symlink(target, self.path(path)).unwrap();
        self
    }

    pub(super) fn pack(&self) -> Packed {
        let packed = packed::pack(self.directory.path()).unwrap();
        let bootstrap = Bootstrap::open(packed.bootstrap).unwrap();
        let missed = Mutex::default();
        Packed { bootstrap, decoded: packed.decoded, is_at_hand: false, missed }
    }

    /// The guesses for `config`: paths without links, and ranges.
    pub(super) fn pieces(&self, config: &Value) -> Vec<(String, Range<u64>)> {
        self.pieces_of(config, self.pack())
    }

    fn pieces_of(&self, config: &Value, packed: Packed) -> Vec<(String, Range<u64>)> {
        let mut pieces: Vec<Piece> = Vec::new();
        block_on(guess(config, &packed.bootstrap, &packed, |more| pieces.extend(more)));
        let mut paths = Paths::new(&packed.bootstrap);
        let mut path = |piece: &Piece| {
            let mut files = self.files.iter();
            let is_it = |path: &&String| {
                paths.file(b"/", path.as_bytes()).is_some_and(|found| found.nid == piece.file)
            };
            files.find(is_it).unwrap().clone()
        };
        pieces.iter().map(|piece| (path(piece), piece.range.clone())).collect()
    }

    /// The files of which something is guessed, in that order.
    pub(super) fn guessed(&self, config: &Value) -> Vec<String> {
        self.pieces(config).into_iter().map(|(path, _)| path).collect()
    }

    /// The same for a start that misses something in these files.
    pub(super) fn guessed_after(&self, config: &Value, missed: &[&str]) -> Vec<String> {
        let packed = self.pack();
        let paths = missed.iter().rev().map(|path| path.as_bytes().to_vec());
        packed.missed.lock().unwrap().extend(paths);
        self.pieces_of(config, packed).into_iter().map(|(path, _)| path).collect()
    }

    /// The same where the image is made.
    pub(super) fn guessed_by_maker(&self, config: &Value) -> Vec<String> {
        let packed = Packed { is_at_hand: true, ..self.pack() };
        self.pieces_of(config, packed).into_iter().map(|(path, _)| path).collect()
    }
}

/// An image in memory, with its data in a file.
pub(super) struct Packed {
    pub(super) bootstrap: Bootstrap<Vec<u8>>,
    decoded: File,
    is_at_hand: bool,
    /// Paths of files in which the start misses something, the first one last.
    missed: Mutex<Vec<Vec<u8>>>,
}

#[async_trait]
impl Content for Packed {
    async fn read(&self, piece: &Piece) -> Option<Vec<u8>> {
        let mut bytes = Vec::new();
        while let at = piece.range.start + bytes.len() as u64
            && at < piece.range.end
        {
            let extent = self.bootstrap.extent(piece.file, at).unwrap().unwrap();
            let mut part = vec![0; extent.len.min(piece.range.end - at) as usize];
            self.decoded.read_exact_at(&mut part, extent.start.0).unwrap();
            bytes.extend(part);
        }
        Some(bytes)
    }

    async fn missed(&self) -> Option<Vec<u8>> {
        self.missed.lock().unwrap().pop()
    }

    fn is_at_hand(&self) -> bool {
        self.is_at_hand
    }
}

pub(super) fn block_on<T>(task: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(task)
}

/// A program of x86-64 with glibc's dynamic linker.
pub(super) fn program(needed: &[&str]) -> Vec<u8> {
    let interpreter = "/lib64/ld-linux-x86-64.so.2";
    Forged { interpreter, needed, ..Forged::default() }.bytes()
}

/// A library.
pub(super) fn shared(needed: &[&str]) -> Vec<u8> {
    Forged { needed, ..Forged::default() }.bytes()
}

/// An ELF file; empty fields are left out.
#[derive(Default)]
pub(super) struct Forged<'a> {
    pub(super) interpreter: &'a str,
    pub(super) needed: &'a [&'a str],
    pub(super) rpath: &'a str,
    pub(super) runpath: &'a str,
    /// The place of a segment with code; it need not be in the file.
    pub(super) code: Option<Range<u64>>,
}

impl Forged<'_> {
    pub(super) fn bytes(&self) -> Vec<u8> {
        const BASE: u64 = 0x40_0000;
        const SEGMENTS: u64 = 4;
        let start = 64 + SEGMENTS * 56;
        let mut strings = vec![0];
        let mut add = |text: &str| {
            let at = strings.len() as u64;
            strings.extend_from_slice(text.as_bytes());
            strings.push(0);
            at
        };
        let interpreter = (add(self.interpreter), self.interpreter.len() as u64 + 1);
        let mut dynamic: Vec<(u64, u64)> = vec![(5, BASE + start)];
        dynamic.extend(self.needed.iter().map(|name| (1, add(name))));
        for (tag, path) in [(15, self.rpath), (29, self.runpath)] {
            if !path.is_empty() {
                dynamic.push((tag, add(path)));
            }
        }
        dynamic.push((0, 0));
        let table = (start + strings.len() as u64).next_multiple_of(8);
        let end = table + dynamic.len() as u64 * 16;
        let mut bytes = b"\x7fELF\x02\x01\x01".to_vec();
        bytes.resize(16, 0);
        bytes.extend([3, 0, 62, 0, 1, 0, 0, 0]);
        bytes.extend([0, 64, 0].map(u64::to_le_bytes).concat());
        bytes.extend([0, 0, 0, 0]);
        bytes.extend([64, 56, SEGMENTS as u16, 64, 0, 0].map(u16::to_le_bytes).concat());
        let code = self.code.clone().unwrap_or(0..0);
        // Type and flags, offset, address, size.
        for (kind, flags, offset, size) in [
            (1u32, 4u32, 0, end),
            (1, 5, code.start, code.end - code.start),
            (2, 6, table, end - table),
            (
                if self.interpreter.is_empty() { 0 } else { 3 },
                4,
                start + interpreter.0,
                interpreter.1,
            ),
        ] {
            bytes.extend([kind, flags].map(u32::to_le_bytes).concat());
            bytes.extend([offset, BASE + offset, 0, size, size, 1].map(u64::to_le_bytes).concat());
        }
        bytes.extend(strings);
        bytes.resize(table as usize, 0);
        bytes.extend(
            dynamic.iter().flat_map(|(tag, value)| [*tag, *value]).flat_map(u64::to_le_bytes),
        );
        bytes
    }
}
