//! The library search of glibc's and musl's dynamic linkers.

use std::sync::Arc;

use object::elf;

use super::{
    elf::Elf,
    paths::{Found, Paths},
};

/// Directories that one image's configuration may name.
const DIRECTORIES: usize = 64;

/// The directories in which Debian and its descendants have a processor's libraries.
const MULTIARCH: [(elf::Machine, &str); 9] = [
    (elf::EM_X86_64, "x86_64-linux-gnu"),
    (elf::EM_AARCH64, "aarch64-linux-gnu"),
    (elf::EM_386, "i386-linux-gnu"),
    (elf::EM_ARM, "arm-linux-gnueabihf"),
    (elf::EM_PPC64, "powerpc64le-linux-gnu"),
    (elf::EM_S390, "s390x-linux-gnu"),
    (elf::EM_RISCV, "riscv64-linux-gnu"),
    (elf::EM_LOONGARCH, "loongarch64-linux-gnu"),
    (elf::EM_MIPS, "mips64el-linux-gnuabi64"),
];

/// Files with directories in which the linkers look before the usual ones. glibc's do not read the
/// first two but a cache made from them, which has the libraries in the same order.
pub(super) const CONFIGURATION: [&str; 3] =
    ["/etc/ld.so.conf.d/*.conf", "/etc/ld.so.conf", "/etc/ld-musl-*.path"];

/// The variable with directories that come before the configured ones.
pub(super) const LIBRARY_PATH: &str = "LD_LIBRARY_PATH";

/// The directories of one image.
#[derive(Debug, Default)]
pub(super) struct Linker {
    library_path: Vec<u8>,
    configured: Vec<Vec<u8>>,
}

/// A file that asks for libraries.
#[derive(Clone, Debug, Default)]
pub(super) struct Asker {
    /// Directories of the RPATHs of all files through which this one was loaded, nearest first.
    pub(super) rpath: Arc<[Vec<u8>]>,
    /// The directory of the program's dynamic linker, where the C library is, too.
    pub(super) home: Arc<[u8]>,
}

impl Linker {
    /// `library_path` are directories with colons between them, of the environment.
    pub(super) fn new(library_path: Vec<u8>) -> Self {
        Linker { library_path, configured: Vec::new() }
    }

    /// Adds a list of directories that a script puts into the environment, or returns `false` if it
    /// is known.
    pub(super) fn add_library_path(&mut self, list: &[u8]) -> bool {
        let entries = || self.library_path.split(|byte| *byte == b':');
        let is_new =
            |entry: &&[u8]| entry.starts_with(b"/") && !entries().any(|known| known == *entry);
        let new: Vec<_> = list.split(|byte| *byte == b':').filter(is_new).collect();
        let has_room = entries().count() < DIRECTORIES;
        let more = [&b":"[..], &new.join(&b':')].concat();
        let adds = !new.is_empty() && has_room;
        if adds {
            self.library_path.extend(more);
        }
        adds
    }

    /// Adds the directories in the text of one of the files in [`CONFIGURATION`].
    pub(super) fn configure(&mut self, text: &[u8]) {
        for line in text.split(|byte| *byte == b'\n') {
            let line = line.split(|byte| *byte == b'#').next().unwrap_or_default();
            let names = line.split(|byte| b" \t\r:,=".contains(byte));
            for name in names.filter(|name| name.starts_with(b"/")) {
                // `include` lines name files; which ones is known.
                if self.configured.len() < DIRECTORIES && !name.contains(&b'*') {
                    self.configured.push(name.to_vec());
                }
            }
        }
    }

    /// Returns whether the linkers look in `directory`, an absolute path without links.
    pub(super) fn looks_in(&self, directory: &[u8]) -> bool {
        let mut of_processors = MULTIARCH.iter().map(|(_, name)| name.as_bytes());
        let last = directory.rsplit(|byte| *byte == b'/').next();
        self.configured.iter().any(|known| known == directory)
            || of_processors.any(|name| Some(name) == last)
    }

    /// The asker for the libraries of `file`, which `asker` has loaded.
    pub(super) fn asker(
        &self,
        paths: &mut Paths<'_, impl AsRef<[u8]>>,
        file: &Found,
        elf: &Elf,
        asker: &Asker,
    ) -> Asker {
        let mut asker = asker.clone();
        if let Some(interpreter) = &elf.interpreter
            && let Some(found) = paths.file(b"/", interpreter)
        {
            asker.home = found.directory().into();
        }
        if let Some(rpath) = elf.rpath.as_ref().filter(|_| elf.runpath.is_none()) {
            let own = directories(rpath, file);
            asker.rpath = own.chain(asker.rpath.iter().cloned()).take(DIRECTORIES).collect();
        }
        asker
    }

    /// The libraries that `file` needs, as far as they are in the image, and whether all are.
    pub(super) fn libraries(
        &self,
        paths: &mut Paths<'_, impl AsRef<[u8]>>,
        file: &Found,
        elf: &Elf,
        asker: &Asker,
    ) -> (Vec<Found>, bool) {
        let mut places: Vec<Vec<u8>> = Vec::new();
        if elf.runpath.is_none() {
            places.extend(asker.rpath.iter().cloned());
        }
        places.extend(directories(&self.library_path, file));
        places.extend(elf.runpath.iter().flat_map(|runpath| directories(runpath, file)));
        places.extend(self.configured.iter().cloned());
        places.push(asker.home.to_vec());
        for (_, name) in MULTIARCH.iter().filter(|(machine, _)| machine.0 == elf.machine) {
            places.extend([format!("/lib/{name}").into(), format!("/usr/lib/{name}").into()]);
        }
        for usual in ["/lib64", "/usr/lib64", "/lib", "/usr/lib", "/usr/local/lib"] {
            places.push(usual.into());
        }
        let mut find = |name: &Vec<u8>| {
            if name.contains(&b'/') {
                return paths.file(b"/", name);
            }
            places.iter().find_map(|place| paths.file(place, name))
        };
        let found: Vec<_> = elf.needed.iter().filter_map(&mut find).collect();
        let is_complete = found.len() == elf.needed.len();
        (found, is_complete)
    }
}

/// Returns whether this is the C library or the dynamic linker. Every program has them, and few
/// programs make the calls that open the files which they name.
pub(super) fn is_of_c_library(file: &Found) -> bool {
    let names: [&[u8]; 3] = [b"libc.so", b"ld-linux", b"ld-musl"];
    names.iter().any(|name| file.name().starts_with(name))
}

/// The absolute directories in a list with colons, with `$ORIGIN` as the directory of `file`.
fn directories<'a>(list: &'a [u8], file: &'a Found) -> impl Iterator<Item = Vec<u8>> + 'a {
    let origin = file.directory();
    let expand = move |entry: &[u8]| {
        let rest =
            [&b"$ORIGIN"[..], b"${ORIGIN}"].iter().find_map(|name| entry.strip_prefix(*name));
        rest.map_or_else(|| entry.to_vec(), |rest| [origin, rest].concat())
    };
    let entries = list.split(|byte| *byte == b':').map(expand);
    entries.filter(|entry| entry.starts_with(b"/")).take(DIRECTORIES)
}
