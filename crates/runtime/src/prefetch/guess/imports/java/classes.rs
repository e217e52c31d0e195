//! The classes that a program in Java loads, as far as they are in the run-time image: those that
//! its own classes name, and those that these name.
//!
//! Classes of `java.base` are mostly in the archive of class data (CDS) or in the part of the image
//! that each start reads. Those of the other modules are what is looked for.

use std::{
    collections::{BTreeSet, HashMap, HashSet, VecDeque},
    mem,
    ops::Range,
};

use super::{
    super::super::paths::Found,
    archive::{Archives, CLASS},
    class,
    jimage::{self, Place},
};

/// Bytes of the classes in archives that are read.
const CLASSES: usize = 8 << 20;

/// Classes and names of one program.
const NAMES: usize = 1 << 16;

/// Steps from the program's own classes to those of the image whose names are followed: further
/// ones lead to all of a module, most of which no start reads.
const STEPS: usize = 1;

/// The same for programs of the image itself, such as `javac`.
const OWN_STEPS: usize = 6;

/// Classes that a run-time looks for by itself: they say which languages it knows.
const SERVICES: [&[u8]; 2] = [
    b"sun/util/resources/cldr/provider/CLDRLocaleDataMetaInfo",
    b"sun/util/resources/provider/LocaleDataProvider",
];

/// Ranges are made of blocks of this size; around a page that is touched, the kernel reads 1 MiB.
const BLOCK: u64 = 128 << 10;
const AROUND: u64 = 512 << 10;

/// Blocks of the image that are guessed.
const BLOCKS: usize = 256;

/// What is known of a program in Java.
#[derive(Debug, Default)]
pub(in super::super::super) struct Classes {
    archives: Archives,
    /// The image, and where its classes are.
    image: Option<(Found, HashMap<Vec<u8>, Place>)>,
    /// Names of the classes that it begins with.
    mains: Vec<Vec<u8>>,
    /// Names that were followed.
    known: HashSet<Vec<u8>>,
    /// Blocks of the image that are guessed.
    blocks: BTreeSet<u64>,
    steps: usize,
}

impl Classes {
    /// Adds an archive of the class path.
    pub(in super::super::super) fn add_archive(&mut self, bytes: Vec<u8>) {
        self.archives.add(bytes);
    }

    /// Adds the image, of which the first bytes are given.
    pub(in super::super::super) fn add_image(&mut self, file: &Found, head: &[u8]) {
        if self.image.is_none() {
            self.image = jimage::classes(head).map(|classes| (file.clone(), classes));
        }
    }

    /// Adds a class with which the program begins.
    pub(in super::super::super) fn add_main(&mut self, name: &[u8]) {
        self.mains.push(slashed(name));
    }

    /// The image.
    pub(in super::super::super) fn image(&self) -> Option<&Found> {
        self.image.as_ref().map(|(file, _)| file)
    }

    /// Places of the classes of the image that the program's own classes name.
    pub(in super::super::super) fn begin(&mut self) -> Vec<Place> {
        let Some((_, classes)) = &self.image else { return Vec::new() };
        let mut names = VecDeque::from(mem::take(&mut self.mains));
        names.retain(|name| is_new(&mut self.known, name));
        let services = SERVICES.iter().filter_map(|name| classes.get(*name).cloned());
        let mut found: Vec<_> = services.collect();
        let mut room = CLASSES;
        self.steps = OWN_STEPS;
        while let Some(name) = names.pop_front() {
            if let Some(class) = self.archives.class(&name, &mut room) {
                self.steps = STEPS;
                let named = class::named(&class).into_iter().map(slashed);
                names.extend(named.filter(|name| is_new(&mut self.known, name)));
            } else if let Some(place) = classes.get(&name) {
                found.push(place.clone());
            }
        }
        found
    }

    /// Places of the classes that classes of the image name, whose contents are given: nothing
    /// after enough steps.
    pub(in super::super::super) fn go_on(&mut self, contents: &[Vec<u8>]) -> Vec<Place> {
        let Some((_, classes)) = &self.image else { return Vec::new() };
        let Some(steps) = self.steps.checked_sub(1) else { return Vec::new() };
        self.steps = steps;
        let mut found = Vec::new();
        for name in contents.iter().flat_map(|content| class::named(content)).map(slashed) {
            if let Some(place) = classes.get(&name)
                && is_new(&mut self.known, &name)
            {
                found.push(place.clone());
            }
        }
        found
    }

    /// The parts of the image that are read for classes at these places, beyond `head`, each once.
    pub(in super::super::super) fn parts(
        &mut self,
        places: &[Place],
        head: u64,
    ) -> Vec<Range<u64>> {
        let size = self.image().map_or(0, |file| file.size);
        let mut new = BTreeSet::new();
        // The packages of modules are at the end.
        let last = size.saturating_sub(1) / BLOCK;
        if last * BLOCK >= head && self.blocks.insert(last) {
            new.insert(last);
        }
        let is_class = |range: &&Range<u64>| range.end - range.start <= CLASS as u64;
        let ranges = places.iter().map(|place| &place.range).filter(is_class);
        for range in ranges.filter(|range| range.start >= head) {
            if self.blocks.len() >= BLOCKS {
                break;
            }
            let first = range.start.saturating_sub(AROUND).max(head) / BLOCK;
            let last = range.end.saturating_add(AROUND).min(size).div_ceil(BLOCK);
            for block in first..last {
                if self.blocks.len() < BLOCKS && self.blocks.insert(block) {
                    new.insert(block);
                }
            }
        }
        let mut parts: Vec<Range<u64>> = Vec::new();
        for block in new {
            let part = block * BLOCK..((block + 1) * BLOCK).min(size);
            match parts.last_mut().filter(|last| last.end == part.start) {
                Some(last) => last.end = part.end,
                None => parts.push(part),
            }
        }
        parts
    }
}

/// Adds a name to those that were followed. Returns whether it is to be followed.
fn is_new(known: &mut HashSet<Vec<u8>>, name: &[u8]) -> bool {
    known.len() < NAMES && known.insert(name.to_vec())
}

fn slashed(name: &[u8]) -> Vec<u8> {
    name.iter().map(|byte| if *byte == b'.' { b'/' } else { *byte }).collect()
}

#[cfg(test)]
mod tests {
    use lazuli_image::erofs::Nid;

    use super::{super::forge, *};

    /// Names of classes of the image, each of which names the next one.
    const CHAIN: [&str; 4] = ["A", "B", "C", "D"];

    /// The chain, in an image, with its file.
    fn image() -> (Found, Vec<u8>) {
        let names = CHAIN.map(|name| ["m", "lib", name]);
        let next = |at: usize| CHAIN.get(at + 1).map(|name| format!("lib/{name}"));
        let contents: Vec<_> = (0..CHAIN.len())
            .map(|at| forge::class(&next(at).iter().map(String::as_str).collect::<Vec<_>>(), &[]))
            .collect();
        let bytes = forge::image(&names, &contents);
        let (size, path) = (bytes.len() as u64, b"/lib/modules".to_vec());
        (Found { nid: Nid(1), size, is_executable: false, path }, bytes)
    }

    /// How many classes of the image are found in each step.
    fn steps(classes: &mut Classes, image: &[u8]) -> Vec<usize> {
        let mut places = classes.begin();
        let mut found = Vec::new();
        while !places.is_empty() {
            found.push(places.len());
            let content = |place: &Place| {
                image[place.range.start as usize..place.range.end as usize].to_vec()
            };
            places = classes.go_on(&places.iter().map(content).collect::<Vec<_>>());
        }
        found
    }

    #[test]
    fn classes_of_the_image_are_followed_for_one_step_from_those_of_archives() {
        let (file, bytes) = image();
        let main = forge::class(&["app/Other"], &[]);
        let other = forge::class(&[], &["lib.A"]);
        let mut classes = Classes::default();
        classes.add_image(&file, &bytes);
        classes.add_archive(forge::archive(&[("app/Main.class", &main)]));
        classes.add_archive(forge::archive(&[("app/Other.class", &other)]));
        classes.add_archive(b"no archive".to_vec());
        classes.add_main(b"app.Main");
        assert_eq!(steps(&mut classes, &bytes), [1, 1]);
    }

    #[test]
    fn classes_of_a_program_of_the_image_are_followed_further() {
        let (file, bytes) = image();
        let mut classes = Classes::default();
        classes.add_image(&file, &bytes);
        classes.add_main(b"lib.A");
        assert_eq!(steps(&mut classes, &bytes), [1, 1, 1, 1]);
        let mut unknown = Classes::default();
        unknown.add_main(b"lib.A");
        assert!(unknown.begin().is_empty() && unknown.go_on(&[bytes]).is_empty());
    }

    #[test]
    fn parts_of_the_image_are_guessed_once_with_what_the_kernel_reads_around_them() {
        const MIB: u64 = 1 << 20;
        let (mut file, bytes) = image();
        file.size = 9 * MIB;
        let mut classes = Classes::default();
        classes.add_image(&file, &bytes);
        let place = |start: u64| Place { range: start..start + 1, is_opaque: false };
        let places = [place(2 * MIB), place(4 * MIB), place(9 * MIB / 2)];
        let parts = classes.parts(&places, 3 * MIB);
        // The last one has the packages.
        let expected = [7 * MIB / 2..5 * MIB + BLOCK, 9 * MIB - BLOCK..9 * MIB];
        assert_eq!(parts, expected);
        assert!(classes.parts(&places[1..2], 3 * MIB).is_empty());
        let more = classes.parts(&[place(5 * MIB)], 3 * MIB);
        assert_eq!(more.first(), Some(&(5 * MIB + BLOCK..11 * MIB / 2 + BLOCK)));
        assert_eq!(more.len(), 1);
    }

    #[test]
    fn places_bigger_than_any_class_are_no_parts() {
        let (mut file, bytes) = image();
        file.size = 1 << 40;
        let mut classes = Classes::default();
        classes.add_image(&file, &bytes);
        let place = |range| Place { range, is_opaque: false };
        let places = [place(0..file.size), place(file.size / 2..u64::MAX)];
        let parts = classes.parts(&places, 0);
        assert_eq!(parts.first(), Some(&(file.size - BLOCK..file.size)));
        assert_eq!(parts.len(), 1);
    }
}
