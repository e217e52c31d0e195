//! Modules of JavaScript, as Node.js finds them: beside the one that names them, or in packages.

use super::{
    super::paths::{Found, Paths},
    Import, Imports, ancestors, import, text,
};

impl Imports {
    pub(super) fn follow_javascript(
        &self,
        paths: &mut Paths<'_, impl AsRef<[u8]>>,
        file: &Found,
        bytes: &[u8],
    ) -> Vec<Import> {
        // Whether a `.js` is a module of the new kind is in the description of its package.
        let is_described = |path: &[u8]| paths.known(path, b"package.json");
        let described = ancestors(file.directory()).find_map(is_described);
        let mut found = Vec::from_iter(described.map(Import::Data));
        let above = ancestors(file.directory()).map(|path| [path, b"/node_modules"].concat());
        let mut places: Vec<_> = above.chain(self.roots.iter().cloned()).collect();
        places.retain(|place| paths.directory(b"/", place).is_some());
        let loaded = text::javascript(bytes);
        for name in &loaded {
            if matches!(name.split(|byte| *byte == b'/').next(), Some(b"" | b"." | b"..")) {
                found.extend(javascript_module(paths, file.directory(), name));
            } else {
                found.extend(of_package(paths, &places, name));
            }
        }
        // Programs with plug-ins, and settings that are scripts, name what is loaded elsewhere.
        let named = text::javascript_packages(bytes);
        for name in named.into_iter().filter(|name| !loaded.contains(name)) {
            found.extend(of_package(paths, &places, &name));
        }
        found
    }

    /// The entry of a package of npm, from its `package.json`.
    pub(super) fn follow_package(
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
}

/// The module `name` of a package that is in the first of these places which has the package.
fn of_package(
    paths: &mut Paths<'_, impl AsRef<[u8]>>,
    places: &[Vec<u8>],
    name: &[u8],
) -> Option<Import> {
    let place = places.iter().find(|place| paths.known_directory(place, package_of(name)))?;
    javascript_module(paths, place, name)
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
