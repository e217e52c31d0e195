//! Erlang: what a node loads at its start.
//!
//! ```text
//! boot file ─▶ modules ─▶ modules that they call, children of supervisors, libraries
//! -s MODULE ─▶ its application's .app ─▶ applications that it needs ─▶ …
//! ```
//!
//! A node in the mode `interactive` loads the modules of its boot file up to
//! `{kernel_load_completed}`, and others when they are called; in the mode `embedded`, all of them.

mod app;
mod beam;
mod boot;
mod terms;

use super::{
    super::paths::{Found, Paths},
    Import, Imports,
};

/// Parsers, for the fuzz target.
#[cfg(fuzzing)]
pub(super) fn fuzz(bytes: &[u8]) {
    boot::boot(bytes, true);
    beam::beam(bytes);
    app::application(bytes);
    app::plugins(bytes);
}

/// Applications with plugins, which read the descriptions of all applications beside their own, and
/// a file that names the ones to start.
const WITH_PLUGINS: [(&[u8], &[u8]); 1] = [(b"rabbit.app", b"/etc/rabbitmq/enabled_plugins")];

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
    ) -> Option<Found> {
        let file = [name, b".beam"].concat();
        // Those of the run-time system itself are in its program.
        let mut roots = self.roots.iter().filter(|root| !application(root).starts_with(b"erts-"));
        roots.find_map(|root| paths.known(root, &file))
    }

    /// A module that a command starts, and the description of its application.
    pub(super) fn erlang_program(
        &self,
        paths: &mut Paths<'_, impl AsRef<[u8]>>,
        name: &[u8],
    ) -> Vec<Import> {
        let Some(module) = self.erlang_module(paths, name) else { return Vec::new() };
        let described = paths.matching(&[module.directory(), b"/*.app"].concat());
        [module].into_iter().chain(described).map(Import::Module).collect()
    }

    /// The daemon that nodes of a network need.
    pub(super) fn erlang_network(&self, paths: &mut Paths<'_, impl AsRef<[u8]>>) -> Vec<Import> {
        let pattern = |root: &Vec<u8>| [root, &b"/erts-*/bin/epmd"[..]].concat();
        let found = self.roots.iter().flat_map(|root| paths.matching(&pattern(root)));
        found.map(Import::Library).collect()
    }

    /// What a module loads.
    pub(super) fn follow_beam(
        &self,
        paths: &mut Paths<'_, impl AsRef<[u8]>>,
        file: &Found,
        bytes: &[u8],
    ) -> Vec<Import> {
        let beam = beam::beam(bytes);
        let called = beam.called.iter().filter_map(|name| self.erlang_module(paths, name));
        let mut found: Vec<_> = called.map(Import::Module).collect();
        for name in &beam.supervised {
            let name = [name, &b".beam"[..]].concat();
            found.extend(paths.known(file.directory(), &name).map(Import::Module));
        }
        if beam.is_native && self.is_embedded {
            found.extend(native(paths, file.directory()));
        }
        // The kernel only has these functions for others.
        if !application(file.directory()).starts_with(b"kernel-") {
            found.extend(beam.is_listing.then_some(Import::AllListed));
            if beam.is_distributed {
                found.extend(self.erlang_network(paths));
            }
        }
        found
    }

    /// The applications that an application needs, its libraries and its modules.
    pub(super) fn follow_app(
        &self,
        paths: &mut Paths<'_, impl AsRef<[u8]>>,
        file: &Found,
        bytes: &[u8],
    ) -> Vec<Import> {
        let application = app::application(bytes);
        let mut found = self.erlang_applications(paths, &application.needs);
        found.extend(native(paths, file.directory()));
        let mut modules = |names: &[Vec<u8>]| {
            let names = names.iter().map(|name| [name, &b".beam"[..]].concat());
            names.filter_map(|name| paths.known(file.directory(), &name)).collect::<Vec<_>>()
        };
        found.extend(modules(&application.starts).into_iter().map(Import::Module));
        found.extend(modules(&application.modules).into_iter().map(Import::Listed));
        let mut with_plugins = WITH_PLUGINS.iter();
        if let Some((_, enabled)) = with_plugins.find(|(name, _)| file.name() == *name) {
            let described = [file.directory(), b"/../../*/ebin/*.app"].concat();
            found.extend(paths.matching(&described).into_iter().map(Import::Data));
            found.extend(paths.file(b"/", enabled).map(Import::Module));
        }
        found
    }

    /// The applications in a list of plugins.
    pub(super) fn follow_plugins(
        &self,
        paths: &mut Paths<'_, impl AsRef<[u8]>>,
        bytes: &[u8],
    ) -> Vec<Import> {
        self.erlang_applications(paths, &app::plugins(bytes))
    }

    fn erlang_applications(
        &self,
        paths: &mut Paths<'_, impl AsRef<[u8]>>,
        names: &[Vec<u8>],
    ) -> Vec<Import> {
        let mut found = Vec::new();
        for name in names {
            let file = [name, &b".app"[..]].concat();
            let described = self.roots.iter().find_map(|root| paths.known(root, &file));
            found.extend(described.map(Import::Module));
        }
        found
    }

    pub(super) fn follow_boot(
        &self,
        paths: &mut Paths<'_, impl AsRef<[u8]>>,
        bytes: &[u8],
    ) -> Vec<Import> {
        let boot = boot::boot(bytes, self.is_embedded);
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

/// The application, with its version, whose modules are in a directory: `…/NAME-VERSION/ebin`.
fn application(directory: &[u8]) -> &[u8] {
    directory.rsplit(|byte| *byte == b'/').nth(1).unwrap_or_default()
}

/// The libraries that the modules in a directory load.
fn native(paths: &mut Paths<'_, impl AsRef<[u8]>>, directory: &[u8]) -> Vec<Import> {
    let places = [&b"/../priv/*.so"[..], b"/../priv/lib/*.so"];
    let found = places.iter().flat_map(|place| paths.matching(&[directory, place].concat()));
    found.map(Import::Library).collect()
}
