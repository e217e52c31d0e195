//! The host of .NET: what it reads before the first assembly of the program.
//!
//! `APP.runtimeconfig.json` names frameworks, of which an installation has several versions:
//! `shared/NAME/VERSION`.

use std::sync::Arc;

use serde_json::Value;

use super::{
    super::super::paths::{Found, Paths},
    Import, Imports, Language,
};

/// The framework that has the run-time itself. Others need it, whether they are named with it or
/// not.
const CORE: &str = "Microsoft.NETCore.App";

/// Frameworks of one program.
const FRAMEWORKS: usize = 8;

/// Names of an installation that programs look for which are not run by `dotnet`. Where
/// `/etc/dotnet/install_location` names it, packages also link to its program.
const INSTALLATIONS: [&[u8]; 5] = [
    b"/usr/local/bin/dotnet",
    b"/usr/bin/dotnet",
    b"/usr/share/dotnet/dotnet",
    b"/usr/lib/dotnet/dotnet",
    b"/usr/lib64/dotnet/dotnet",
];

/// Files of the run-time that each start reads; until version 5, libraries of assemblies had no
/// `lib` before their names.
const RUNTIME: [&[u8]; 9] = [
    b"libhostpolicy.so",
    b"libcoreclr.so",
    b"libcoreclrtraceptprovider.so",
    b"System.Private.CoreLib.dll",
    b"libclrjit.so",
    b"libSystem.Native.so",
    b"System.Native.so",
    b"libSystem.Globalization.Native.so",
    b"System.Globalization.Native.so",
];

/// How the names of a program's files end: configuration, the assemblies that belong to it, and its
/// own.
pub(super) const CONFIGURATION: &[u8] = b".runtimeconfig.json";
const DEPENDENCIES: &[u8] = b".deps.json";
const ASSEMBLY: &[u8] = b".dll";

/// The configuration of the program that `program` hosts, with imports to follow it: the first of
/// `scripts` that has one if that is `dotnet`, else the program itself, beside whose ELF file it
/// is. `root` is the installation that the environment names.
pub(in super::super::super) fn dotnet(
    paths: &mut Paths<'_, impl AsRef<[u8]>>,
    program: &Found,
    scripts: &[Found],
    root: Option<&[u8]>,
) -> Option<(Found, Imports)> {
    if program.name() == b"dotnet" {
        let root = program.directory();
        let configuration = scripts.iter().find_map(|script| beside(paths, script))?;
        return Some((configuration, Imports::within(Language::DotNet, root)));
    }
    let name = [program.name(), CONFIGURATION].concat();
    let configuration = paths.known(program.directory(), &name)?;
    let root = root.and_then(|root| paths.directory(b"/", root));
    let installed = |paths: &mut Paths<'_, _>| {
        let mut programs = INSTALLATIONS.iter().filter_map(|name| paths.file(b"/", name));
        programs.next().map(|program| program.directory().to_vec())
    };
    // A program with all of its files needs no installation.
    let root = root.or_else(|| installed(paths)).unwrap_or_default();
    Some((configuration, Imports::within(Language::DotNet, &root)))
}

/// The configuration of a program in the file `assembly`.
pub(super) fn beside(paths: &mut Paths<'_, impl AsRef<[u8]>>, assembly: &Found) -> Option<Found> {
    let stem = assembly.name().strip_suffix(ASSEMBLY)?;
    paths.known(assembly.directory(), &[stem, CONFIGURATION].concat())
}

impl Imports {
    /// What the host reads for the program with this configuration, and the program.
    pub(in super::super) fn follow_configuration(
        &self,
        paths: &mut Paths<'_, impl AsRef<[u8]>>,
        file: &Found,
        bytes: &[u8],
    ) -> Vec<Import> {
        let Some(stem) = file.name().strip_suffix(CONFIGURATION) else { return Vec::new() };
        let own = file.directory();
        let mut found = Vec::new();
        let mut roots = vec![own.to_vec()];
        for (name, version) in frameworks(bytes) {
            for root in &self.roots {
                let versions = [root, &b"/shared/"[..], name.as_bytes(), b"/*"].concat();
                let Some(place) = choose(paths.directories(&versions), &version) else { continue };
                found.extend(paths.known(&place, &[name.as_bytes(), DEPENDENCIES].concat()));
                roots.push(place);
            }
        }
        let hosts = self.roots.iter().map(|root| [root, &b"/host/fxr/*"[..]].concat());
        let hosts: Vec<_> = hosts.flat_map(|hosts| newest(paths.directories(&hosts))).collect();
        for place in hosts.iter().chain([&roots[0]]) {
            found.extend(paths.known(place, b"libhostfxr.so"));
        }
        for name in RUNTIME {
            found.extend(roots.iter().find_map(|place| paths.known(place, name)));
        }
        found.extend(paths.known(own, &[stem, DEPENDENCIES].concat()));
        let mut found: Vec<_> = found.into_iter().map(super::super::import).collect();
        if let Some(program) = paths.known(own, &[stem, ASSEMBLY].concat()) {
            let mut imports = Imports::within(Language::DotNet, own);
            imports.roots = roots;
            found.push(Import::Within(program, Arc::new(imports)));
        }
        found
    }
}

/// The frameworks that a program needs, with their least versions. None if it brings them itself.
pub(super) fn frameworks(configuration: &[u8]) -> Vec<(String, Version)> {
    let text = configuration.strip_prefix(b"\xef\xbb\xbf").unwrap_or(configuration);
    let Ok(value) = serde_json::from_slice::<Value>(text) else { return Vec::new() };
    let options = &value["runtimeOptions"];
    let several = options["frameworks"].as_array().into_iter().flatten();
    let named = [&options["framework"]].into_iter().chain(several).take(FRAMEWORKS);
    let named = named.filter_map(|framework| {
        let name = framework["name"].as_str().filter(|name| !name.contains(['/', '*']))?;
        Some((name.to_owned(), version(framework["version"].as_str()?.as_bytes())))
    });
    let mut found: Vec<_> = named.collect();
    if let Some((_, version)) = found.first().filter(|_| found.iter().all(|(name, _)| name != CORE))
    {
        found.push((CORE.into(), *version));
    }
    found
}

pub(super) type Version = [u32; 3];

/// Major, minor and patch of a version; of a preview, those of what it precedes.
pub(super) fn version(text: &[u8]) -> Version {
    let mut version = [0; 3];
    let parts = text.split(|byte| b".-".contains(byte));
    for (number, part) in version.iter_mut().zip(parts) {
        *number = str::from_utf8(part).ok().and_then(|part| part.parse().ok()).unwrap_or_default();
    }
    version
}

/// The version that a directory is called after.
fn version_of(directory: &[u8]) -> Version {
    version(directory.rsplit(|byte| *byte == b'/').next().unwrap_or_default())
}

/// The directory of the version that a host takes if it needs `least`: of the next minor one that
/// is not older, the newest patch. If there is none the program may still allow it another one.
pub(super) fn choose(directories: Vec<Vec<u8>>, least: &Version) -> Option<Vec<u8>> {
    let of = |directory: &Vec<u8>| version_of(directory);
    let fitting = directories.iter().filter(|directory| of(directory) >= *least);
    let minor = fitting.map(of).map(|[major, minor, _]| [major, minor]).min();
    let Some(minor) = minor else { return newest(directories) };
    newest(directories.into_iter().filter(|directory| of(directory)[..2] == minor).collect())
}

fn newest(directories: Vec<Vec<u8>>) -> Option<Vec<u8>> {
    directories.into_iter().max_by_key(|directory| version_of(directory))
}
