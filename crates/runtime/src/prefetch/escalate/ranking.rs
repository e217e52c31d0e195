//! Ranks files by how likely a start reads them next.
//!
//! A file is as likely to be read as others of its kind in its directory were so far; where these
//! say little, as those in its package, and then as those in the whole image. So the reads of this
//! start decide, not a table of names. Files that the guess foresees are left out: it finds the
//! libraries that programs name, and that these are read says nothing about other libraries.

use std::collections::HashSet;

use lazuli_image::{erofs::Nid, rafs::Bootstrap};

use super::{
    super::fetch_in_order::ChunkAt,
    files::{File, Files},
};

/// Likelihood of a file, none of whose kind was read.
const UNSEEN: f32 = 0.002;

/// Likelihood of the rest of a file that was read in part.
const BEGUN: f32 = 0.5;

/// Number of files of a directory, of a package and of a kind that weigh as much as the knowledge
/// from the next larger scope.
const DIRECTORY_WEIGHT: f32 = 1.0;
const PACKAGE_WEIGHT: f32 = 2.0;
const KIND_WEIGHT: f32 = 8.0;

/// Bytes that one more file costs: half of the bytes in flight at 100 Mbit/s and 10 ms. Among files
/// up to this size, the likeliest comes first; bigger ones must be likelier.
const FILE_COST: f32 = 65536.0;

/// Unforeseen misses in a scope after which the next scope is tried. The very first miss counts.
const STRAYS: u32 = 2;

/// The part of the image to take files from. Each step requires misses that the previous scope did
/// not foresee.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Scope {
    /// In directories in which something was missed.
    Directories,
    /// In their packages.
    Packages,
    /// In the whole image.
    Image,
}

/// The number of files that were not foreseen, and of those read.
#[derive(Clone, Copy, Debug, Default)]
struct Group {
    files: f32,
    read: f32,
}

impl Group {
    /// Likelihood of another file, given the likelihood `prior` in the next larger scope.
    fn likelihood(self, prior: f32, weight: f32) -> f32 {
        (self.read + weight * prior) / (self.files + weight)
    }
}

/// The reads of a start, and the ranking that follows from them.
#[derive(Debug)]
pub(super) struct Ranking {
    files: Files,
    /// Bytes of each file, stored.
    sizes: Vec<u64>,
    read: Vec<bool>,
    foreseen: Vec<bool>,
    missed: Vec<bool>,
    /// Files whose paths were told.
    named: HashSet<Nid>,
    kinds: Vec<Group>,
    directories: Vec<Group>,
    packages: Vec<Group>,
    missed_directories: Vec<bool>,
    missed_packages: Vec<bool>,
    scope: Scope,
    strays: u32,
    last_miss: ChunkAt,
}

impl Ranking {
    /// `size` is how many stored bytes a chunk has.
    pub(super) fn new(files: Files, size: impl Fn(ChunkAt) -> u64) -> Self {
        let of_file =
            |(_, file): (u32, &File)| files.places(file).iter().map(|place| size(*place)).sum();
        let sizes = files.iter().map(of_file).collect();
        let count = |number: fn(&File) -> u32| {
            let mut groups: Vec<Group> = Vec::new();
            for (_, file) in files.iter() {
                let at = number(file) as usize;
                if at >= groups.len() {
                    groups.resize_with(at + 1, Group::default);
                }
                groups[at].files += 1.0;
            }
            groups
        };
        let flags = |number: fn(&File) -> u32| {
            let most = files.iter().map(|(_, file)| number(file) as usize + 1).max();
            vec![false; most.unwrap_or_default()]
        };
        Ranking {
            sizes,
            read: vec![false; files.len()],
            foreseen: vec![false; files.len()],
            missed: vec![false; files.len()],
            named: HashSet::new(),
            kinds: count(|file| file.kind),
            directories: count(|file| file.in_directory),
            packages: count(|file| file.in_package),
            missed_directories: flags(|file| file.directory),
            missed_packages: flags(|file| file.package),
            scope: Scope::Directories,
            strays: 0,
            last_miss: (0, 0),
            files,
        }
    }

    /// The current scope.
    pub(super) fn scope(&self) -> Scope {
        self.scope
    }

    /// A chunk was read.
    pub(super) fn note_read(&mut self, place: ChunkAt) {
        let Some(at) = self.files.owner(place) else { return };
        if std::mem::replace(&mut self.read[at as usize], true) {
            return;
        }
        if !self.foreseen[at as usize] {
            self.groups(at).into_iter().for_each(|group| group.read += 1.0);
        }
    }

    /// A chunk is going to be fetched, or was, whatever is read. That it was read before counts.
    pub(super) fn note_foreseen(&mut self, place: ChunkAt) {
        let Some(at) = self.files.owner(place) else { return };
        let is_known = self.read[at as usize] || self.foreseen[at as usize];
        self.foreseen[at as usize] = true;
        if !is_known {
            self.groups(at).into_iter().for_each(|group| group.files -= 1.0);
        }
    }

    /// The groups that a file belongs to.
    fn groups(&mut self, at: u32) -> [&mut Group; 3] {
        let file = self.files.get(at);
        [
            &mut self.kinds[file.kind as usize],
            &mut self.directories[file.in_directory as usize],
            &mut self.packages[file.in_package as usize],
        ]
    }

    /// Records a chunk that was neither present nor in flight.
    pub(super) fn note_missed(&mut self, place: ChunkAt) {
        self.last_miss = place;
        let Some(at) = self.files.owner(place) else { return };
        if !self.is_in_scope(self.files.get(at)) {
            self.strays += 1;
        }
        if self.strays >= STRAYS && self.scope < Scope::Image {
            self.strays = 0;
            self.scope = match self.scope {
                Scope::Directories => Scope::Packages,
                Scope::Packages | Scope::Image => Scope::Image,
            };
        }
        self.missed[at as usize] = true;
        let file = self.files.get(at);
        self.missed_directories[file.directory as usize] = true;
        self.missed_packages[file.package as usize] = true;
    }

    fn is_in_scope(&self, file: &File) -> bool {
        match self.scope {
            Scope::Directories => self.missed_directories[file.directory as usize],
            Scope::Packages => self.missed_packages[file.package as usize],
            Scope::Image => true,
        }
    }

    fn likelihood(&self, at: u32, file: &File) -> f32 {
        if self.read[at as usize] {
            return BEGUN;
        }
        let of_kind = self.kinds[file.kind as usize].likelihood(UNSEEN, KIND_WEIGHT);
        let in_package =
            self.packages[file.in_package as usize].likelihood(of_kind, PACKAGE_WEIGHT);
        self.directories[file.in_directory as usize].likelihood(in_package, DIRECTORY_WEIGHT)
    }

    /// The files in scope: first the rest of those in which something was missed, since mapped ones
    /// are read in any order, then the likeliest for their cost. Those of about the same likelihood
    /// are in stored order, from the last miss on, so that many of them share one request.
    pub(super) fn order(&self) -> Vec<u32> {
        let in_scope = self.files.iter().filter(|(_, file)| self.is_in_scope(file));
        let ranked = in_scope.map(|(at, file)| {
            let cost = self.sizes[at as usize] as f32 + FILE_COST;
            let score = self.likelihood(at, file) * FILE_COST / cost;
            // Twice as likely is one step: -log2, at least 0.
            let step = (-score.log2()).max(0.0) as u32;
            let step = if self.missed[at as usize] { 0 } else { 1 + step };
            (step, self.distance(file), at)
        });
        let mut ranked: Vec<_> = ranked.collect();
        ranked.sort_unstable();
        ranked.into_iter().map(|(_, _, at)| at).collect()
    }

    /// Distance of a file from the last miss: in blobs, and in chunks. Programs read forward rather
    /// than back, so chunks behind the miss count as twice as near as those before it.
    fn distance(&self, file: &File) -> (usize, usize) {
        let (blob, chunk) = self.files.places(file).first().copied().unwrap_or_default();
        let (last_blob, last) = self.last_miss;
        match blob == last_blob {
            true if chunk >= last => (0, 2 * (chunk - last)),
            true => (0, 4 * (last - chunk) + 1),
            false => (1 + blob, chunk),
        }
    }

    /// The path of the file that has this chunk, the first time that it is asked for.
    pub(super) fn first_path<B: AsRef<[u8]>>(
        &mut self,
        place: ChunkAt,
        bootstrap: &Bootstrap<B>,
    ) -> Option<Vec<u8>> {
        let file = self.files.get(self.files.owner(place)?);
        let is_first = self.named.insert(file.nid);
        is_first.then(|| self.files.path(file, bootstrap)).flatten()
    }

    /// The file that has this chunk.
    pub(super) fn owner(&self, place: ChunkAt) -> Option<u32> {
        self.files.owner(place)
    }

    /// The chunks of a file.
    pub(super) fn places(&self, file: u32) -> &[ChunkAt] {
        self.files.places(self.files.get(file))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use lazuli_testkit::packed;

    use super::*;

    /// An image of files with their paths as content.
    struct Example {
        ranking: Ranking,
        paths: Vec<String>,
    }

    impl Example {
        fn of(paths: &[&str]) -> Self {
            let directory = tempfile::tempdir().unwrap();
            for path in paths {
                let file = directory.path().join(path);
                fs::create_dir_all(file.parent().unwrap()).unwrap();
                fs::write(file, path).unwrap();
            }
            let packed = packed::pack(directory.path()).unwrap();
            let bootstrap = Bootstrap::open(packed.bootstrap).unwrap();
            let files = Files::of(&bootstrap, |_, number| Some(number as usize));
            let chunk_of = |path: &str| {
                let find =
                    |nid, name: &str| bootstrap.lookup(nid, name.as_bytes()).unwrap().unwrap();
                let nid = path.split('/').fold(bootstrap.root(), find);
                let (chunk, _) = bootstrap.chunks(nid).unwrap().next().unwrap().unwrap();
                files.owner((0, chunk.number as usize)).unwrap()
            };
            let mut named: Vec<_> = paths.iter().map(|path| (chunk_of(path), *path)).collect();
            named.sort_unstable();
            let paths = named.into_iter().map(|(_, path)| path.to_owned()).collect::<Vec<_>>();
            for (at, path) in paths.iter().enumerate() {
                let found = files.path(files.get(at as u32), &bootstrap).unwrap();
                assert_eq!(found, [b"/", path.as_bytes()].concat());
            }
            Example { ranking: Ranking::new(files, |_| 100), paths }
        }

        fn read(&mut self, path: &str) -> ChunkAt {
            let at = self.paths.iter().position(|known| known == path).unwrap() as u32;
            let place = self.ranking.places(at)[0];
            self.ranking.note_read(place);
            place
        }

        fn miss(&mut self, path: &str) {
            let place = self.read(path);
            self.ranking.note_missed(place);
        }

        /// The files to fetch, without those read.
        fn order(&self) -> Vec<&str> {
            let unread = |at: &u32| !self.ranking.read[*at as usize];
            let order = self.ranking.order().into_iter().filter(unread);
            order.map(|at| self.paths[at as usize].as_str()).collect()
        }
    }

    const FILES: [&str; 9] = [
        "usr/lib/app/core/a.pyc",
        "usr/lib/app/core/b.pyc",
        "usr/lib/app/core/notes.txt",
        "usr/lib/app/more/c.pyc",
        "usr/lib/other/d.pyc",
        "usr/share/doc/e.txt",
        "usr/share/doc/f.txt",
        "usr/share/doc/g.txt",
        "var/x",
    ];

    #[test]
    fn the_first_miss_brings_its_directory_and_its_kind_first() {
        let mut example = Example::of(&FILES);
        assert!(example.order().is_empty(), "nothing was missed");
        example.miss(FILES[0]);
        assert_eq!(example.ranking.scope(), Scope::Directories);
        assert_eq!(example.order(), [FILES[1], FILES[2]]);
    }

    #[test]
    fn misses_that_were_not_foreseen_widen_the_scope() {
        let mut example = Example::of(&FILES);
        example.miss(FILES[0]);
        // This one was.
        example.miss(FILES[1]);
        assert_eq!(example.ranking.scope(), Scope::Directories);
        example.miss(FILES[3]);
        assert_eq!(example.ranking.scope(), Scope::Packages);
        example.miss(FILES[4]);
        assert_eq!(example.ranking.scope(), Scope::Packages);
        example.miss(FILES[5]);
        assert_eq!(example.ranking.scope(), Scope::Image);
        assert!(example.order().contains(&FILES[8]));
    }

    #[test]
    fn files_of_a_kind_that_was_read_rank_first() {
        let mut example = Example::of(&FILES);
        for path in [FILES[8], FILES[5], FILES[0], FILES[1], FILES[4]] {
            example.miss(path);
        }
        assert_eq!(example.ranking.scope(), Scope::Image);
        let order = example.order();
        let at = |path: &str| order.iter().position(|known| *known == path).unwrap();
        assert!(at(FILES[3]) < at(FILES[2]), "{order:?}");
        assert!(at(FILES[6]) < at(FILES[2]), "{order:?}");
        // Hits count as much as misses: they show what the start reads.
        let at = example.paths.iter().position(|path| path == FILES[6]).unwrap() as u32;
        let likelihood =
            |example: &Example| example.ranking.likelihood(at, example.ranking.files.get(at));
        let before = likelihood(&example);
        example.read(FILES[7]);
        assert!(likelihood(&example) > before);
    }

    #[test]
    fn reads_of_foreseen_files_say_nothing_about_others() {
        const LIBRARIES: [&str; 5] =
            ["lib/a.so", "lib/b.so", "lib/c.so", "lib/d.so", "lib/unrelated.so"];
        const SCRIPTS: [&str; 4] = ["share/m/x.m", "share/n/y.m", "share/o/z.m", "share/p/w.m"];
        for is_foreseen in [true, false] {
            let mut example = Example::of(&[&LIBRARIES[..], &SCRIPTS].concat());
            for library in &LIBRARIES[..4] {
                if is_foreseen {
                    let at = example.paths.iter().position(|path| path == library).unwrap();
                    let place = example.ranking.places(at as u32)[0];
                    example.ranking.note_foreseen(place);
                }
                example.read(library);
            }
            example.ranking.scope = Scope::Image;
            example.miss(SCRIPTS[0]);
            let order = example.order();
            assert_eq!(order[0] != LIBRARIES[4], is_foreseen, "{order:?}");
        }
    }

    /// A JVM's classes, say: a hundred MiB, of which a start reads parts.
    #[test]
    fn chunks_of_a_large_file_rank_by_those_around_them() {
        let chunks = 100;
        let directory = tempfile::tempdir().unwrap();
        let content = |seed| lazuli_testkit::odd::random(seed, 1 << 20);
        let large: Vec<u8> = (0..chunks).flat_map(content).collect();
        fs::write(directory.path().join("modules"), large).unwrap();
        for name in ["a.so", "b.so"] {
            fs::write(directory.path().join(name), name).unwrap();
        }
        let packed = packed::pack(directory.path()).unwrap();
        let bootstrap = Bootstrap::open(packed.bootstrap).unwrap();
        let files = Files::of(&bootstrap, |_, number| Some(number as usize));
        let modules = bootstrap.lookup(bootstrap.root(), b"modules").unwrap().unwrap();
        let numbers = bootstrap.chunks(modules).unwrap().map(|chunk| chunk.unwrap().0.number);
        let places: Vec<ChunkAt> = numbers.map(|number| (0, number as usize)).collect();
        assert_eq!(places.len() as u64, chunks);
        let mut ranking = Ranking::new(files, |_| 500_000);
        for at in [40, 41, 43] {
            ranking.note_read(places[at]);
            ranking.note_missed(places[at]);
        }
        let order = ranking.order();
        let unread = order.iter().filter(|at| !ranking.read[**at as usize]);
        let first: Vec<_> = unread.flat_map(|at| ranking.places(*at)).take(14).copied().collect();
        // The rest of its segment, chunks 32 to 47, behind the last miss first.
        assert_eq!(first[0], places[44]);
        let in_segment = |place: &&ChunkAt| places[32..48].contains(place);
        assert_eq!(first.iter().filter(in_segment).count(), 13, "{first:?}");
    }

    /// A library, say, of which pages are read in any order.
    #[test]
    fn the_rest_of_a_file_in_which_something_was_missed_comes_first() {
        let directory = tempfile::tempdir().unwrap();
        let content: Vec<u8> =
            (0..8).flat_map(|seed| lazuli_testkit::odd::random(seed, 1 << 20)).collect();
        fs::write(directory.path().join("lib.so"), content).unwrap();
        for name in ["a.so", "b.so"] {
            fs::write(directory.path().join(name), name).unwrap();
        }
        let packed = packed::pack(directory.path()).unwrap();
        let bootstrap = Bootstrap::open(packed.bootstrap).unwrap();
        let files = Files::of(&bootstrap, |_, number| Some(number as usize));
        let nid = bootstrap.lookup(bootstrap.root(), b"lib.so").unwrap().unwrap();
        let numbers = bootstrap.chunks(nid).unwrap().map(|chunk| chunk.unwrap().0.number);
        let places: Vec<ChunkAt> = numbers.map(|number| (0, number as usize)).collect();
        let mut ranking = Ranking::new(files, |_| 500_000);
        ranking.note_read(places[5]);
        ranking.note_missed(places[5]);
        let order = ranking.order();
        assert_eq!(order.len(), 3);
        assert_eq!(ranking.places(order[0]), places);
        assert_eq!(ranking.owner(places[0]), Some(order[0]));
        let path = ranking.first_path(places[5], &bootstrap);
        assert_eq!(path.as_deref(), Some(&b"/lib.so"[..]));
        assert_eq!(ranking.first_path(places[0], &bootstrap), None);
    }

    #[test]
    fn large_file_ranks_below_a_small_one() {
        let example = |size: u64| {
            let mut example = Example::of(&["usr/lib/a/1", "usr/lib/a/2", "usr/lib/a/3"]);
            example.miss("usr/lib/a/1");
            let large = example.paths.iter().position(|path| path == "usr/lib/a/2").unwrap();
            example.ranking.sizes[large] = size;
            example.order().first().map(|path| (*path).to_owned())
        };
        assert_eq!(example(100).unwrap(), "usr/lib/a/2");
        assert_eq!(example(10 << 20).unwrap(), "usr/lib/a/3");
    }
}
