//! Java archives (ZIP): their classes.

use std::{collections::HashMap, io::Read as _};

use flate2::read::DeflateDecoder;

/// What ends an archive, without its comment; and how long that may be.
const END: usize = 22;
const COMMENT: usize = 1 << 16;

/// Bytes of one class.
const CLASS: usize = 1 << 20;

/// An archive whose bytes are known.
#[derive(Debug)]
pub(super) struct Archive {
    bytes: Vec<u8>,
    /// The places of the classes' headers, by `package/Class`.
    classes: HashMap<Vec<u8>, usize>,
}

impl Archive {
    /// Reads the directory of an archive, which is at its end.
    pub(super) fn open(bytes: Vec<u8>) -> Option<Self> {
        let last = bytes.len().checked_sub(END)?;
        let first = last.saturating_sub(COMMENT);
        let is_end = |at: &usize| bytes[*at..].starts_with(b"PK\x05\x06");
        let end = (first..=last).rev().find(is_end)?;
        let mut at = long(&bytes, end + 16)?;
        let mut classes = HashMap::new();
        for _ in 0..short(&bytes, end + 10)? {
            let entry = bytes.get(at..).filter(|entry| entry.starts_with(b"PK\x01\x02"))?;
            let (name, more) = (short(entry, 28)?, short(entry, 30)? + short(entry, 32)?);
            if let Some(class) = entry.get(46..46 + name)?.strip_suffix(b".class") {
                classes.insert(class.to_vec(), long(entry, 42)?);
            }
            at = at.checked_add(46 + name + more)?;
        }
        Some(Archive { bytes, classes })
    }

    /// The content of a class, as far as it can be read. Takes its bytes, stored and decompressed,
    /// from `room`, beyond which nothing is read.
    pub(super) fn class(&self, name: &[u8], room: &mut usize) -> Option<Vec<u8>> {
        let header = self.bytes.get(*self.classes.get(name)?..)?;
        let data = header.get(30 + short(header, 26)? + short(header, 28)?..)?;
        // The size may be behind the content.
        let stored = match long(header, 18)? {
            0 => CLASS.min(data.len()),
            size => size,
        };
        let data = data.get(..stored).filter(|data| data.len() <= *room)?;
        let class = match short(header, 8)? {
            0 => data.to_vec(),
            8 => {
                let mut class = Vec::new();
                let _ = DeflateDecoder::new(data).take(CLASS as u64).read_to_end(&mut class);
                class
            }
            _ => return None,
        };
        *room = room.checked_sub(stored.min(CLASS).max(class.len()))?;
        Some(class)
    }

    pub(super) fn len(&self) -> usize {
        self.bytes.len()
    }
}

/// Every class of an archive.
#[cfg(fuzzing)]
pub(super) fn fuzz(bytes: &[u8]) {
    if let Some(archive) = Archive::open(bytes.to_vec()) {
        let mut room = 8 * CLASS;
        archive.classes.keys().for_each(|name| drop(archive.class(name, &mut room)));
    }
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

    #[test]
    fn classes_of_an_archive_are_found_by_its_directory() {
        let bytes =
            archive(&[("a/B.class", b"stored"), ("C.class", b"deflated"), ("d.txt", b"no")]);
        let found = Archive::open(bytes.clone()).unwrap();
        let mut room = 20;
        assert_eq!(found.class(b"a/B", &mut room).unwrap(), b"stored");
        assert_eq!(found.class(b"C", &mut room).unwrap(), b"deflated");
        assert_eq!((found.class(b"d", &mut room), found.classes.len()), (None, 2));
        assert_eq!(found.class(b"a/B", &mut 5), None);
        (0..bytes.len()).for_each(|len| assert!(Archive::open(bytes[..len].to_vec()).is_none()));
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0xff;
            let damaged = Archive::open(damaged);
            let mut room = CLASS;
            for name in [&b"a/B"[..], b"C"] {
                drop(damaged.as_ref().map(|archive| archive.class(name, &mut room)));
            }
        }
    }
}
