//! .NET: assemblies, and those that they refer to.
//!
//! ```text
//! dotnet APP.dll, ./APP ─▶ APP.runtimeconfig.json ─┬─▶ frameworks ─▶ host, run-time
//!                                                  └─▶ APP.dll ─▶ assemblies ─▶ assemblies
//! mono APP.exe ─▶ assemblies ─▶ assemblies
//! ```
//!
//! An assembly is loaded when a method is compiled that uses its types. So those that a program
//! refers to are likely, and those that these refer to as well; the ones that follow from them are
//! mostly for what no start does.

mod assembly;
#[cfg(test)]
pub(in super::super) mod forge;
mod host;
#[cfg(test)]
mod tests;

use super::{
    super::paths::{Found, Paths},
    Import, Imports, Language,
};

pub(in super::super) use self::host::dotnet;

/// Where Mono has assemblies of all programs, `NAME/VERSION__TOKEN/NAME.dll`.
const CACHE: &[u8] = b"/usr/lib/mono/gac";

/// Where Mono has code that was compiled ahead, besides the directory of the assembly.
const COMPILED: &[u8] = b"/usr/lib/mono/aot-cache/*";

/// Parsers, for the fuzz target.
#[cfg(fuzzing)]
pub(super) fn fuzz(bytes: &[u8]) {
    assembly::assembly(bytes);
    host::frameworks(bytes);
}

impl Imports {
    /// The files that an assembly names. Those of a program are followed, but not further ones.
    pub(super) fn follow_assembly(
        &self,
        paths: &mut Paths<'_, impl AsRef<[u8]>>,
        file: &Found,
        bytes: &[u8],
    ) -> Vec<Import> {
        let assembly = assembly::assembly(bytes);
        let is_program = file.name().ends_with(b".exe") || host::beside(paths, file).is_some();
        let kind = if is_program { Import::Module } else { Import::Data };
        let mut found = Vec::new();
        for name in &assembly.references {
            let Some(file) = self.assembly(paths, name) else { continue };
            if self.language == Language::Mono {
                let name = [file.name(), b".so"].concat();
                let compiled = paths.known(file.directory(), &name);
                found.extend(compiled.map(Import::Library));
                let compiled = paths.matching(&[COMPILED, b"/", &name].concat());
                found.extend(compiled.into_iter().map(Import::Library));
            }
            found.push(kind(file));
        }
        for name in &assembly.libraries {
            let names = [&[][..], b"lib"].map(|prefix| [prefix, name, b".so"].concat());
            let mut names =
                names.iter().flat_map(|name| self.roots.iter().map(move |root| (root, name)));
            let library = names.find_map(|(root, name)| paths.known(root, name));
            found.extend(library.map(Import::Library));
        }
        found
    }

    /// The assembly of this name.
    fn assembly(&self, paths: &mut Paths<'_, impl AsRef<[u8]>>, name: &[u8]) -> Option<Found> {
        let file = [name, b".dll"].concat();
        let beside = self.roots.iter().find_map(|root| paths.known(root, &file));
        beside.or_else(|| {
            let cached = self.language == Language::Mono;
            let cached =
                cached.then(|| paths.matching(&[CACHE, b"/", name, b"/*/", &file].concat()));
            cached?.pop()
        })
    }
}
