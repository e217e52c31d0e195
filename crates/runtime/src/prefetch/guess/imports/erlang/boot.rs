//! Boot files: terms in Erlang's external format, a script of `{primLoad, [Module…]}` and `{path,
//! [Directory…]}`.

use super::terms::{Reader, Term};

/// Terms of one boot file.
const TERMS: usize = 1 << 16;

/// Directories of one boot file: each module may be in any of them.
const DIRECTORIES: usize = 1024;

/// After this nothing is loaded that is not called, unless the mode is `embedded`.
const LOADED: &[u8] = b"kernel_load_completed";

/// Modules and directories in the order of the script. Directories may begin with `$ROOT`.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Boot {
    pub(super) modules: Vec<Vec<u8>>,
    pub(super) directories: Vec<Vec<u8>>,
}

/// Reads a `.boot` file as far as it can be understood.
pub(super) fn boot(file: &[u8], is_embedded: bool) -> Boot {
    let mut boot = Boot::default();
    let mut reader = Reader { rest: file };
    if reader.begin().is_none() {
        return boot;
    }
    let mut is_loaded = false;
    for _ in 0..TERMS {
        match reader.next() {
            Some(Term::Atom(LOADED)) => is_loaded = !is_embedded,
            Some(Term::Atom(name)) if !is_loaded => boot.modules.push(name.to_vec()),
            Some(Term::Text(text))
                if text.contains(&b'/') && boot.directories.len() < DIRECTORIES =>
            {
                boot.directories.push(text.to_vec());
            }
            Some(_) => {}
            None => break,
        }
    }
    boot
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
        let mut expected = Boot {
            modules: vec![b"script".to_vec(), b"code".to_vec()],
            directories: vec![b"$ROOT/lib/kernel/ebin".to_vec()],
        };
        assert_eq!(boot(&file, false), expected);
        expected.modules.push(b"lists".to_vec());
        assert_eq!(boot(&file, true), expected);
        (0..file.len()).for_each(|len| drop(boot(&file[..len], true)));
        assert_eq!(boot(b"text", false), Boot::default());
    }

    #[test]
    fn directories_of_a_boot_file_are_bounded() {
        let file = [&[131][..], &b"k\0\x01/".repeat(DIRECTORIES + 1)].concat();
        assert_eq!(boot(&file, false).directories.len(), DIRECTORIES);
    }
}
