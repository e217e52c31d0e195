//! Java archives (ZIP): their classes.

use std::{collections::HashMap, io::Read as _};

use flate2::bufread::DeflateDecoder;

/// What ends an archive, without its comment; and how long that may be.
const END: usize = 22;
const COMMENT: usize = 1 << 16;

/// Bytes of one class.
pub(super) const CLASS: usize = 1 << 20;

/// Bytes of the archives of one program, and classes in them.
const BYTES: usize = 64 << 20;
const CLASSES: usize = 1 << 17;

/// The archives of a class path.
#[derive(Debug, Default)]
pub(super) struct Archives {
    archives: Vec<Vec<u8>>,
    /// The classes by `package/Class`: positions of their archives, and places of their headers.
    classes: HashMap<Vec<u8>, (usize, usize)>,
}

impl Archives {
    /// Adds an archive with classes, unless it is one too many. The first one with a class counts.
    pub(super) fn add(&mut self, bytes: Vec<u8>) {
        let known: usize = self.archives.iter().map(Vec::len).sum();
        if known + bytes.len() > BYTES {
            return;
        }
        let classes = directory(&bytes).unwrap_or_default();
        if classes.is_empty() {
            return;
        }
        for (name, at) in classes {
            if self.classes.len() >= CLASSES {
                break;
            }
            self.classes.entry(name.to_vec()).or_insert((self.archives.len(), at));
        }
        self.archives.push(bytes);
    }

    /// The content of a class, as far as it can be read. Takes its bytes, stored and decompressed,
    /// from `room`, beyond which nothing is read.
    pub(super) fn class(&self, name: &[u8], room: &mut usize) -> Option<Vec<u8>> {
        let (archive, at) = *self.classes.get(name)?;
        let header = self.archives[archive].get(at..)?;
        let data = header.get(30 + short(header, 26)? + short(header, 28)?..)?;
        let limit = CLASS.min(*room);
        // The size may be behind the content.
        let stored = match long(header, 18)? {
            0 => limit.min(data.len()),
            size => size,
        };
        let data = data.get(..stored).filter(|data| data.len() <= limit)?;
        let (class, read) = match short(header, 8)? {
            0 => (data.to_vec(), stored),
            8 => {
                let mut class = Vec::new();
                let mut inflated = DeflateDecoder::new(data).take(limit as u64);
                let _ = inflated.read_to_end(&mut class);
                (class, inflated.get_ref().total_in() as usize)
            }
            _ => return None,
        };
        *room -= read.max(class.len());
        Some(class)
    }
}

/// The classes in the directory of an archive, which is at its end, with the places of their
/// headers.
fn directory(bytes: &[u8]) -> Option<Vec<(&[u8], usize)>> {
    let last = bytes.len().checked_sub(END)?;
    let first = last.saturating_sub(COMMENT);
    let is_end = |at: &usize| bytes[*at..].starts_with(b"PK\x05\x06");
    let end = (first..=last).rev().find(is_end)?;
    let mut at = long(bytes, end + 16)?;
    let mut classes = Vec::new();
    for _ in 0..short(bytes, end + 10)? {
        let entry = bytes.get(at..).filter(|entry| entry.starts_with(b"PK\x01\x02"))?;
        let (name, more) = (short(entry, 28)?, short(entry, 30)? + short(entry, 32)?);
        if let Some(class) = entry.get(46..46 + name)?.strip_suffix(b".class") {
            classes.push((class, long(entry, 42)?));
        }
        at = at.checked_add(46 + name + more)?;
    }
    Some(classes)
}

/// Every class of an archive.
#[cfg(fuzzing)]
pub(super) fn fuzz(bytes: &[u8]) {
    let mut archives = Archives::default();
    archives.add(bytes.to_vec());
    let mut room = 8 * CLASS;
    archives.classes.keys().for_each(|name| drop(archives.class(name, &mut room)));
}

fn short(bytes: &[u8], at: usize) -> Option<usize> {
    let bytes = bytes.get(at..at.checked_add(2)?)?;
    Some(usize::from(u16::from_le_bytes([bytes[0], bytes[1]])))
}

fn long(bytes: &[u8], at: usize) -> Option<usize> {
    let bytes = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_le_bytes(bytes.try_into().ok()?) as usize)
}

#[cfg(test)]
mod tests {
    use super::{super::forge::archive, *};

    fn open(bytes: &[u8]) -> Archives {
        let mut archives = Archives::default();
        archives.add(bytes.to_vec());
        archives
    }

    #[test]
    fn classes_of_an_archive_are_found_by_its_directory() {
        let bytes =
            archive(&[("a/B.class", b"stored"), ("C.class", b"deflated"), ("d.txt", b"no")]);
        let found = open(&bytes);
        let mut room = 20;
        assert_eq!(found.class(b"a/B", &mut room).unwrap(), b"stored");
        assert_eq!(found.class(b"C", &mut room).unwrap(), b"deflated");
        assert_eq!((found.class(b"d", &mut room), found.classes.len()), (None, 2));
        assert_eq!(found.class(b"a/B", &mut 5), None);
        (0..bytes.len()).for_each(|len| assert_eq!(directory(&bytes[..len]), None));
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0xff;
            let damaged = open(&damaged);
            let mut room = CLASS;
            for name in [&b"a/B"[..], b"C"] {
                drop(damaged.class(name, &mut room));
            }
        }
    }

    #[test]
    fn what_is_decompressed_counts_even_if_nothing_is_left_for_it() {
        let bytes = archive(&[("a", b""), ("A.class", &vec![0; CLASS])]);
        let found = open(&bytes);
        let mut room = CLASS + CLASS / 2;
        let lens = [(); 3].map(|()| found.class(b"A", &mut room).map_or(0, |class| class.len()));
        assert_eq!((lens, room), ([CLASS, CLASS / 2, 0], 0));
    }
}
