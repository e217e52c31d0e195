//! The files of an image as neighbours of each other: in directories, in packages, and by kind.

use std::{collections::HashMap, ops::Range};

use lazuli_image::{
    erofs::{FileType, Nid},
    rafs::Bootstrap,
};

use super::super::fetch_in_order::ChunkAt;

/// Limit of names to examine in one image. Real images have up to 150,000.
const NAMES: usize = 1 << 20;

/// Chunks of files that are remembered of one image: 24 bytes each.
const PLACES: usize = 1 << 20;

/// Directories below each other.
const DEPTH: usize = 64;

/// Names that make their directory a package: they describe its content.
const MANIFESTS: [&[u8]; 6] =
    [b"package.json", b"DESCRIPTION", b"ebin", b"META-INF", b"composer.json", b"RECORD"];

/// Directories in which each directory is a package.
const COLLECTIONS: [&[u8]; 6] =
    [b"site-packages", b"dist-packages", b"node_modules", b"gems", b"vendor", b"perl5"];

/// Down to this depth, each directory counts as a package of its own: `/usr/share/app`.
const SHALLOW: usize = 3;

/// Chunks of a file beyond which each counts as a file of its own. Programs soon read all of a
/// library with some MiB, but only parts of an archive.
const LARGE: usize = 16;

/// Adjacent chunks of a large file that say as much about each other as files of a directory.
const SEGMENT: usize = 16;

/// The kind of these parts; no name has it as its ending.
const PART: &[u8] = b"/";

/// Maximum length of a name's ending that counts as the kind of a file.
const ENDING: usize = 8;

/// A regular file, or a chunk of a large one. The numbers count from 0 in the whole image.
#[derive(Debug)]
pub(super) struct File {
    pub(super) nid: Nid,
    /// Its chunks: which of [`Files::places`].
    first: u32,
    end: u32,
    /// Its directory.
    pub(super) directory: u32,
    /// The package that its directory belongs to.
    pub(super) package: u32,
    /// The ending of its name.
    pub(super) kind: u32,
    /// The files of its kind in its directory.
    pub(super) in_directory: u32,
    /// The files of its kind in its package.
    pub(super) in_package: u32,
}

/// All files of an image that have bytes.
#[derive(Debug, Default)]
pub(super) struct Files {
    all: Vec<File>,
    directories: Vec<Named>,
    places: Vec<ChunkAt>,
    /// Chunks and the first file that has each, in ascending order.
    owners: Vec<(ChunkAt, u32)>,
}

/// A directory as it is found again.
#[derive(Debug)]
struct Named {
    nid: Nid,
    /// The directory that it is in; itself for the root.
    parent: u32,
    name: Box<[u8]>,
}

/// Files that say something about each other: those of a kind in a directory or package, or the
/// chunks of a large file's segment.
#[derive(Debug, PartialEq, Eq, Hash)]
enum Siblings {
    InDirectory(u32, u32),
    InFile(u32, u32),
}

/// Numbers keys in the order of their first appearance.
#[derive(Debug)]
struct Numbers<K>(HashMap<K, u32>);

impl<K> Default for Numbers<K> {
    fn default() -> Self {
        Numbers(HashMap::new())
    }
}

impl<K: std::hash::Hash + Eq> Numbers<K> {
    fn of(&mut self, key: K) -> u32 {
        let next = self.0.len() as u32;
        *self.0.entry(key).or_insert(next)
    }
}

/// A directory to look into.
struct Directory {
    named: Named,
    depth: usize,
    package: u32,
    holds_packages: bool,
}

/// The state of a walk.
struct Walk<'a, B, P> {
    bootstrap: &'a Bootstrap<B>,
    position: P,
    files: Files,
    names: usize,
    packages: u32,
    kinds: Numbers<Vec<u8>>,
    in_directories: Numbers<Siblings>,
    in_packages: Numbers<Siblings>,
}

impl Files {
    /// Walks through all names of an image, up to a limit. `position` looks up a chunk of a blob by
    /// its number. Skips damaged parts.
    pub(super) fn of<B: AsRef<[u8]>>(
        bootstrap: &Bootstrap<B>,
        position: impl Fn(usize, u32) -> Option<usize>,
    ) -> Self {
        let mut walk = Walk {
            bootstrap,
            position,
            files: Files::default(),
            names: NAMES,
            packages: 0,
            kinds: Numbers::default(),
            in_directories: Numbers::default(),
            in_packages: Numbers::default(),
        };
        let named = Named { nid: bootstrap.root(), parent: 0, name: Box::default() };
        let root = Directory { named, depth: 0, package: 0, holds_packages: false };
        let mut ahead = vec![root];
        while let Some(next) = ahead.pop() {
            walk.look(next, &mut ahead);
        }
        let mut files = walk.files;
        let all = files.all.iter().zip(0..);
        let owned = all.flat_map(|(file, at)| {
            files.places[file.first as usize..file.end as usize]
                .iter()
                .map(move |place| (*place, at))
        });
        files.owners = owned.collect();
        files.owners.sort_unstable();
        files.owners.dedup_by_key(|(place, _)| *place);
        files
    }

    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    pub(super) fn get(&self, file: u32) -> &File {
        &self.all[file as usize]
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &File)> {
        (0..).zip(&self.all)
    }

    /// The chunks of a file, in the order of its bytes.
    pub(super) fn places(&self, file: &File) -> &[ChunkAt] {
        &self.places[file.first as usize..file.end as usize]
    }

    /// The absolute path of a file, one of them if it has several.
    pub(super) fn path<B: AsRef<[u8]>>(
        &self,
        file: &File,
        bootstrap: &Bootstrap<B>,
    ) -> Option<Vec<u8>> {
        let mut directory = &self.directories[file.directory as usize];
        let mut entries = bootstrap.read_dir(directory.nid, 0).ok()?.flatten();
        let mut parts = vec![entries.find(|entry| entry.nid == file.nid)?.name];
        while directory.nid != bootstrap.root() {
            parts.push(&directory.name);
            directory = &self.directories[directory.parent as usize];
        }
        Some(parts.into_iter().rev().flat_map(|part| [b"/", part].concat()).collect())
    }

    /// The file that has a chunk, the first one if several share it.
    pub(super) fn owner(&self, place: ChunkAt) -> Option<u32> {
        let at = self.owners.binary_search_by_key(&place, |(known, _)| *known).ok()?;
        Some(self.owners[at].1)
    }
}

impl<B: AsRef<[u8]>, P: Fn(usize, u32) -> Option<usize>> Walk<'_, B, P> {
    /// Notes the files of a directory; the directories in it are `ahead`.
    fn look(&mut self, this: Directory, ahead: &mut Vec<Directory>) {
        let bootstrap = self.bootstrap;
        let entries = bootstrap.read_dir(this.named.nid, 0).into_iter().flatten().flatten();
        let entries = entries.filter(|entry| !entry.is_dot()).take(self.names);
        let entries: Vec<_> = entries.collect();
        self.names -= entries.len();
        let directory = self.files.directories.len() as u32;
        self.files.directories.push(this.named);
        let has_manifest = entries.iter().any(|entry| MANIFESTS.contains(&entry.name));
        let is_package = this.depth <= SHALLOW || this.holds_packages || has_manifest;
        let package = if is_package { self.packages } else { this.package };
        self.packages += u32::from(is_package);
        for entry in entries {
            match entry.file_type {
                FileType::Regular => self.note(entry.name, entry.nid, directory, package),
                FileType::Directory if this.depth < DEPTH => ahead.push(Directory {
                    named: Named { nid: entry.nid, parent: directory, name: entry.name.into() },
                    depth: this.depth + 1,
                    package,
                    // A scope of npm's, `@name`, is one more collection.
                    holds_packages: COLLECTIONS.contains(&entry.name)
                        || this.holds_packages && entry.name.starts_with(b"@"),
                }),
                _ => {}
            }
        }
    }

    fn note(&mut self, name: &[u8], nid: Nid, directory: u32, package: u32) {
        let Ok(chunks) = self.bootstrap.chunks(nid) else { return };
        let first = self.files.places.len();
        if first + chunks.len() > PLACES {
            return;
        }
        for (chunk, _) in chunks.flatten() {
            let blob = usize::from(chunk.blob.0);
            let at = (self.position)(blob, chunk.number);
            self.files.places.extend(at.map(|at| (blob, at)));
        }
        let end = self.files.places.len();
        if first == end {
            return;
        }
        if end - first > LARGE {
            self.note_parts(nid, first..end, directory, package);
            return;
        }
        let kind = self.kinds.of(ending(name).to_vec());
        self.files.all.push(File {
            nid,
            first: first as u32,
            end: end as u32,
            directory,
            package,
            kind,
            in_directory: self.in_directories.of(Siblings::InDirectory(directory, kind)),
            in_package: self.in_packages.of(Siblings::InDirectory(package, kind)),
        });
    }

    /// Notes the chunks of a large file as files of their own. For what they say of each other, its
    /// segments are their directories, and the file is their package.
    fn note_parts(&mut self, nid: Nid, chunks: Range<usize>, directory: u32, package: u32) {
        let kind = self.kinds.of(PART.to_vec());
        let file = chunks.start as u32;
        for (at, part) in chunks.clone().enumerate() {
            let segment = (at / SEGMENT) as u32;
            self.files.all.push(File {
                nid,
                first: part as u32,
                end: part as u32 + 1,
                directory,
                package,
                kind,
                in_directory: self.in_directories.of(Siblings::InFile(file, segment)),
                in_package: self.in_packages.of(Siblings::InFile(file, 0)),
            });
        }
    }
}

/// The kind of a file by its name: the part after the last dot, or a library of some version.
fn ending(name: &[u8]) -> &[u8] {
    const LIBRARY: &[u8] = b".so";
    let is_library = |at: &usize| {
        let rest = &name[at + LIBRARY.len()..];
        name[*at..].starts_with(LIBRARY) && (rest.is_empty() || rest[0] == b'.')
    };
    let ends = name.len().checked_sub(LIBRARY.len());
    if ends.is_some_and(|last| (0..=last).any(|at| is_library(&at))) {
        return b"so";
    }
    let Some(dot) = name.iter().rposition(|byte| *byte == b'.') else { return b"" };
    let ending = &name[dot + 1..];
    let is_kind = ending.len() <= ENDING && ending.iter().any(|byte| !byte.is_ascii_digit());
    if dot > 0 && is_kind { ending } else { b"" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_say_of_which_kind_a_file_is() {
        for (name, kind) in [
            ("os.cpython-311.pyc", "pyc"),
            ("libc.so.6", "so"),
            ("_ssl.cpython-311-x86_64-linux-gnu.so", "so"),
            ("a.source", "source"),
            ("a.so", "so"),
            ("README", ""),
            (".profile", ""),
            ("python3.11", ""),
            ("a.verylongending", ""),
            ("so", ""),
            ("", ""),
        ] {
            assert_eq!(ending(name.as_bytes()), kind.as_bytes(), "{name}");
        }
    }
}
