//! Erlang's boot files and modules: the modules that they load, and the directories of these.
//!
//! Boot files are terms in Erlang's external format: a script of `{primLoad, [Module…]}` and
//! `{path, [Directory…]}`, up to `{kernel_load_completed}`, after which modules are loaded when
//! they are called. Modules are IFF files with a table of what they call in others.

use std::collections::HashSet;

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

/// The modules that a compiled module calls, its own name first.
pub(super) fn called(file: &[u8]) -> Vec<Vec<u8>> {
    read_module(file).unwrap_or_default()
}

fn read_module(file: &[u8]) -> Option<Vec<Vec<u8>>> {
    let mut reader = Reader { rest: file };
    if reader.take(4)? != b"FOR1" || reader.take(8)?[4..] != *b"BEAM" {
        return None;
    }
    let mut atoms: Vec<&[u8]> = Vec::new();
    let mut called: Vec<Vec<u8>> = Vec::new();
    while let Some(name) = reader.take(4) {
        let len = reader.number(4)?;
        // The last part that is needed may be cut off.
        let mut part = Reader { rest: &reader.rest[..len.min(reader.rest.len())] };
        match name {
            b"AtU8" | b"Atom" => {
                let count = part.number(4)?;
                atoms.extend((0..count.min(TERMS)).map_while(|_| part.named(1)));
                called.extend(atoms.first().map(|own| own.to_vec()));
            }
            b"ImpT" => {
                let count = part.number(4)?;
                let mut known: HashSet<_> = atoms.first().into_iter().collect();
                for _ in 0..count.min(TERMS) {
                    // Module, function and arity; atoms count from 1.
                    let Some(module) = part.number(4) else { break };
                    part.take(8)?;
                    let Some(atom) = module.checked_sub(1).and_then(|at| atoms.get(at)) else {
                        continue;
                    };
                    if known.insert(atom) {
                        called.push(atom.to_vec());
                    }
                }
                return Some(called);
            }
            _ => {}
        }
        // Parts are padded to multiples of four bytes.
        reader.take(len.next_multiple_of(4))?;
    }
    Some(called)
}

impl Imports {
    /// A boot file of the installation, given by its path or by its name.
    pub(super) fn boot_file(
        &self,
        paths: &mut Paths<'_, impl AsRef<[u8]>>,
        name: &[u8],
    ) -> Option<Import> {
        let file = [name, b".boot"].concat();
        let named = name.contains(&b'/').then(|| paths.file(b"/", &file)).flatten();
        let places = self.roots.iter().map(|root| [root, &b"/bin"[..]].concat());
        let mut places = places.collect::<Vec<_>>().into_iter();
        named.or_else(|| places.find_map(|place| paths.file(&place, &file))).map(Import::Module)
    }

    /// A compiled module in one of the directories with modules, or in a library.
    pub(super) fn erlang_module(
        &self,
        paths: &mut Paths<'_, impl AsRef<[u8]>>,
        name: &[u8],
    ) -> Option<Import> {
        let file = [name, b".beam"].concat();
        self.roots.iter().find_map(|root| paths.known(root, &file)).map(Import::Module)
    }

    /// The modules that a module calls.
    pub(super) fn follow_beam(
        &self,
        paths: &mut Paths<'_, impl AsRef<[u8]>>,
        bytes: &[u8],
    ) -> Vec<Import> {
        let names = called(bytes);
        names.iter().skip(1).filter_map(|name| self.erlang_module(paths, name)).collect()
    }

    pub(super) fn follow_boot(
        &self,
        paths: &mut Paths<'_, impl AsRef<[u8]>>,
        bytes: &[u8],
    ) -> Vec<Import> {
        let boot = boot(bytes);
        let mut places = Vec::new();
        for path in &boot.directories {
            let Some(rest) = path.strip_prefix(b"$ROOT") else {
                places.push(path.clone());
                continue;
            };
            let of_root = |root: &Vec<u8>| paths.directory(b"/", &[root, rest].concat());
            places.extend(self.roots.iter().find_map(of_root));
        }
        let of_name = |name: &Vec<u8>| {
            let file = [name, &b".beam"[..]].concat();
            places.iter().find_map(|place| paths.known(place, &file))
        };
        boot.modules.iter().filter_map(of_name).map(Import::Module).collect()
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
    fn a_module_names_those_that_it_calls() {
        let part = |name: &[u8], content: &[u8]| {
            let padding = vec![0; content.len().next_multiple_of(4) - content.len()];
            [name, &(content.len() as u32).to_be_bytes(), content, &padding].concat()
        };
        let atoms = [&[0, 0, 0, 3][..], b"\x03own\x05lists\x03map"].concat();
        let imports = [[1, 3, 2], [2, 3, 2], [2, 3, 1]].as_flattened().iter();
        let imports: Vec<u8> = imports.flat_map(|number: &u32| number.to_be_bytes()).collect();
        let imports = [&[0, 0, 0, 3][..], &imports].concat();
        let parts =
            [part(b"AtU8", &atoms), part(b"Code", b"abcde"), part(b"ImpT", &imports)].concat();
        let file = [&b"FOR1\0\0\0\0BEAM"[..], &parts].concat();
        assert_eq!(called(&file), [&b"own"[..], b"lists"]);
        (0..file.len()).for_each(|len| drop(called(&file[..len])));
    }

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
