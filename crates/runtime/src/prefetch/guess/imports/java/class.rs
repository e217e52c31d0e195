//! Class files: the classes that a class names in its constants.

use std::collections::HashSet;

/// How a class file begins.
pub(super) const MAGIC: &[u8] = b"\xca\xfe\xba\xbe";

/// Bytes of one name.
const LONGEST: usize = 512;

/// The classes that a class refers to, as `package/Class`: those of its code, and texts that are
/// names of classes, which may be loaded by these.
pub(super) fn named(class: &[u8]) -> Vec<&[u8]> {
    let mut names = Vec::new();
    read(class, &mut names);
    names
}

fn read<'a>(class: &'a [u8], names: &mut Vec<&'a [u8]>) -> Option<()> {
    let mut rest = class.strip_prefix(MAGIC)?.get(4..)?;
    let mut take = |len: usize| {
        let (taken, after) = rest.split_at_checked(len)?;
        rest = after;
        Some(taken)
    };
    let short = |bytes: &[u8]| usize::from(u16::from_be_bytes([bytes[0], bytes[1]]));
    let count = short(take(2)?);
    // By the positions of their constants, which begin at 1.
    let mut texts: Vec<&[u8]> = vec![b""];
    let (mut classes, mut strings) = (Vec::new(), Vec::new());
    let mut known = HashSet::new();
    while texts.len() < count {
        let mut text: &[u8] = b"";
        match take(1)?[0] {
            1 => {
                let len = short(take(2)?);
                text = take(len)?;
            }
            tag @ (7 | 8) => {
                let at = short(take(2)?);
                // Any number of constants may refer to the same text.
                if known.insert((tag, at)) {
                    if tag == 7 { classes.push(at) } else { strings.push(at) }
                }
            }
            16 | 19 | 20 => drop(take(2)?),
            15 => drop(take(3)?),
            // Numbers of eight bytes count twice.
            5 | 6 => {
                take(8)?;
                texts.push(b"");
            }
            3 | 4 | 9..=12 | 17 | 18 => drop(take(4)?),
            _ => return None,
        }
        texts.push(text);
    }
    let text = |at: &usize| texts.get(*at).copied().filter(|text| text.len() <= LONGEST);
    names.extend(classes.iter().filter_map(text).filter_map(element));
    names.extend(strings.iter().filter_map(text).filter(|text| is_dotted(text)));
    Some(())
}

/// A class, or the one of an array's elements.
fn element(name: &[u8]) -> Option<&[u8]> {
    let dimensions = name.iter().take_while(|byte| **byte == b'[').count();
    match dimensions {
        0 => Some(name),
        _ => name[dimensions..].strip_prefix(b"L")?.strip_suffix(b";"),
    }
}

/// Returns whether a text may be the name of a class with its package.
fn is_dotted(text: &[u8]) -> bool {
    let is_of_name = |byte: &u8| byte.is_ascii_alphanumeric() || b"_$.".contains(byte);
    text.contains(&b'.') && text.iter().all(is_of_name)
}

#[cfg(test)]
mod tests {
    use super::{super::forge::class, *};

    #[test]
    fn a_class_names_others_in_its_code_and_in_texts() {
        let file = class(&["a/B", "[[La/C;", "[I"], &["a.b.D", "no name.", "text"]);
        assert_eq!(named(&file), [&b"a/B"[..], b"a/C", b"a.b.D"]);
        (0..file.len()).for_each(|len| assert!(named(&file[..len]).is_empty()));
    }

    #[test]
    fn names_are_short_and_no_constant_counts_twice() {
        for (len, expected) in [(LONGEST, 1), (LONGEST + 1, 0), (65_000, 0)] {
            let text = [&[1][..], &(len as u16).to_be_bytes(), &vec![b'a'; len]].concat();
            let file = [MAGIC, &[0, 0, 0, 61, 1, 0], &text, &[7, 0, 1].repeat(254)].concat();
            assert_eq!(named(&file).len(), expected, "{len}");
        }
    }
}
