//! Class files: the classes that a class names in its constants.

/// How a class file begins.
pub(super) const MAGIC: &[u8] = b"\xca\xfe\xba\xbe";

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
    let mut texts: Vec<&[u8]> = vec![b""; count];
    let (mut classes, mut strings) = (Vec::new(), Vec::new());
    let mut at = 1;
    while at < count {
        match take(1)?[0] {
            1 => {
                let len = short(take(2)?);
                texts[at] = take(len)?;
            }
            7 => classes.push(short(take(2)?)),
            8 => strings.push(short(take(2)?)),
            16 | 19 | 20 => drop(take(2)?),
            15 => drop(take(3)?),
            // Numbers of eight bytes count twice.
            5 | 6 => {
                take(8)?;
                at += 1;
            }
            3 | 4 | 9..=12 | 17 | 18 => drop(take(4)?),
            _ => return None,
        }
        at += 1;
    }
    let text = |at: &usize| texts.get(*at).copied().unwrap_or_default();
    names.extend(classes.iter().map(text).filter_map(element));
    names.extend(strings.iter().map(text).filter(|text| is_dotted(text)));
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
}
