//! Imports of scripts and modules: their closure, with each language's own search.
//!
//! ```text
//! interpreter ─▶ roots ─┐
//! module ─▶ names ──────┴─▶ files ─▶ modules ─▶ …
//! ```
//!
//! Nothing is executed. Conditional imports count as well; names computed from data don't, unless
//! the data is a text that names a module.

mod dotnet;
mod erlang;
mod java;
mod javascript;
mod lua;
mod php;
mod pyc;
mod python;
mod r;
mod scripts;
mod shell;
mod text;

use std::{collections::HashSet, sync::Arc};

use super::paths::{Found, Paths, matches};

pub(super) use self::{
    dotnet::dotnet,
    java::{Classes, Place, main_class, main_of},
    php::{ClassMap, is_called_class_loader},
    shell::{Started, run as shell},
};
#[cfg(test)]
pub(super) use self::{
    dotnet::forge as dotnet_forge, java::forge as java_forge, pyc::forge as pyc_forge,
};

/// A language whose modules name others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Language {
    Python,
    JavaScript,
    Ruby,
    Perl,
    Php,
    Lua,
    R,
    Erlang,
    Java,
    DotNet,
    Mono,
}

/// Interpreters by their real names, with their search paths for modules: `$DIR` is their directory
/// and `$NAME` their name. Paths missing from the image are left out.
const INTERPRETERS: [(&str, Language, &[&str]); 13] = [
    (
        "python*",
        Language::Python,
        &[
            "$DIR/../lib/$NAME",
            "$DIR/../lib/$NAME/lib-dynload",
            "$DIR/../local/lib/$NAME/dist-packages",
            "$DIR/../lib/$NAME/site-packages",
            "$DIR/../lib/python3/dist-packages",
            // `pkg_resources` adds it.
            "$DIR/../local/lib/$NAME/dist-packages/setuptools/_vendor",
            "$DIR/../lib/$NAME/site-packages/setuptools/_vendor",
            "$DIR/../lib/python3/dist-packages/setuptools/_vendor",
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
            "/usr/lib/*/rubygems-integration/*/gems/*/lib",
            "/usr/lib/*/rubygems-integration/*/extensions/*/*/*",
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
    ("lua*", Language::Lua, &[]),
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
    ("erlexec", Language::Erlang, &["$DIR/../..", "$DIR/../../lib/*/ebin"]),
    // With the directory of the run-time image.
    ("java", Language::Java, &["$DIR/../lib"]),
    ("javac", Language::Java, &["$DIR/../lib"]),
    ("jar", Language::Java, &["$DIR/../lib"]),
    ("mono*", Language::Mono, &["$DIR/../lib/mono/4.5", "$DIR/../lib/mono/4.5/Facades"]),
];

/// Directories that are searched for the modules of one program.
const ROOTS: usize = 2048;

/// The run-time image of Java.
pub(super) const IMAGE: &[u8] = b"modules";

/// A program whose modules can be followed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Imports {
    language: Language,
    /// Directories that are searched for modules, in order.
    roots: Vec<Vec<u8>>,
    /// Those of the application among them.
    own: Vec<Vec<u8>>,
    /// Whether Erlang loads all modules of its boot file.
    is_embedded: bool,
}

/// The target of an import.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Import {
    /// A module, which may import others.
    Module(Found),
    /// A module with imports of its own.
    Within(Found, Arc<Imports>),
    /// A library, with libraries of its own.
    Library(Found),
    /// Something else that is read.
    Data(Found),
    /// A module that an application lists, loaded if [all of them](Import::AllListed) are.
    Listed(Found),
    /// The program loads all modules that its applications list.
    AllListed,
    /// RubyGems looks for a gem.
    Gems,
    /// A class that is used; a class loader may have its file.
    Class(Vec<u8>),
    /// What a class loader has: names of classes, and paths.
    ClassMap(Vec<(Vec<u8>, Vec<u8>)>),
}

impl Imports {
    /// The imports of `interpreter`, whose script is in one of the directories `applications`;
    /// `more` are directories from its environment and arguments, which are `words`.
    pub(super) fn of(
        paths: &mut Paths<'_, impl AsRef<[u8]>>,
        interpreter: &Found,
        applications: &[Vec<u8>],
        words: &[Vec<u8>],
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
        roots.extend(named.flat_map(|path| paths.directories(path)));
        for pattern in *patterns {
            let fill = |part: &str| match part {
                "$DIR" => interpreter.directory().to_vec(),
                "$NAME" => interpreter.name().to_vec(),
                part => part.into(),
            };
            let pattern = pattern.split('/').map(fill).collect::<Vec<_>>().join(&b'/');
            roots.extend(paths.directories(&pattern));
        }
        match language {
            Language::Ruby => scripts::add_inner_gems(paths, &mut roots),
            Language::Lua => lua::add_roots(paths, interpreter, &mut roots),
            _ => {}
        }
        let mut known = HashSet::new();
        roots.retain(|root| known.insert(root.clone()));
        roots.truncate(ROOTS);
        let is_embedded = words.windows(2).any(|pair| pair == [&b"-mode"[..], b"embedded"]);
        Some(Imports { language: *language, roots, own: applications.to_vec(), is_embedded })
    }

    /// The imports of `language` within one directory: a server's application.
    pub(super) fn within(language: Language, directory: &[u8]) -> Self {
        let roots = vec![directory.to_vec()];
        Imports { language, roots, own: Vec::new(), is_embedded: false }
    }

    pub(super) fn is_java(&self) -> bool {
        self.language == Language::Java
    }

    /// Returns whether compiled modules name others in their constants.
    pub(super) fn has_compiled_modules(&self) -> bool {
        self.language == Language::Python
    }

    /// Returns whether a file of this name may be one of its modules.
    pub(super) fn is_module(&self, name: &[u8]) -> bool {
        let endings: &[&[u8]] = match self.language {
            Language::Python => &[b".py", b".pyc"],
            Language::JavaScript => &[b".js", b".mjs", b".cjs", b"package.json"],
            Language::Ruby => &[b".rb"],
            Language::Perl => &[b".pm", b".pl"],
            Language::Php => &[b".php", b".inc"],
            Language::Lua => &[b".lua"],
            Language::R => &[],
            Language::Erlang => &[b".beam", b".app"],
            Language::Java => &[b".jar"],
            Language::DotNet | Language::Mono => &[b".dll"],
        };
        endings.iter().any(|ending| name.ends_with(ending))
    }

    /// How many directories it searches.
    pub(super) fn places(&self) -> usize {
        self.roots.len()
    }

    /// Returns whether names are in tables anywhere in a module, not at its beginning.
    pub(super) fn has_tables(&self) -> bool {
        matches!(self.language, Language::Java | Language::DotNet | Language::Mono)
    }

    /// The imports of the module `file`, whose first bytes are `bytes`.
    pub(super) fn follow(
        &self,
        paths: &mut Paths<'_, impl AsRef<[u8]>>,
        file: &Found,
        bytes: &[u8],
    ) -> Vec<Import> {
        if paths.is_spent() {
            return Vec::new();
        }
        match self.language {
            Language::Python => self.follow_python(paths, file, bytes),
            Language::JavaScript if file.name() == b"package.json" => {
                self.follow_package(paths, file, bytes)
            }
            Language::JavaScript => self.follow_javascript(paths, file, bytes),
            Language::Ruby => self.follow_ruby(paths, file, bytes),
            Language::Perl => self.follow_perl(paths, bytes),
            Language::Php => self.follow_php(paths, file, bytes),
            Language::Lua => self.follow_lua(paths, file, bytes),
            Language::R if file.name() == b"DESCRIPTION" => {
                text::r_needs(bytes).iter().flat_map(|name| self.r_package(paths, name)).collect()
            }
            Language::R => self.follow_r(paths, bytes),
            Language::Erlang if file.name().ends_with(b".beam") => {
                self.follow_beam(paths, file, bytes)
            }
            Language::Erlang if file.name().ends_with(b".app") => {
                self.follow_app(paths, file, bytes)
            }
            Language::Erlang if file.name().ends_with(b".boot") => self.follow_boot(paths, bytes),
            Language::Erlang => self.follow_plugins(paths, bytes),
            Language::Java => java::follow_archive(paths, file, bytes),
            Language::DotNet if file.name().ends_with(b".json") => {
                self.follow_configuration(paths, file, bytes)
            }
            Language::DotNet | Language::Mono => self.follow_assembly(paths, file, bytes),
        }
    }

    /// The modules that a text names: a setting, or a constant of a compiled module.
    pub(super) fn named(
        &self,
        paths: &mut Paths<'_, impl AsRef<[u8]>>,
        name: &[u8],
    ) -> Vec<Import> {
        match self.language {
            Language::Python if python::is_dotted(name) => self.absolute(paths, name),
            Language::Lua if name.contains(&b'.') => {
                self.lua_module(paths, name).into_iter().collect()
            }
            Language::Perl if name.contains(&b':') => {
                let path = text::path_of_perl(name);
                path.map(|path| self.perl_module(paths, &path)).unwrap_or_default()
            }
            _ => Vec::new(),
        }
    }

    /// The imports in the words of a command: named modules, and program text.
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
                | (Language::Perl | Language::Ruby | Language::Lua | Language::R, b"-e") => {
                    self.follow(paths, file, word)
                }
                (Language::Python, b"-m") => self.python_program(paths, word),
                (Language::Ruby, b"-r") => self.ruby_option(paths, word),
                (Language::Lua, b"-l") => self.lua_module(paths, word).into_iter().collect(),
                (Language::Erlang, b"-boot") => self.boot_file(paths, word).into_iter().collect(),
                (Language::Erlang, b"-s" | b"-run" | b"-user") => self.erlang_program(paths, word),
                (Language::Erlang, b"-name" | b"-sname") => self.erlang_network(paths),
                (Language::Java, b"-cp" | b"-classpath" | b"--class-path") => {
                    java::class_path(paths, word)
                }
                (Language::Python, _) if !word.starts_with(b"-") => self.python_word(paths, word),
                _ => Vec::new(),
            });
            before = word;
        }
        if self.language == Language::Python {
            found.extend(self.site_files(paths));
        }
        // Scripts may name a boot file that they make themselves.
        let is_boot = |import: &Import| match import {
            Import::Module(file) => file.name().ends_with(b".boot"),
            _ => false,
        };
        if self.language == Language::Erlang && !found.iter().any(is_boot) {
            found.extend(self.boot_file(paths, b"start"));
        }
        if self.language == Language::Java {
            let image = self.roots.iter().rev().find_map(|root| paths.file(root, IMAGE));
            found.extend(image.map(Import::Module));
        }
        if self.language == Language::R {
            found.extend(r::BASE.iter().flat_map(|name| self.r_package(paths, name)));
        }
        found
    }
}

/// Returns whether the program of this name or path is an interpreter whose imports are followed.
pub(super) fn is_interpreter(program: &[u8]) -> bool {
    let name = program.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
    INTERPRETERS.iter().any(|(pattern, ..)| matches(pattern.as_bytes(), name))
}

/// The kind of import that a file's name suggests.
fn import(file: Found) -> Import {
    const MODULES: [&[u8]; 9] =
        [b".js", b".mjs", b".cjs", b".rb", b".pm", b".php", b".inc", b".lua", b"package.json"];
    if file.is_library() || file.name().ends_with(b".node") {
        Import::Library(file)
    } else if MODULES.iter().any(|ending| file.name().ends_with(ending)) {
        Import::Module(file)
    } else {
        Import::Data(file)
    }
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
    use super::{Started, dotnet, erlang, java, php, pyc, shell, text};

    /// Every parser of modules over the same bytes.
    pub fn imports(bytes: &[u8]) {
        pyc::module(bytes);
        text::python(bytes);
        text::python_site(bytes);
        text::javascript(bytes);
        text::javascript_packages(bytes);
        text::ruby(bytes);
        text::ruby_relative(bytes);
        text::ruby_program(bytes);
        text::ruby_patterns(bytes);
        text::perl(bytes);
        text::lua(bytes);
        text::lua_places(bytes);
        text::r(bytes);
        text::r_needs(bytes);
        dotnet::fuzz(bytes);
        erlang::fuzz(bytes);
        java::fuzz(bytes);
        php::fuzz(bytes);
        let sources = [(b"/source".to_vec(), bytes.to_vec())].into();
        let started =
            Started { path: b"/bin/script", arguments: &[], environment: &[], sources: &sources };
        shell::run(bytes, started, &mut |path| path.len() % 2 == 0);
    }
}
