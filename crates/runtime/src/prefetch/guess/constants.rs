//! Names in the constants of programs and libraries, for the image's maker: a node would have to
//! fetch all of each.
//!
//! A compiler ends a constant text with a zero byte. Some texts name what a program opens, loads or
//! runs by itself: files of the image, Python's modules, and commands for a shell.

use std::collections::HashSet;

use super::{
    Content, Piece,
    imports::Import,
    linker::Asker,
    paths::Found,
    settings::may_have_settings,
    state::{Guess, Role},
};

/// Maximum size of a program or library that is searched for names of files anywhere. Bigger ones
/// hold tables and code, and there are few names among millions of texts.
const SEARCHED: u64 = 64 << 20;

/// Maximum size of a program that is searched for the files beside it.
const SEARCHED_FOR_BESIDE: u64 = 384 << 20;

/// Bytes of one read.
const READ: u64 = 1 << 20;

/// Lengths of a name, and of a command.
const SHORTEST: usize = 4;
const LONGEST: usize = 128;
const LONGEST_COMMAND: usize = 512;

/// Names of one file. Real libraries have some hundred.
const NAMES: usize = 1 << 14;

/// Maximum size of a named file. Bigger ones are read in parts, if at all.
const NAMED: u64 = 128 << 10;

/// Maximum size of a program that a path names. Most of those that are named are not run.
const NAMED_PROGRAM: u64 = 256 << 10;

/// The shell that C libraries start.
const SHELL: &[u8] = b"/bin/sh";

/// A program, library or compiled module whose constants are searched.
#[derive(Debug)]
pub(super) struct Search {
    file: Found,
    /// Names of what is beside a program, which count however big the file is.
    beside: HashSet<Vec<u8>>,
}

/// The texts in a program's constants that could be names.
pub(super) async fn names(
    content: &dyn Content,
    Search { file, beside }: &Search,
) -> HashSet<Vec<u8>> {
    let (mut names, mut before) = (HashSet::new(), Vec::new());
    let mut room = if file.size <= SEARCHED { NAMES } else { 0 };
    let mut at = 0;
    while at < file.size && (room > 0 || !beside.is_empty()) {
        let range = at..file.size.min(at + READ);
        let Some(bytes) = content.read(&Piece { file: file.nid, range }).await else { break };
        at += READ;
        before.extend(bytes);
        let end = before.iter().rposition(|byte| *byte == 0).unwrap_or_default();
        let rest = before.split_off(end);
        for text in texts(&before) {
            if beside.contains(text) {
                names.insert(text.to_vec());
            } else if room > 0 && is_likely(text) && names.insert(text.to_vec()) {
                room -= 1;
            }
        }
        // What is longer is neither, whatever follows.
        before = if rest.len() <= LONGEST_COMMAND + 1 { rest } else { Vec::new() };
    }
    names
}

/// Texts between zeros that could be a path, a name or a command; also that before the end.
fn texts(bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    let is_part = |byte: &u8| byte.is_ascii_alphanumeric() || b"._-+/".contains(byte);
    let is_name =
        move |text: &[u8]| (SHORTEST..=LONGEST).contains(&text.len()) && text.iter().all(is_part);
    let texts = bytes.split(|byte| *byte == 0).skip(1);
    texts.filter(move |text| is_name(text) || is_command(text))
}

/// Returns whether a text is a path, a command, or a name with a dot.
fn is_likely(text: &[u8]) -> bool {
    text.contains(&b'.') || text[0] == b'/' || is_command(text)
}

/// Returns whether a text is for a shell, which it tells to become another program.
fn is_command(text: &[u8]) -> bool {
    text.starts_with(b"exec ") && text.len() <= LONGEST_COMMAND
}

impl<B: AsRef<[u8]>> Guess<'_, B> {
    /// Takes a program or library whose constants may name files.
    pub(super) fn take_search(&mut self) -> Option<Search> {
        while let Some(file) = self.unsearched.pop_front()
            && !self.paths.is_spent()
        {
            let beside = match self.is_run(&file) && file.size <= SEARCHED_FOR_BESIDE {
                true => self.names_beside(&file),
                false => HashSet::new(),
            };
            let is_searched = file.size <= SEARCHED || !beside.is_empty();
            if is_searched && let Some(left) = self.search_left.checked_sub(file.size) {
                self.search_left = left;
                return Some(Search { file, beside });
            }
        }
        None
    }

    /// The names of the files beside a program, if its directory is its own.
    fn names_beside(&mut self, program: &Found) -> HashSet<Vec<u8>> {
        for place in self.process.search_path() {
            if self.paths.directory(b"/", &place).as_deref() == Some(program.directory()) {
                return HashSet::new();
            }
        }
        self.paths.names_in(program.directory())
    }

    /// Adds what the constants of a program or library name.
    pub(super) fn follow_constants(&mut self, search: &Search, names: &HashSet<Vec<u8>>) {
        let Search { file, beside } = search;
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
        let is_run = self.is_run(file);
        let has_settings = is_run && may_have_settings(file.name());
        for name in names {
            if is_command(name) {
                if is_run {
                    self.run(&[SHELL.to_vec()]);
                    self.follow_script(&file.path, name, &[]);
                }
            } else if beside.contains(name) {
                self.add_beside(file, name);
            } else if has_settings && let Some(directory) = self.named_directory(name) {
                self.add_constant_directory(&directory);
            } else if let Some(found) = self.named(name, is_run)
                && let Some(left) = self.named_left.checked_sub(found.size)
            {
                self.named_left = left;
                self.add_named(found);
            }
        }
    }

    /// Adds what a program names of the files beside it.
    fn add_beside(&mut self, program: &Found, name: &[u8]) {
        if let Some(file) = self.paths.file(program.directory(), name)
            && !self.is_known(&file)
        {
            self.add_named(file);
        }
    }

    /// Adds a file that a constant names. Of a program its libraries follow, and not what it runs:
    /// whether it is run is not known.
    fn add_named(&mut self, file: Found) {
        if file.is_library() || file.is_executable {
            self.visit(file, Role::Library(Asker::default()));
        } else {
            self.want(&file);
        }
    }

    /// The directory that a constant names.
    fn named_directory(&mut self, name: &[u8]) -> Option<Vec<u8>> {
        if name.starts_with(b"/") { self.paths.directory(b"/", name) } else { None }
    }

    /// The file that a constant names, by a path or by a name that no other file has. Libraries are
    /// not meant: most of those that are named are for cases which do not occur. Programs are, if
    /// the file with the constants is run and they are named by their paths.
    fn named(&mut self, name: &[u8], is_run: bool) -> Option<Found> {
        let found = match name.contains(&b'/') {
            true if name.starts_with(b"/") => self.paths.file(b"/", name)?,
            false if name.contains(&b'.') => self.paths.only(name)?,
            true | false => return None,
        };
        let most = match found.is_executable {
            true if is_run && name.starts_with(b"/") => NAMED_PROGRAM,
            true => return None,
            false => NAMED,
        };
        let may_be_read = !found.is_library() && found.size <= most;
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
        let bytes = b"head\0a.conf\0two words.x\0a.b\0plain\0/etc/x\0exec cc -o %s\0tail.x";
        let expected = [&b"a.conf"[..], b"plain", b"/etc/x", b"exec cc -o %s", b"tail.x"];
        assert_eq!(found(bytes), expected);
        assert!(
            !is_likely(b"plain") && expected.iter().filter(|text| is_likely(text)).count() == 4
        );
        assert!(found(b"\0\xff\xfeab.so\0").is_empty());
        assert!(found(&[&[0][..], &[b'a'; 129], &[0]].concat()).is_empty());
    }
}
