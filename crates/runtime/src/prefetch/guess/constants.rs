//! Names in the constants of programs and libraries, for the image's maker: a node would have to
//! fetch all of each.
//!
//! A compiler ends a constant text with a zero byte. Some texts name what a program opens or loads
//! by itself: files of the image, and Python's modules.

use std::collections::HashSet;

use super::{
    Content, Piece, imports::Import, paths::Found, settings::may_have_settings, state::Guess,
};

/// Maximum size of a program or library that is searched. Bigger ones hold tables and code, and
/// there are few names among millions of texts.
const SEARCHED: u64 = 64 << 20;

/// Bytes of one read.
const READ: u64 = 1 << 20;

/// Lengths of a name.
const SHORTEST: usize = 4;
const LONGEST: usize = 128;

/// Names of one file. Real libraries have some hundred.
const NAMES: usize = 1 << 14;

/// Maximum size of a named file. Bigger ones are read in parts, if at all.
const NAMED: u64 = 128 << 10;

/// The texts in a program's constants that could be names.
pub(super) async fn names(content: &dyn Content, file: &Found) -> HashSet<Vec<u8>> {
    let (mut names, mut before) = (HashSet::new(), Vec::new());
    let mut at = 0;
    while at < file.size && file.size <= SEARCHED && names.len() < NAMES {
        let range = at..file.size.min(at + READ);
        let Some(bytes) = content.read(&Piece { file: file.nid, range }).await else { break };
        at += READ;
        before.extend(bytes);
        let end = before.iter().rposition(|byte| *byte == 0).unwrap_or_default();
        let rest = before.split_off(end);
        let room = NAMES - names.len();
        names.extend(texts(&before).map(<[u8]>::to_vec).take(room));
        // What is longer is no name, whatever follows.
        before = if rest.len() <= LONGEST + 1 { rest } else { Vec::new() };
    }
    names
}

/// Texts between zeros that could be a path, or a name with a dot; also that before the end.
fn texts(bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    let is_part = |byte: &u8| byte.is_ascii_alphanumeric() || b"._-+/".contains(byte);
    let is_name = move |text: &&[u8]| {
        (SHORTEST..=LONGEST).contains(&text.len())
            && text.iter().all(is_part)
            && (text.contains(&b'.') || text[0] == b'/')
    };
    bytes.split(|byte| *byte == 0).skip(1).filter(is_name)
}

impl<B: AsRef<[u8]>> Guess<'_, B> {
    /// Adds what the constants of a program or library name.
    pub(super) fn follow_constants(&mut self, file: &Found, names: &HashSet<Vec<u8>>) {
        // The same image gives the same guess.
        let mut names: Vec<_> = names.iter().map(Vec::as_slice).collect();
        names.sort_unstable();
        if let Some(imports) = self.extensions.get(&file.nid).cloned() {
            let mut found: Vec<Import> = Vec::new();
            for name in names {
                if self.paths.is_spent() {
                    break;
                }
                found.extend(imports.named(&mut self.paths, name));
            }
            return self.add_imports(&imports, found);
        }
        let has_settings = self.is_run(file) && may_have_settings(file.name());
        for name in names {
            if has_settings && let Some(directory) = self.named_directory(name) {
                self.add_constant_directory(&directory);
            } else if let Some(found) = self.named(name)
                && let Some(left) = self.named_left.checked_sub(found.size)
            {
                self.named_left = left;
                self.want(&found);
            }
        }
    }

    /// The directory that a constant names.
    fn named_directory(&mut self, name: &[u8]) -> Option<Vec<u8>> {
        if name.starts_with(b"/") { self.paths.directory(b"/", name) } else { None }
    }

    /// The file that a constant names, by a path or by a name that no other file has. Libraries are
    /// not meant: most of those that are named are for cases which do not occur.
    fn named(&mut self, name: &[u8]) -> Option<Found> {
        let found = match name.contains(&b'/') {
            true if name.starts_with(b"/") => self.paths.file(b"/", name)?,
            false if name.contains(&b'.') => self.paths.only(name)?,
            true | false => return None,
        };
        let may_be_read = !found.is_library() && !found.is_executable && found.size <= NAMED;
        (may_be_read && !self.is_known(&found)).then_some(found)
    }
}

#[cfg(fuzzing)]
pub(crate) mod fuzz {
    /// Every name in the bytes, as if they were constants.
    pub fn constants(bytes: &[u8]) {
        super::texts(bytes).for_each(|name| assert!(!name.is_empty()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_end_with_zeros_and_begin_behind_them() {
        let found = |bytes: &[u8]| texts(bytes).map(<[u8]>::to_vec).collect::<Vec<_>>();
        let bytes = b"head\0a.conf\0two words.x\0a.b\0plain\0/etc/x\0tail.x";
        assert_eq!(found(bytes), [&b"a.conf"[..], b"/etc/x", b"tail.x"]);
        assert!(found(b"\0\xff\xfeab.so\0").is_empty());
        assert!(found(&[&[0][..], &[b'a'; 129], &[0]].concat()).is_empty());
    }
}
