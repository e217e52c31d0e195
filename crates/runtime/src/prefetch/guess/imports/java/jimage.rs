//! The run-time image of Java, `lib/modules`: where its classes are.
//!
//! It begins with a header, two tables for look-ups by hash, the attributes of each resource, and
//! texts. Then come the resources, module by module.

use std::{collections::HashMap, ops::Range};

/// Begins the header of seven numbers of four bytes, in the order of the machine.
pub(super) const MAGIC: u32 = 0xcafe_dada;
const HEADER: usize = 28;

/// Resources of one image: OpenJDK 17 has 29,000.
const RESOURCES: usize = 1 << 17;

/// Bytes of one name.
const LONGEST: usize = 256;

/// Bytes of the names of all classes. Resources may share long texts.
const NAMES: usize = 8 << 20;

/// Attributes of one resource, which are of as many kinds.
const ATTRIBUTES: usize = 8;

/// Kinds of attributes.
const MODULE: usize = 1;
const PARENT: usize = 2;
const BASE: usize = 3;
const EXTENSION: usize = 4;
const OFFSET: usize = 5;
const COMPRESSED: usize = 6;
const SIZE: usize = 7;

/// A class in the image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in super::super::super) struct Place {
    pub(in super::super::super) range: Range<u64>,
    /// Whether its content is not needed: it is compressed, or of the module that each start needs.
    pub(in super::super::super) is_opaque: bool,
}

/// The classes of an image, as `package/Class`, from the beginning of its file. `None` if that is
/// no index, or not all of one.
pub(super) fn classes(head: &[u8]) -> Option<HashMap<Vec<u8>, Place>> {
    let number = |at: usize| {
        let bytes = head.get(at..at.checked_add(4)?)?;
        Some(u32::from_le_bytes(bytes.try_into().ok()?) as usize)
    };
    if number(0)? != MAGIC as usize {
        return None;
    }
    let (length, locations_size, texts_size) = (number(16)?, number(20)?, number(24)?);
    if length > RESOURCES {
        return None;
    }
    let offsets = HEADER + length * 4;
    let locations = offsets + length * 4;
    let texts = locations.checked_add(locations_size)?;
    let data = texts.checked_add(texts_size)?;
    let text = |at: usize| {
        let rest = head.get(texts.checked_add(at)?..data)?;
        rest[..rest.len().min(LONGEST)].split(|byte| *byte == 0).next()
    };
    head.get(..data)?;
    let mut classes = HashMap::new();
    let mut room = NAMES;
    for resource in 0..length {
        let at = locations.checked_add(number(offsets + resource * 4)?)?;
        let attributes = attributes(head.get(at..texts)?)?;
        if text(attributes[EXTENSION])? != b"class" {
            continue;
        }
        let stored = match attributes[COMPRESSED] {
            0 => attributes[SIZE],
            compressed => compressed,
        };
        let start = (data as u64).checked_add(attributes[OFFSET] as u64)?;
        let range = start..start.checked_add(stored as u64)?;
        let is_base = text(attributes[MODULE])? == b"java.base";
        let place = Place { range, is_opaque: is_base || attributes[COMPRESSED] != 0 };
        let name = [text(attributes[PARENT])?, text(attributes[BASE])?].join(&b'/');
        room = room.checked_sub(name.len())?;
        classes.insert(name, place);
    }
    Some(classes)
}

/// The attributes of a resource by their kinds: bytes with kind and length, each before a number.
fn attributes(mut bytes: &[u8]) -> Option<[usize; ATTRIBUTES]> {
    let mut attributes = [0; ATTRIBUTES];
    for _ in 0..=ATTRIBUTES {
        let (first, rest) = bytes.split_first()?;
        let (kind, len) = (usize::from(first >> 3), usize::from(first & 7) + 1);
        if kind == 0 {
            return Some(attributes);
        }
        let (value, rest) = rest.split_at_checked(len)?;
        let value = value.iter().fold(0, |number, byte| number << 8 | usize::from(*byte));
        *attributes.get_mut(kind)? = value;
        bytes = rest;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::{super::forge::image, *};

    #[test]
    fn classes_are_found_by_their_names() {
        let names = [["m", "a/b", "C"], ["n", "d", "E"]];
        let file = image(&names, &[b"first".to_vec(), b"second".to_vec()]);
        let classes_of_file = classes(&file).unwrap();
        assert_eq!(classes_of_file.len(), 2);
        for (name, content) in [(&b"a/b/C"[..], &b"first"[..]), (b"d/E", b"second")] {
            let range = &classes_of_file[name].range;
            assert_eq!(&file[range.start as usize..range.end as usize], content);
        }
        let data = file.len() - b"firstsecond".len();
        (0..data).for_each(|len| assert_eq!(classes(&file[..len]), None));
        (HEADER..data).for_each(|at| {
            let mut damaged = file.clone();
            damaged[at] ^= 0xff;
            drop(classes(&damaged));
        });
    }

    #[test]
    fn long_names_that_resources_share_are_bounded() {
        let long = "a".repeat(LONGEST);
        let file = image(&[["m", &long, &long]], &[Vec::new()]);
        let most = NAMES / (2 * LONGEST + 1);
        for (count, is_sound) in [(most, true), (most + 1, false)] {
            let length = (count as u32).to_le_bytes();
            let header = [&file[..12], &length, &length, &file[20..HEADER]].concat();
            // All offsets lead to the same attributes.
            let file = [&header, &vec![0; 8 * count][..], &file[HEADER + 8..]].concat();
            assert_eq!(classes(&file).is_some(), is_sound, "{count}");
        }
    }
}
