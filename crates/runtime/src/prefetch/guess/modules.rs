//! Follows scripts and modules to the programs that they run and the modules that they load.

use std::sync::Arc;

use super::{
    command::MODULE_PATHS,
    imports::{self, Import, Imports, Language, Script, Started},
    linker::Asker,
    paths::Found,
    state::{ARCHIVE, Guess, Role},
};

/// Up to this size a file is read that a script asks about: bigger ones are no configuration.
const ASKED: u64 = 64 << 10;

/// Files of an application in PHP that a web server runs, in a directory that its configuration
/// names.
const INDEX: &[u8] = b"index.php";

impl<B: AsRef<[u8]>> Guess<'_, B> {
    /// Adds the effects of a shell script at `path` with the arguments `words`.
    pub(super) fn follow_script(&mut self, path: &[u8], text: &[u8], words: &[Vec<u8>]) {
        let environment = self.process.environment.clone();
        let started = Started { path, arguments: words, environment: &environment };
        let mut script = Script::default();
        imports::shell(text, started, &mut script);
        for command in &script.commands {
            self.run(command);
        }
        let directory = self.process.directory.clone();
        for sourced in &script.sourced {
            if let Some(file) = self.paths.file(&directory, sourced) {
                self.visit(file, Role::Script(words.to_vec()));
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
        self.run(words);
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
        let more = MODULE_PATHS.iter().find_map(|name| self.process.variable(name));
        let more = more.unwrap_or_default().to_vec();
        let Some(imports) = Imports::of(&mut self.paths, program, applications, &more) else {
            scripts.iter().for_each(|script| self.want(script));
            return;
        };
        let imports = Arc::new(imports);
        for script in scripts {
            self.visit_module(script, &imports);
        }
        let found = imports.follow_words(&mut self.paths, words, program);
        self.add_imports(&imports, found);
    }

    /// Adds the modules that a module loads.
    pub(super) fn follow_module(&mut self, imports: &Arc<Imports>, file: &Found, text: &[u8]) {
        let found = imports.follow(&mut self.paths, file, text);
        self.add_imports(imports, found);
    }

    /// Adds the applications of directories that a server's configuration names.
    pub(super) fn follow_directories(&mut self, text: &[u8]) {
        for directory in super::command::directories(text) {
            if let Some(index) = self.paths.file(directory, INDEX) {
                let php = Arc::new(Imports::within(Language::Php, index.directory()));
                self.visit_module(index, &php);
            }
        }
    }

    fn add_imports(&mut self, imports: &Arc<Imports>, found: Vec<Import>) {
        for import in found {
            match import {
                Import::Module(file) => self.visit_module(file, imports),
                Import::Library(file) => self.visit(file, Role::Library(Asker::default())),
                Import::Data(file) => self.want(&file),
            }
        }
    }

    /// Adds a module, or of a big archive both ends.
    fn visit_module(&mut self, file: Found, imports: &Arc<Imports>) {
        if file.size > ARCHIVE && file.name().ends_with(b".jar") {
            self.want_ends(&file);
        } else {
            self.visit(file, Role::Module(imports.clone()));
        }
    }
}
