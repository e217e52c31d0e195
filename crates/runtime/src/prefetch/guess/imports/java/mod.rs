//! Java: archives, those that their manifests need, and the classes that a program loads.

mod archive;
mod class;
mod classes;
#[cfg(test)]
pub(in super::super) mod forge;
mod jimage;

use std::io::Read as _;

use flate2::read::DeflateDecoder;

use super::{
    super::paths::{Found, Paths},
    Import,
};

pub(in super::super) use self::{classes::Classes, jimage::Place};

/// Programs whose main class is in the run-time image.
const TOOLS: [(&[u8], &[u8]); 2] =
    [(b"javac", b"com.sun.tools.javac.Main"), (b"jar", b"sun.tools.jar.Main")];

/// Options whose value is the next word.
const WITH_VALUE: [&[u8]; 9] = [
    b"-cp",
    b"-classpath",
    b"--class-path",
    b"-p",
    b"--module-path",
    b"--add-modules",
    b"--add-opens",
    b"--add-exports",
    b"--add-reads",
];

/// Parsers, for the fuzz target.
#[cfg(fuzzing)]
pub(super) fn fuzz(bytes: &[u8]) {
    needed(bytes);
    main_of(bytes);
    class::named(bytes);
    jimage::classes(bytes);
    archive::fuzz(bytes);
}

/// Maximum size of a manifest, in bytes.
const MANIFEST: u64 = 64 << 10;

/// Its name; it is mostly the first or second file of the archive.
const NAME: &[u8] = b"META-INF/MANIFEST.MF";

/// Bytes of the header that ZIP has before each file, and how it begins.
const HEADER: usize = 30;
const MAGIC: &[u8] = b"PK\x03\x04";

/// Limit of files to examine in an archive.
const FILES: usize = 16;

/// The `Class-Path` of the manifest of an archive, of which the first bytes are given.
pub(super) fn needed(archive: &[u8]) -> Vec<Vec<u8>> {
    let paths = attribute(archive, "Class-Path:").unwrap_or_default();
    let paths = paths.split_ascii_whitespace().take(FILES * FILES);
    paths.map(|path| path.as_bytes().to_vec()).collect()
}

/// The class with which an archive begins that is run.
pub(in super::super) fn main_of(archive: &[u8]) -> Option<Vec<u8>> {
    Some(attribute(archive, "Main-Class:")?.trim().as_bytes().to_vec())
}

/// An attribute of the manifest of an archive.
fn attribute(archive: &[u8], name: &str) -> Option<String> {
    // Lines have at most 72 bytes; longer ones continue after a blank.
    let text =
        String::from_utf8_lossy(&manifest(archive)?).replace("\r\n", "\n").replace("\n ", "");
    text.lines().find_map(|line| line.strip_prefix(name)).map(str::to_owned)
}

/// The class with which a command begins: that of a tool, or the first word that may be one.
pub(in super::super) fn main_class<'a>(program: &[u8], words: &'a [Vec<u8>]) -> Option<&'a [u8]> {
    if let Some((_, main)) = TOOLS.iter().find(|(tool, _)| *tool == program) {
        return Some(main);
    }
    let mut words = words.iter();
    while let Some(word) = words.next() {
        match word.as_slice() {
            b"-jar" => return None,
            word if WITH_VALUE.contains(&word) => drop(words.next()),
            // Scripts pass several options as one word to `eval`.
            word if is_class(word) => return Some(word),
            _ => {}
        }
    }
    None
}

fn is_class(word: &[u8]) -> bool {
    word.first().is_some_and(u8::is_ascii_alphabetic)
        && word.iter().all(|byte| byte.is_ascii_alphanumeric() || b"._$".contains(byte))
}

/// The archives that an archive names.
pub(super) fn follow_archive(
    paths: &mut Paths<'_, impl AsRef<[u8]>>,
    file: &Found,
    bytes: &[u8],
) -> Vec<Import> {
    let names = needed(bytes);
    names.iter().filter_map(|name| paths.file(file.directory(), name)).map(Import::Module).collect()
}

/// The archives of a class path.
pub(super) fn class_path(paths: &mut Paths<'_, impl AsRef<[u8]>>, list: &[u8]) -> Vec<Import> {
    let mut found = Vec::new();
    for entry in list.split(|byte| *byte == b':') {
        match entry.ends_with(b"/*") {
            true => found.extend(paths.matching(&[entry, b".jar"].concat())),
            false => found.extend(paths.file(b"/", entry)),
        }
    }
    found.into_iter().map(Import::Module).collect()
}

fn manifest(archive: &[u8]) -> Option<Vec<u8>> {
    let mut rest = archive;
    for _ in 0..FILES {
        let header = rest.get(..HEADER).filter(|header| header.starts_with(MAGIC))?;
        let short = |at: usize| usize::from(u16::from_le_bytes([header[at], header[at + 1]]));
        let stored = u32::from_le_bytes(header[18..22].try_into().ok()?) as usize;
        let (method, name, extra) = (short(8), short(26), short(28));
        let data = rest.get(HEADER + name + extra..)?;
        if rest.get(HEADER..HEADER + name)? == NAME {
            let mut manifest = Vec::new();
            return match method {
                0 => data.get(..stored.min(MANIFEST as usize)).map(<[u8]>::to_vec),
                8 => {
                    // A truncated manifest is good enough.
                    let read = DeflateDecoder::new(data).take(MANIFEST).read_to_end(&mut manifest);
                    (read.is_ok() || !manifest.is_empty()).then_some(manifest)
                }
                _ => None,
            };
        }
        rest = data.get(stored..)?;
    }
    None
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use flate2::{Compression, write::DeflateEncoder};

    use super::*;

    fn entry(name: &str, method: u16, data: &[u8]) -> Vec<u8> {
        let mut header = [MAGIC, &[0; 4], &method.to_le_bytes(), &[0; 8]].concat();
        header.extend((data.len() as u32).to_le_bytes());
        header.extend([0; 4]);
        header.extend((name.len() as u16).to_le_bytes());
        header.extend([0; 2]);
        [&header, name.as_bytes(), data].concat()
    }

    #[test]
    fn a_command_begins_with_a_class_unless_it_runs_an_archive() {
        let main = |program: &str, words: &str| {
            let words: Vec<_> = words.split(',').map(|word| word.as_bytes().to_vec()).collect();
            main_class(program.as_bytes(), &words)
                .map(|main| String::from_utf8(main.into()).unwrap())
        };
        let command =
            "-Da=b,-cp,/opt/a.jar:b,--add-opens,java.base/java.lang, -Dc=d,app.Main,start";
        assert_eq!(main("java", command).unwrap(), "app.Main");
        assert_eq!(main("java", "-jar,app.jar,other.Main"), None);
        assert_eq!(main("java", "-cp"), None);
        assert_eq!(main("javac", "Main.java").unwrap(), "com.sun.tools.javac.Main");
        let manifest = b"Main-Class: app.Main \r\n";
        let archive = entry("META-INF/MANIFEST.MF", 0, manifest);
        assert_eq!(main_of(&archive).unwrap(), b"app.Main");
    }

    #[test]
    fn the_class_path_of_an_archive_is_found_wherever_it_goes_on() {
        let manifest =
            b"Manifest-Version: 1.0\r\nClass-Path: lib/a.jar li\r\n b/b.jar\r\nMain-Class: A\r\n";
        let mut deflated = DeflateEncoder::new(Vec::new(), Compression::default());
        deflated.write_all(manifest).unwrap();
        let deflated = deflated.finish().unwrap();
        for (method, data) in [(0, &manifest[..]), (8, &deflated)] {
            let archive = [entry("META-INF/", 0, b""), entry("META-INF/MANIFEST.MF", method, data)];
            assert_eq!(needed(&archive.concat()), [&b"lib/a.jar"[..], b"lib/b.jar"]);
        }
        let other = entry("A.class", 0, b"x");
        assert!(needed(&other).is_empty());
        let archive = entry("META-INF/MANIFEST.MF", 8, &deflated);
        (0..archive.len()).for_each(|len| drop(needed(&archive[..len])));
    }
}
