//! What scripts and modules load with them: the closure of what they import, as each language's interpreter looks for it.
//!
//! ```text
//! interpreter ─▶ roots ─┐
//! module ─▶ names ──────┴─▶ files ─▶ modules ─▶ …
//! ```
//!
//! Nothing is run, so what is imported under a condition counts, too, and what is named by data does not, unless it is a text
//! that names a module.

mod erlang;
mod java;
mod pyc;
mod python;
mod shell;
mod text;

use super::paths::{Found, Paths, matches};

pub(super) use self::shell::{Script, Started, run as shell};

/// Packages of R that each start loads.
const R_BASE: [&[u8]; 7] =
    [b"base", b"methods", b"datasets", b"utils", b"grDevices", b"graphics", b"stats"];

/// A language whose modules name others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Language {
    Python,
    JavaScript,
    Ruby,
    Perl,
    Php,
    R,
    Erlang,
    Java,
}

/// Interpreters by their real names, and where they look for modules: `$DIR` is their directory and `$NAME` their name. What the image
/// does not have is left out.
const INTERPRETERS: [(&str, Language, &[&str]); 9] = [
    (
        "python*",
        Language::Python,
        &[
            "$DIR/../lib/$NAME",
            "$DIR/../lib/$NAME/lib-dynload",
            "$DIR/../local/lib/$NAME/dist-packages",
            "$DIR/../lib/$NAME/site-packages",
            "$DIR/../lib/python3/dist-packages",
        ],
    ),
    (
        "pypy*",
        Language::Python,
        &[
            "$DIR/../lib/$NAME",
            "$DIR/../lib/$NAME/site-packages",
            "$DIR/../lib-python/3",
            "$DIR/../local/lib/$NAME/dist-packages",
            "$DIR/../lib/pypy3/dist-packages",
            "$DIR/../lib/python3/dist-packages",
        ],
    ),
    (
        "node*",
        Language::JavaScript,
        &["/usr/share/nodejs", "/usr/lib/nodejs", "$DIR/../lib/node_modules"],
    ),
    (
        "ruby*",
        Language::Ruby,
        &[
            "$DIR/../lib/ruby/vendor_ruby",
            "$DIR/../lib/ruby/site_ruby/*",
            "$DIR/../lib/ruby/*",
            "$DIR/../lib/*/ruby/*",
            "$DIR/../lib/*/ruby/vendor_ruby/*",
            "$DIR/../lib/ruby/*/*-linux*",
            "$DIR/../lib/ruby/gems/*/gems/*/lib",
            "$DIR/../bundle/ruby/*/gems/*/lib",
            "$DIR/../bundle/gems/*/lib",
            "/usr/share/rubygems-integration/*/gems/*/lib",
            "/var/lib/gems/*/gems/*/lib",
        ],
    ),
    (
        "perl*",
        Language::Perl,
        &[
            "/etc/perl",
            "$DIR/../local/lib/*/perl/*",
            "$DIR/../local/share/perl/*",
            "$DIR/../lib/*/perl5/*",
            "$DIR/../share/perl5",
            "$DIR/../lib/*/perl-base",
            "$DIR/../lib/*/perl/*",
            "$DIR/../share/perl/*",
            "$DIR/../lib/perl5/**",
        ],
    ),
    ("php*", Language::Php, &[]),
    (
        "R",
        Language::R,
        &[
            "$DIR/../../library",
            "$DIR/../../site-library",
            "/usr/lib/R/site-library",
            "/usr/local/lib/R/site-library",
        ],
    ),
    ("erlexec", Language::Erlang, &["$DIR/../.."]),
    ("java", Language::Java, &[]),
];

/// A program at work whose modules can be followed.
#[derive(Debug)]
pub(super) struct Imports {
    language: Language,
    /// Directories in which modules are looked for, in order.
    roots: Vec<Vec<u8>>,
}

/// What an import leads to.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Import {
    /// A module, which may import others.
    Module(Found),
    /// A library, with libraries of its own.
    Library(Found),
    /// Something else that is read.
    Data(Found),
}

impl Imports {
    /// Those of `interpreter`, whose script is in one of the directories `applications`; `more` are directories that its environment
    /// names.
    pub(super) fn of(
        paths: &mut Paths<'_, impl AsRef<[u8]>>,
        interpreter: &Found,
        applications: &[Vec<u8>],
        more: &[u8],
    ) -> Option<Self> {
        let is_it =
            |(name, ..): &&(&str, Language, &[&str])| matches(name.as_bytes(), interpreter.name());
        let (_, language, patterns) = INTERPRETERS.iter().find(is_it)?;
        let mut roots = applications.to_vec();
        if *language == Language::Perl || *language == Language::Ruby {
            roots.extend(applications.iter().map(|path| [path, &b"/lib"[..]].concat()));
        }
        let named = more.split(|byte| *byte == b':').filter(|path| path.starts_with(b"/"));
        roots.extend(named.map(<[u8]>::to_vec));
        for pattern in *patterns {
            let fill = |part: &str| match part {
                "$DIR" => interpreter.directory().to_vec(),
                "$NAME" => interpreter.name().to_vec(),
                part => part.into(),
            };
            let pattern = pattern.split('/').map(fill).collect::<Vec<_>>().join(&b'/');
            roots.extend(paths.directories(&pattern));
        }
        Some(Imports { language: *language, roots })
    }

    /// The same for `language` with nothing but a directory: what a server runs.
    pub(super) fn within(language: Language, directory: &[u8]) -> Self {
        Imports { language, roots: vec![directory.to_vec()] }
    }

    /// What follows from the module `file`, whose beginning is `bytes`.
    pub(super) fn follow(
        &self,
        paths: &mut Paths<'_, impl AsRef<[u8]>>,
        file: &Found,
        bytes: &[u8],
    ) -> Vec<Import> {
        match self.language {
            Language::Python => self.follow_python(paths, file, bytes),
            Language::JavaScript if file.name() == b"package.json" => {
                self.follow_package(paths, file, bytes)
            }
            Language::JavaScript => self.follow_javascript(paths, file, bytes),
            Language::Ruby => self.follow_ruby(paths, file, bytes),
            Language::Perl => self.follow_perl(paths, bytes),
            Language::Php => self.follow_php(paths, file, bytes),
            Language::R if file.name() == b"DESCRIPTION" => {
                text::r_needs(bytes).iter().flat_map(|name| self.r_package(paths, name)).collect()
            }
            Language::R => self.follow_r(paths, bytes),
            Language::Erlang => self.follow_boot(paths, bytes),
            Language::Java => follow_archive(paths, file, bytes),
        }
    }

    /// What follows from the words of a command: modules that they name, and text that is given as one.
    pub(super) fn follow_words(
        &self,
        paths: &mut Paths<'_, impl AsRef<[u8]>>,
        words: &[Vec<u8>],
        file: &Found,
    ) -> Vec<Import> {
        let mut found = Vec::new();
        let mut before: &[u8] = b"";
        for word in words {
            found.extend(match (self.language, before) {
                (Language::Python, b"-c")
                | (Language::Perl | Language::Ruby | Language::R, b"-e") => {
                    self.follow(paths, file, word)
                }
                (Language::Python, b"-m") => self.python_program(paths, word),
                (Language::Ruby, b"-r") => self.ruby_feature(paths, None, word),
                (Language::Erlang, b"-boot") => {
                    let boot = paths.file(b"/", &[&word[..], b".boot"].concat());
                    boot.into_iter().map(Import::Module).collect()
                }
                (Language::Java, b"-cp" | b"-classpath" | b"--class-path") => {
                    class_path(paths, word)
                }
                (Language::Python, _) if !word.starts_with(b"-") => self.python_word(paths, word),
                _ => Vec::new(),
            });
            before = word;
        }
        if self.language == Language::R {
            found.extend(R_BASE.iter().flat_map(|name| self.r_package(paths, name)));
        }
        found
    }

    fn follow_javascript(
        &self,
        paths: &mut Paths<'_, impl AsRef<[u8]>>,
        file: &Found,
        bytes: &[u8],
    ) -> Vec<Import> {
        let mut found = Vec::new();
        for name in text::javascript(bytes) {
            if name.starts_with(b"./") || name.starts_with(b"../") || name.starts_with(b"/") {
                found.extend(javascript_module(paths, file.directory(), &name));
                continue;
            }
            let package = package_of(&name);
            let above = ancestors(file.directory()).map(|path| [path, b"/node_modules"].concat());
            let places: Vec<_> = above.chain(self.roots.iter().cloned()).collect();
            let has = |place: &&Vec<u8>| paths.directory(place, package).is_some();
            if let Some(place) = places.iter().find(has) {
                found.extend(javascript_module(paths, place, &name));
            }
        }
        found
    }

    /// The entry of a package of npm, from its `package.json`.
    fn follow_package(
        &self,
        paths: &mut Paths<'_, impl AsRef<[u8]>>,
        file: &Found,
        bytes: &[u8],
    ) -> Vec<Import> {
        let package: serde_json::Value = serde_json::from_slice(bytes).unwrap_or_default();
        let exports = match &package["exports"][".".to_owned()] {
            serde_json::Value::Null => &package["exports"],
            exports => exports,
        };
        let conditions = ["node", "require", "import", "default"].map(|name| &exports[name]);
        let deeper = conditions.map(|value| &value["default"]);
        let named = [&package["main"], exports].into_iter().chain(conditions).chain(deeper);
        let mut found = Vec::new();
        for name in named.filter_map(serde_json::Value::as_str) {
            found.extend(javascript_module(paths, file.directory(), name.as_bytes()));
        }
        if found.is_empty() {
            found.extend(javascript_module(paths, file.directory(), b"index"));
        }
        found
    }

    fn follow_ruby(
        &self,
        paths: &mut Paths<'_, impl AsRef<[u8]>>,
        file: &Found,
        bytes: &[u8],
    ) -> Vec<Import> {
        let names = text::ruby(bytes);
        let of_name = |name: &Vec<u8>| self.ruby_feature(paths, Some(file.directory()), name);
        names.iter().flat_map(of_name).collect()
    }

    fn ruby_feature(
        &self,
        paths: &mut Paths<'_, impl AsRef<[u8]>>,
        beside: Option<&[u8]>,
        name: &[u8],
    ) -> Vec<Import> {
        let places = beside.into_iter().chain(self.roots.iter().map(Vec::as_slice));
        let found = places.into_iter().find_map(|place| {
            let endings: &[&[u8]] = if name.ends_with(b".rb") { &[b""] } else { &[b".rb", b".so"] };
            endings.iter().find_map(|ending| paths.known(place, &[name, *ending].concat()))
        });
        found.into_iter().map(import).collect()
    }

    fn follow_perl(&self, paths: &mut Paths<'_, impl AsRef<[u8]>>, bytes: &[u8]) -> Vec<Import> {
        let mut found = Vec::new();
        for name in text::perl(bytes) {
            let of_root = |root: &Vec<u8>| paths.known(root, &name);
            found.extend(self.roots.iter().find_map(of_root).map(Import::Module));
            // `A/B.pm` may have `auto/A/B/B.so`.
            let stem = name.strip_suffix(b".pm").unwrap_or(&name);
            let last = stem.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
            let library = [b"auto/", stem, b"/", last, b".so"].concat();
            let of_root = |root: &Vec<u8>| paths.known(root, &library);
            found.extend(self.roots.iter().find_map(of_root).map(Import::Library));
        }
        found
    }

    fn follow_php(
        &self,
        paths: &mut Paths<'_, impl AsRef<[u8]>>,
        file: &Found,
        bytes: &[u8],
    ) -> Vec<Import> {
        /// `__DIR__ . '/../a.php'` is beside the file; `BASE . 'a.php'` is beside one of the directories above it.
        const ABOVE: usize = 3;
        let mut found = Vec::new();
        for name in text::php(bytes) {
            let name = name.strip_prefix(b"/").unwrap_or(&name);
            let above = ancestors(file.directory()).take(ABOVE).map(<[u8]>::to_vec);
            let places: Vec<_> = above.chain(self.roots.iter().cloned()).collect();
            found.extend(places.iter().find_map(|place| paths.known(place, name)).map(import));
        }
        found
    }

    fn follow_r(&self, paths: &mut Paths<'_, impl AsRef<[u8]>>, bytes: &[u8]) -> Vec<Import> {
        text::r(bytes).iter().flat_map(|name| self.r_package(paths, name)).collect()
    }

    /// What loading a package of R reads.
    fn r_package(&self, paths: &mut Paths<'_, impl AsRef<[u8]>>, name: &[u8]) -> Vec<Import> {
        let of_root = |root: &Vec<u8>| {
            let description = [name, b"/DESCRIPTION"].concat();
            paths.known(root, &description)
        };
        let Some(description) = self.roots.iter().find_map(of_root) else { return Vec::new() };
        let mut found = Vec::new();
        for part in [&b"/NAMESPACE"[..], b"/Meta/*.rds", b"/R/*", b"/libs/*.so"] {
            let pattern = [description.directory(), part].concat();
            found.extend(paths.matching(&pattern).into_iter().map(import));
        }
        found.push(Import::Module(description));
        found
    }

    fn follow_boot(&self, paths: &mut Paths<'_, impl AsRef<[u8]>>, bytes: &[u8]) -> Vec<Import> {
        let boot = erlang::boot(bytes);
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

/// The archives that an archive names.
fn follow_archive(
    paths: &mut Paths<'_, impl AsRef<[u8]>>,
    file: &Found,
    bytes: &[u8],
) -> Vec<Import> {
    let names = java::class_path(bytes);
    names.iter().filter_map(|name| paths.file(file.directory(), name)).map(Import::Module).collect()
}

/// The archives of a class path.
fn class_path(paths: &mut Paths<'_, impl AsRef<[u8]>>, list: &[u8]) -> Vec<Import> {
    let mut found = Vec::new();
    for entry in list.split(|byte| *byte == b':') {
        match entry.ends_with(b"/*") {
            true => found.extend(paths.matching(&[entry, b".jar"].concat())),
            false => found.extend(paths.file(b"/", entry)),
        }
    }
    found.into_iter().map(Import::Module).collect()
}

/// A file by what its name says it is.
fn import(file: Found) -> Import {
    const MODULES: [&[u8]; 8] =
        [b".js", b".mjs", b".cjs", b".rb", b".pm", b".php", b".inc", b"package.json"];
    if file.name().ends_with(b".so") || file.name().ends_with(b".node") {
        Import::Library(file)
    } else if MODULES.iter().any(|ending| file.name().ends_with(ending)) {
        Import::Module(file)
    } else {
        Import::Data(file)
    }
}

/// The module `name` in `directory`, as Node.js looks for it.
fn javascript_module(
    paths: &mut Paths<'_, impl AsRef<[u8]>>,
    directory: &[u8],
    name: &[u8],
) -> Option<Import> {
    const FILES: [&[u8]; 6] = [b"", b".js", b".json", b".node", b".mjs", b".cjs"];
    const DIRECTORIES: [&[u8]; 2] = [b"/package.json", b"/index.js"];
    let mut endings = FILES.iter().chain(&DIRECTORIES);
    endings.find_map(|ending| paths.file(directory, &[name, ending].concat())).map(import)
}

/// The package that a module of npm is in: `@a/b/c` in `@a/b`.
fn package_of(name: &[u8]) -> &[u8] {
    let parts = if name.starts_with(b"@") { 2 } else { 1 };
    let mut slashes = name.iter().enumerate().filter(|(_, byte)| **byte == b'/');
    slashes.nth(parts - 1).map_or(name, |(at, _)| &name[..at])
}

/// A directory and those above it, without the root.
fn ancestors(directory: &[u8]) -> impl Iterator<Item = &[u8]> {
    fn above<'a>(path: &&'a [u8]) -> Option<&'a [u8]> {
        let slash = path.iter().rposition(|byte| *byte == b'/')?;
        (slash > 0).then(|| &path[..slash])
    }
    std::iter::successors(Some(directory), above)
}

#[cfg(fuzzing)]
pub(crate) mod fuzz {
    use super::{Script, Started, erlang, java, pyc, shell, text};

    /// Every parser of modules over the same bytes.
    pub fn imports(bytes: &[u8]) {
        pyc::module(bytes);
        text::python(bytes);
        text::javascript(bytes);
        text::ruby(bytes);
        text::php(bytes);
        text::perl(bytes);
        text::r(bytes);
        text::r_needs(bytes);
        erlang::boot(bytes);
        java::class_path(bytes);
        let started = Started { path: b"/bin/script", arguments: &[], environment: &[] };
        shell::run(bytes, started, &mut Script::default());
    }
}
