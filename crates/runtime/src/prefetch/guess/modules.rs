//! Follows scripts and modules to the programs that they run and the modules that they load.

use std::{mem, sync::Arc};

use super::{
    Piece,
    command::MODULE_PATHS,
    habits,
    imports::{self, IMAGE, Import, Imports, Language, Place, Started},
    linker::{Asker, LIBRARY_PATH},
    paths::Found,
    shells::Shell,
    state::{ARCHIVE, Guess, HEAD, Role},
};

/// Up to this size a file is read that a script asks about: bigger ones are no configuration.
const ASKED: u64 = 64 << 10;

/// Files of an application in PHP that a web server runs, in a directory that its configuration
/// names.
const INDEX: &[u8] = b"index.php";

/// Modules that applications list.
const LISTED: usize = 1 << 14;

/// Limits of the bytes of classes in Java's image that are followed: of one, and of those of one
/// step.
const CLASS: u64 = 256 << 10;
const CLASSES: u64 = 8 << 20;

/// Interpreters whose imports are known, for files that nothing names.
const INTERPRETERS: usize = 64;

/// Shells that are followed for one image, and scripts that all of them source.
const SHELLS: usize = 64;
const SOURCES: usize = 64;

impl<B: AsRef<[u8]>> Guess<'_, B> {
    /// Adds the effects of a shell script at `path` with the arguments `words`.
    pub(super) fn follow_script(&mut self, path: &[u8], text: &[u8], words: &[Vec<u8>]) {
        if self.shells.len() < SHELLS {
            self.shells.push(Shell::new(path, text, words));
            self.follow_shell(self.shells.len() - 1);
        }
    }

    /// Adds the effects of a script that a shell sources: those of the shell, with this text known.
    pub(super) fn follow_sourced(&mut self, shell: usize, name: &[u8], text: Vec<u8>) {
        self.shells[shell].sources.insert(name.to_vec(), text);
        self.follow_shell(shell);
    }

    fn follow_shell(&mut self, at: usize) {
        let shell = &self.shells[at];
        let (environment, directory) = (&self.process.environment, &self.process.directory);
        let started = Started {
            path: &shell.path,
            arguments: &shell.words,
            environment,
            sources: &shell.sources,
        };
        let mut exists = |path: &[u8]| self.paths.exists(directory, path);
        let script = imports::shell(&shell.text, started, &mut exists);
        let words = shell.words.clone();
        if let Some(path) = script.variables.get(LIBRARY_PATH.as_bytes()) {
            self.follow_library_path(path);
        }
        for name in MODULE_PATHS {
            if let Some(list) = script.variables.get(name.as_bytes()) {
                self.module_paths.insert(name, list.clone());
            }
        }
        for mut command in script.commands {
            self.find_beside(at, &mut command);
            if self.shells[at].is_new(&command) {
                self.run(&command);
            }
        }
        let directory = self.process.directory.clone();
        for name in script.sourced {
            let sources: usize = self.shells.iter().map(|shell| shell.sources.len()).sum();
            let has_room = sources < SOURCES;
            if let Some(file) = self.paths.file(&directory, &name).filter(|_| has_room) {
                self.shells[at].sources.insert(name.clone(), Vec::new());
                self.visit(file, Role::Sourced(at, name));
            }
        }
        for pattern in &script.files {
            for file in self.paths.matching(pattern) {
                if file.name().ends_with(b".jar") {
                    let java = Arc::new(Imports::within(Language::Java, file.directory()));
                    self.visit_module(file, &java);
                } else if file.size <= ASKED {
                    self.want(&file);
                }
            }
        }
        // Many scripts end by running their arguments.
        if self.shells[at].is_new(&words) {
            self.run(&words);
        }
    }

    /// Looks for a program beside its script, if the directory before its name is not known:
    /// scripts find out where they are in many ways. What comes before it then stands for cases
    /// that do not occur, such as a debugger.
    fn find_beside(&mut self, shell: usize, command: &mut Vec<Vec<u8>>) {
        let path = &self.shells[shell].path;
        let Some(slash) = path.iter().rposition(|byte| *byte == b'/') else { return };
        let script = path[..slash].to_vec();
        if command.first().is_none_or(|name| self.program(name).is_some()) {
            return;
        }
        for at in 0..command.len() {
            let word = &command[at];
            if !word.starts_with(b"/") || self.paths.exists(b"/", word) {
                continue;
            }
            let places = [script.clone(), [&script[..], b"/.."].concat()];
            let mut places = places.iter().map(|place| [place, &word[..]].concat());
            if let Some(found) = places.find(|path| self.program(path).is_some()) {
                command[at] = found;
                command.drain(..at);
                return;
            }
        }
    }

    /// Adds the files that an interpreter reads for its arguments, if `program` is one. `scripts`
    /// are the files among them.
    pub(super) fn follow_words(
        &mut self,
        program: &Found,
        applications: &[Vec<u8>],
        words: &[Vec<u8>],
        scripts: Vec<Found>,
    ) {
        // Erlang is told where modules are by its arguments.
        let named = words.windows(2).filter(|pair| matches!(&pair[0][..], b"-pa" | b"-pz"));
        let mut more: Vec<_> = named.map(|pair| pair[1].clone()).collect();
        for name in MODULE_PATHS {
            let of_script = self.module_paths.get(name).map(Vec::as_slice);
            let list = self.process.variable(name).or(of_script).unwrap_or_default();
            // `ERL_LIBS` names directories of libraries.
            let ending: &[u8] = if name == "ERL_LIBS" { b"/*/ebin" } else { b"" };
            // Lua's are patterns: `/lib/?.lua;/lib/?/init.lua`.
            let places = list.split(|byte| b":;".contains(byte));
            let places = places.flat_map(|place| place.split(|byte| *byte == b'?').next());
            let places = places.filter(|place| !place.is_empty());
            more.extend(places.map(|place| [place, ending].concat()));
        }
        let more = more.join(&b':');
        let root = self.process.variable("DOTNET_ROOT");
        let hosted = imports::dotnet(&mut self.paths, program, &scripts, root);
        if let Some((configuration, imports)) = hosted {
            scripts.iter().for_each(|script| self.want(script));
            let imports = Arc::new(imports);
            self.note_imports(&imports);
            return self.visit_module(configuration, &imports);
        }
        let imports = Imports::of(&mut self.paths, program, applications, words, &more);
        let Some(imports) = imports else {
            scripts.iter().for_each(|script| self.want(script));
            return;
        };
        let imports = Arc::new(imports);
        self.note_imports(&imports);
        if imports.is_java() {
            match imports::main_class(program.name(), words) {
                Some(main) => self.classes.add_main(main),
                None => self.run_archives.extend(scripts.iter().map(|script| script.nid)),
            }
        }
        for script in scripts {
            self.visit_module(script, &imports);
        }
        let found = imports.follow_words(&mut self.paths, words, program);
        self.add_imports(&imports, found);
    }

    /// Adds the modules that a module loads.
    pub(super) fn follow_module(&mut self, imports: &Arc<Imports>, file: &Found, text: Vec<u8>) {
        if imports.is_java() && file.name() == IMAGE {
            return self.classes.add_image(file, &text);
        }
        let found = imports.follow(&mut self.paths, file, &text);
        if imports.is_java() {
            if self.run_archives.contains(&file.nid)
                && let Some(main) = imports::main_of(&text)
            {
                self.classes.add_main(&main);
            }
            self.classes.add_archive(text);
        }
        self.add_imports(imports, found);
    }

    /// Takes the pieces of Java's image that are read for classes, and those with the classes
    /// themselves that are to be followed.
    pub(super) fn take_classes(&mut self, places: &[Place]) -> (Vec<Piece>, Vec<Piece>) {
        let Some(image) = self.classes.image().cloned() else { return Default::default() };
        let head = habits::head(&image).unwrap_or(HEAD);
        for range in self.classes.parts(places, head) {
            self.want_piece(Piece { file: image.nid, range });
        }
        let mut room = CLASSES;
        let is_readable = |place: &&Place| {
            let len = place.range.end - place.range.start;
            let fits = (1..=CLASS.min(room)).contains(&len) && place.range.end <= image.size;
            let is_readable = fits && !place.is_opaque;
            room -= if is_readable { len } else { 0 };
            is_readable
        };
        let readable = places.iter().filter(is_readable);
        let readable = readable.map(|place| Piece { file: image.nid, range: place.range.clone() });
        (self.take_wanted(), readable.collect())
    }

    /// Adds the application in a directory that a server's settings name.
    pub(super) fn follow_application(&mut self, directory: &[u8]) {
        if let Some(index) = self.paths.file(directory, INDEX) {
            let php = Arc::new(Imports::within(Language::Php, index.directory()));
            self.visit_module(index, &php);
        }
    }

    /// Adds what a library or a module that is loaded brings: which imports it belongs to is known
    /// by the interpreters of the start. Returns whether it is one.
    pub(super) fn follow_loaded(&mut self, file: &Found) -> bool {
        // In some images every file may be executed.
        let is_program = file.is_executable && !file.name().contains(&b'.');
        if is_program || file.is_library() {
            self.visit(file.clone(), Role::Library(Asker::default()));
            return true;
        }
        let of_it = self.interpreters.iter().filter(|imports| imports.is_module(file.name()));
        let imports = of_it.max_by_key(|imports| imports.places()).cloned();
        imports.iter().for_each(|imports| self.visit_module(file.clone(), imports));
        imports.is_some()
    }

    /// Adds the modules that a text of settings names, for the interpreters of the start.
    pub(super) fn follow_named(&mut self, name: &[u8]) {
        for imports in self.interpreters.clone() {
            let found = imports.named(&mut self.paths, name);
            self.add_imports(&imports, found);
        }
    }

    /// Notes the imports of an interpreter that the start runs.
    fn note_imports(&mut self, imports: &Arc<Imports>) {
        if self.interpreters.len() < INTERPRETERS && !self.interpreters.contains(imports) {
            self.interpreters.push(imports.clone());
        }
    }

    pub(super) fn add_imports(&mut self, imports: &Arc<Imports>, found: Vec<Import>) {
        for import in found {
            match import {
                Import::Module(file) => self.visit_module(file, imports),
                Import::Within(file, imports) => {
                    self.note_imports(&imports);
                    self.visit_module(file, &imports);
                }
                Import::Library(file) => {
                    if imports.has_compiled_modules() {
                        self.extensions.insert(file.nid, imports.clone());
                    }
                    self.visit(file, Role::Library(Asker::default()));
                }
                Import::Data(file) => self.want(&file),
                Import::Listed(file) if self.loads_listed => self.visit_module(file, imports),
                Import::Listed(file) if self.listed.len() < LISTED => {
                    self.listed.push((file, imports.clone()));
                }
                Import::Listed(_) => {}
                Import::Gems => {
                    if !mem::replace(&mut self.has_described_gems, true) {
                        let described = imports.described_gems(&mut self.paths);
                        described.iter().for_each(|file| self.want(file));
                    }
                }
                Import::Class(name) => {
                    let files = self.class_map.look_for(name);
                    let file = files.iter().find_map(|path| self.paths.file(b"/", path));
                    file.into_iter().for_each(|file| self.visit_module(file, imports));
                }
                Import::ClassMap(entries) => {
                    for path in self.class_map.add(entries) {
                        let file = self.paths.file(b"/", &path);
                        file.into_iter().for_each(|file| self.visit_module(file, imports));
                    }
                }
                Import::AllListed => {
                    self.loads_listed = true;
                    for (file, imports) in mem::take(&mut self.listed) {
                        self.visit_module(file, &imports);
                    }
                }
            }
        }
    }

    /// Adds a module, or of a big archive both ends.
    pub(super) fn visit_module(&mut self, file: Found, imports: &Arc<Imports>) {
        if file.size > ARCHIVE && file.name().ends_with(b".jar") {
            self.want_ends(&file);
        } else {
            self.visit(file, Role::Module(imports.clone()));
        }
    }
}
