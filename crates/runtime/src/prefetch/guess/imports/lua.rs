//! Modules of Lua, which are named by paths with dots.

use std::sync::Arc;

use super::{
    super::paths::{Found, Paths},
    Import, Imports, ROOTS, text,
};

/// Directories that one script names.
const NAMED: usize = 16;

/// Where interpreters look for modules and libraries, before the directory of their version.
const PLACES: [&str; 5] =
    ["../local/share/lua", "../share/lua", "../local/lib/lua", "../lib/lua", "../lib/*/lua"];

/// Adds the directories of the version of `interpreter`: `lua5.4` has `/usr/share/lua/5.4`.
pub(super) fn add_roots(
    paths: &mut Paths<'_, impl AsRef<[u8]>>,
    interpreter: &Found,
    roots: &mut Vec<Vec<u8>>,
) {
    let version = match interpreter.name().strip_prefix(b"lua").unwrap_or_default() {
        // LuaJIT is compatible with this version.
        rest if rest.starts_with(b"jit") => b"5.1",
        rest if rest.first().is_some_and(u8::is_ascii_digit) => rest,
        _ => b"*",
    };
    for place in PLACES {
        let directory = [interpreter.directory(), b"/", place.as_bytes(), b"/", version].concat();
        roots.extend(paths.directories(&directory));
    }
}

impl Imports {
    pub(super) fn follow_lua(
        &self,
        paths: &mut Paths<'_, impl AsRef<[u8]>>,
        file: &Found,
        bytes: &[u8],
    ) -> Vec<Import> {
        // Programs say where their own modules are.
        let mut imports = self.clone();
        for place in text::lua_places(bytes).iter().take(NAMED) {
            let Some(place) = paths.directory(file.directory(), place) else { continue };
            let is_new = place != b"/" && !imports.roots.contains(&place);
            if is_new && imports.roots.len() < ROOTS {
                imports.roots.push(place);
            }
        }
        let names = text::lua(bytes);
        let found = names.iter().flat_map(|name| imports.lua_module(paths, name)).collect();
        if imports.roots.len() == self.roots.len() {
            return found;
        }
        let imports = Arc::new(imports);
        let within = |import| match import {
            Import::Module(file) => Import::Within(file, imports.clone()),
            import => import,
        };
        found.into_iter().map(within).collect()
    }

    /// The script or the library of a module.
    pub(super) fn lua_module(
        &self,
        paths: &mut Paths<'_, impl AsRef<[u8]>>,
        name: &[u8],
    ) -> Option<Import> {
        let path = name.iter().map(|byte| if *byte == b'.' { b'/' } else { *byte });
        let path = path.collect::<Vec<_>>();
        let endings: [&[u8]; 3] = [b".lua", b"/init.lua", b".so"];
        let mut of_root = |root: &Vec<u8>| {
            endings.iter().find_map(|ending| paths.known(root, &[&path, *ending].concat()))
        };
        self.roots.iter().find_map(&mut of_root).map(super::import)
    }
}
