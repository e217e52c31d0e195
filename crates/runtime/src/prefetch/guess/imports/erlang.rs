//! Erlang's boot files: the modules that they load, and the directories of these.
//!
//! Boot files are terms in Erlang's external format: a script of `{primLoad, [Module…]}` and
//! `{path, [Directory…]}`, up to `{kernel_load_completed}`, after which modules are loaded when
//! they are called.

use super::{super::paths::Paths, Import, Imports};

/// Terms of one boot file, and bytes of one name.
const TERMS: usize = 1 << 16;
const LONGEST: usize = 1024;

/// After this nothing is loaded that is not called.
const LOADED: &[u8] = b"kernel_load_completed";

/// Modules and directories in the order of the script. Directories may begin with `$ROOT`.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Boot {
    pub(super) modules: Vec<Vec<u8>>,
    pub(super) directories: Vec<Vec<u8>>,
}

/// Reads a `.boot` file as far as it can be understood.
pub(super) fn boot(file: &[u8]) -> Boot {
    /// Version of the external format.
    const VERSION: u8 = 131;
    let mut boot = Boot::default();
    let mut reader = Reader { rest: file };
    if reader.take(1) != Some(&[VERSION]) {
        return boot;
    }
    let mut is_loaded = false;
    for _ in 0..TERMS {
        match reader.next() {
            Some(Term::Atom(LOADED)) => is_loaded = true,
            Some(Term::Atom(name)) if !is_loaded => boot.modules.push(name.to_vec()),
            Some(Term::Text(text)) if text.contains(&b'/') => boot.directories.push(text.to_vec()),
            Some(_) => {}
            None => break,
        }
    }
    boot
}

impl Imports {
    pub(super) fn follow_boot(
        &self,
        paths: &mut Paths<'_, impl AsRef<[u8]>>,
        bytes: &[u8],
    ) -> Vec<Import> {
        let boot = boot(bytes);
        let root = self.roots.first().map(Vec::as_slice).unwrap_or_default();
        let places: Vec<_> = boot
            .directories
            .iter()
            .map(|path| match path.strip_prefix(b"$ROOT") {
                Some(rest) => [root, rest].concat(),
                None => path.clone(),
            })
            .collect();
        let of_name = |name: &Vec<u8>| {
            let file = [name, &b".beam"[..]].concat();
            places.iter().find_map(|place| paths.known(place, &file))
        };
        boot.modules.iter().filter_map(of_name).map(Import::Data).collect()
    }
}

enum Term<'a> {
    Atom(&'a [u8]),
    Text(&'a [u8]),
    Other,
}

/// Reads terms sequentially, regardless of nesting.
struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.rest.split_at_checked(count)?;
        self.rest = rest;
        Some(taken)
    }

    fn number(&mut self, bytes: usize) -> Option<usize> {
        Some(self.take(bytes)?.iter().fold(0, |number, byte| number << 8 | usize::from(*byte)))
    }

    fn named(&mut self, bytes: usize) -> Option<&'a [u8]> {
        let len = self.number(bytes)?;
        self.take(len)
    }

    fn next(&mut self) -> Option<Term<'a>> {
        let tag = self.take(1)?[0];
        let short = |text: &'a [u8]| if text.len() <= LONGEST { text } else { b"" };
        Some(match tag {
            // Atoms: of Latin-1 and of UTF-8, with a length of one byte or two.
            b'd' | b'v' => Term::Atom(short(self.named(2)?)),
            b's' | b'w' => Term::Atom(short(self.named(1)?)),
            // Strings and binaries.
            b'k' => Term::Text(short(self.named(2)?)),
            b'm' => Term::Text(short(self.named(4)?)),
            // Tuples and lists: their elements follow.
            b'h' => self.take(1).map(|_| Term::Other)?,
            b'i' | b'l' => self.take(4).map(|_| Term::Other)?,
            b'j' => Term::Other,
            // Numbers.
            b'a' => self.take(1).map(|_| Term::Other)?,
            b'b' => self.take(4).map(|_| Term::Other)?,
            b'F' => self.take(8).map(|_| Term::Other)?,
            b'n' => {
                let len = self.number(1)?;
                self.take(len + 1).map(|_| Term::Other)?
            }
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_boot_file_names_modules_and_directories() {
        let atom = |name: &str| [&[b'd', 0, name.len() as u8], name.as_bytes()].concat();
        let text = |text: &str| [&[b'k', 0, text.len() as u8], text.as_bytes()].concat();
        let file = [
            vec![131, b'h', 2],
            atom("script"),
            vec![b'l', 0, 0, 0, 3, b'h', 2],
            text("$ROOT/lib/kernel/ebin"),
            atom("code"),
            vec![b'a', 7, b'n', 1, 0, 9],
            atom("kernel_load_completed"),
            atom("lists"),
            vec![b'j'],
        ]
        .concat();
        let expected = Boot {
            modules: vec![b"script".to_vec(), b"code".to_vec()],
            directories: vec![b"$ROOT/lib/kernel/ebin".to_vec()],
        };
        assert_eq!(boot(&file), expected);
        (0..file.len()).for_each(|len| drop(boot(&file[..len])));
        assert_eq!(boot(b"text"), Boot::default());
    }
}
