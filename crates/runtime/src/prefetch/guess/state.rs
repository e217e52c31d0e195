//! The state of a guess: known files, and those that follow from them.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    mem::{self, Discriminant},
    slice,
    sync::Arc,
};

use lazuli_image::{erofs::Nid, rafs::Bootstrap};
use serde_json::Value;

use super::{
    Piece,
    command::{self, Process},
    elf::Elf,
    habits::{self, habits, with_script},
    imports::{ClassMap, Classes, Imports, Language, is_called_class_loader},
    known_settings::Settings,
    linker::{Asker, CONFIGURATION, LIBRARY_PATH, Linker, is_of_c_library},
    paths::{Found, Paths},
    shells::Shell,
};

/// Files that are guessed for one image.
const FILES: usize = 8192;

/// Bytes that are guessed for one image.
pub(super) const BYTES: u64 = 512 << 20;

/// Programs that only run another one, of one command: `env nice tini …`.
const WRAPPERS: usize = 16;

/// How often scripts are followed once more, with other words. A script may run itself.
const AGAIN: usize = 64;

/// Maximum size of a file that is read whole: the kernel reads 1 MiB around each page that is
/// touched, and every library below 10 MiB that was observed was read whole.
const WHOLE: u64 = 16 << 20;

/// Maximum size of a program or library that is read whole in the end. Of libraries of 30 MiB and
/// more, 40 % to 78 % were read in scattered places, and each missing part costs a round trip.
const BIG: u64 = 64 << 20;

/// How many bytes such a library has at most for each of code: of one that only holds data, as
/// libicudata.so does, a tenth to a half was read.
const DATA_PER_CODE: u64 = 64;

/// Bytes of code and data of a bigger program or library that are wanted before its libraries are
/// known. The rest would take room, and the link, from files that are read first.
const FIRST_CODE: u64 = 64 << 20;

/// Bytes that are kept for what is wanted after the rest of the code.
pub(super) const AFTER_CODE: u64 = BYTES / 4;

/// Bytes at the beginning of a bigger file that are always read.
pub(super) const HEAD: u64 = 1 << 20;

/// Bytes at the end of a bigger program or library that are always read: its data is there, with
/// the names of its libraries.
const TAIL: u64 = 2 << 20;

/// Maximum size of a Java archive beside the one that is run to be read whole. Of bigger ones, both
/// ends are read: the type, and the directory of their files. Of .NET's assemblies, so many bytes
/// are looked into.
pub(super) const ARCHIVE: u64 = 4 << 20;

/// Limit of the bytes to read of another module or script.
const TEXT: u64 = 128 << 10;

/// Bytes of programs that are searched for names, for one image: a second or two.
const SEARCHED: u64 = 1 << 30;

/// Bytes of files that are wanted because a program's constants name them.
const NAMED: u64 = 4 << 20;

/// Bytes of a file with directories for the dynamic linker.
const CONFIGURATION_BYTES: u64 = 4096;

/// A file to look into.
#[derive(Debug)]
pub(super) struct Visit {
    pub(super) file: Found,
    pub(super) role: Role,
}

impl Visit {
    /// Returns whether the file counts as text, whatever its content looks like.
    pub(super) fn is_text(&self) -> bool {
        !matches!(self.role, Role::Program(_) | Role::Library(_))
    }

    /// The bytes of the file that are read of a text, or of a program before its tables.
    pub(super) fn bytes(&self) -> u64 {
        let limit = match &self.role {
            Role::Module(imports) if imports.has_tables() => ARCHIVE,
            Role::Module(_) if is_called_class_loader(self.file.name()) => ARCHIVE,
            _ => TEXT,
        };
        self.file.size.min(limit)
    }
}

/// The role of a file at the start.
#[derive(Clone, Debug)]
pub(super) enum Role {
    /// The kernel runs it, with these words, its own name first.
    Program(Vec<Vec<u8>>),
    /// A shell reads it, with these words after it.
    Script(Vec<Vec<u8>>),
    /// A shell, one of the guess's, reads it under this name.
    Sourced(usize, Vec<u8>),
    /// A dynamic linker maps it.
    Library(Asker),
    /// An interpreter loads it.
    Module(Arc<Imports>),
    /// It is settings of a server.
    Configuration,
}

/// The content of a file.
#[derive(Debug)]
pub(super) enum Seen {
    /// A program or library.
    Elf(Elf),
    /// Its beginning. It is not ELF.
    Text(Vec<u8>),
    /// It could not be read, or not be understood.
    Nothing,
}

/// A guess in progress.
#[derive(Debug)]
pub(super) struct Guess<'a, B> {
    pub(super) paths: Paths<'a, B>,
    pub(super) process: Process,
    pub(super) linker: Linker,
    pub(super) settings: Settings,
    pub(super) shells: Vec<Shell>,
    /// Programs and libraries that need libraries which were not found.
    incomplete: Vec<(Found, Elf, Asker)>,
    /// What scripts set the variables to in which interpreters look for modules.
    pub(super) module_paths: HashMap<&'static str, Vec<u8>>,
    /// Imports of the interpreters that the start runs.
    pub(super) interpreters: Vec<Arc<Imports>>,
    /// Modules that applications list, while it is not known that they are loaded.
    pub(super) listed: Vec<(Found, Arc<Imports>)>,
    pub(super) loads_listed: bool,
    /// Whether what describes gems was added.
    pub(super) has_described_gems: bool,
    /// The files of classes in PHP.
    pub(super) class_map: ClassMap,
    /// Classes of a program in Java, and archives with its main class.
    pub(super) classes: Classes,
    pub(super) run_archives: HashSet<Nid>,
    /// Compiled modules of interpreters, with the imports of these.
    pub(super) extensions: HashMap<Nid, Arc<Imports>>,
    /// Programs and libraries whose constants were not searched for names.
    pub(super) unsearched: VecDeque<Found>,
    /// Bytes that may yet be searched.
    pub(super) search_left: u64,
    /// What files that constants name may yet have together.
    pub(super) named_left: u64,
    known: HashSet<Nid>,
    /// Files that were looked into, each once for a role: a script is a program of the kernel's,
    /// and then a module of its interpreter's.
    followed: HashSet<(Nid, Discriminant<Role>)>,
    /// Programs that were read: the texts of those that are scripts.
    programs_read: HashMap<Nid, Option<Vec<u8>>>,
    /// Words of further commands that run a program which was not read yet.
    waiting: HashMap<Nid, Vec<Vec<Vec<u8>>>>,
    /// How often a script may yet be followed once more.
    again: usize,
    /// The remainder of [`BYTES`].
    budget: u64,
    /// Pieces that are certainly needed and were not taken yet.
    wanted: Vec<Piece>,
    /// Further code of big programs and libraries, wanted when no more libraries follow.
    pub(super) late: Vec<Piece>,
    /// Pieces that may be needed.
    doubtful: Vec<Piece>,
    /// Programs that were not taken yet.
    programs: Vec<Nid>,
    /// To be looked into.
    pub(super) unseen: VecDeque<Visit>,
}

impl<'a, B: AsRef<[u8]>> Guess<'a, B> {
    /// Starts with the files that follow from `config` and from names alone.
    pub(super) fn new(config: &Value, bootstrap: &'a Bootstrap<B>) -> Self {
        let process = Process::of(config);
        let library_path = process.variable(LIBRARY_PATH).unwrap_or_default();
        let mut guess = Guess {
            paths: Paths::new(bootstrap),
            linker: Linker::new(library_path.to_vec()),
            process,
            settings: Settings::default(),
            shells: Vec::new(),
            incomplete: Vec::new(),
            module_paths: HashMap::new(),
            interpreters: Vec::new(),
            listed: Vec::new(),
            loads_listed: false,
            has_described_gems: false,
            class_map: ClassMap::default(),
            classes: Classes::default(),
            run_archives: HashSet::new(),
            extensions: HashMap::new(),
            unsearched: VecDeque::new(),
            search_left: SEARCHED,
            named_left: NAMED,
            known: HashSet::new(),
            followed: HashSet::new(),
            programs_read: HashMap::new(),
            waiting: HashMap::new(),
            again: AGAIN,
            budget: BYTES,
            wanted: Vec::new(),
            late: Vec::new(),
            doubtful: Vec::new(),
            programs: Vec::new(),
            unseen: VecDeque::new(),
        };
        guess.run(&guess.process.arguments.clone());
        for path in habits::EVERY_CONTAINER {
            let found = guess.paths.file(b"/", path.as_bytes());
            found.iter().for_each(|file| guess.want(file));
        }
        let locale = ["LC_ALL", "LC_CTYPE", "LANG"].map(|name| guess.process.variable(name));
        let locale = locale.into_iter().flatten().find(|locale| !locale.is_empty());
        for patterns in locale.map(habits::locale).unwrap_or_default() {
            guess.first_of(&patterns).iter().for_each(|file| guess.want(file));
        }
        guess
    }

    /// Takes the pieces found since the last call.
    pub(super) fn take_wanted(&mut self) -> Vec<Piece> {
        mem::take(&mut self.wanted)
    }

    /// Takes the programs that the start runs, as far as known, each once.
    pub(super) fn take_programs(&mut self) -> Vec<Nid> {
        mem::take(&mut self.programs)
    }

    /// Wants the code that was put off, as far as there is room left for what follows.
    pub(super) fn want_late(&mut self) {
        for Piece { file, range } in mem::take(&mut self.late) {
            let room = self.budget.saturating_sub(AFTER_CODE);
            let end = range.end.min(range.start.saturating_add(room));
            self.want_piece(Piece { file, range: range.start..end });
        }
    }

    /// Takes the doubtful pieces, once nothing more follows.
    pub(super) fn take_doubtful(&mut self) -> Vec<Piece> {
        for piece in mem::take(&mut self.doubtful) {
            self.want_piece(piece);
        }
        for file in self.take_data() {
            self.want(&file);
        }
        self.take_wanted()
    }

    /// The files with which [`Guess::linker`] has to be configured before anything is followed.
    pub(super) fn configuration(&mut self) -> Vec<Piece> {
        let found =
            CONFIGURATION.iter().flat_map(|pattern| self.paths.matching(pattern.as_bytes()));
        let found = found.filter(|file| (1..=CONFIGURATION_BYTES).contains(&file.size));
        found.map(|file| Piece { file: file.nid, range: 0..file.size }).collect()
    }

    /// Adds the files that follow from a file's content.
    pub(super) fn follow(&mut self, visit: &Visit, seen: Seen) {
        if !matches!(seen, Seen::Text(_)) && matches!(visit.role, Role::Program(_)) {
            self.programs_read.insert(visit.file.nid, None);
            self.again += self.waiting.remove(&visit.file.nid).map_or(0, |words| words.len());
        }
        match (seen, &visit.role) {
            (Seen::Elf(elf), role) => {
                let asker = if let Role::Library(asker) = role { asker } else { &Asker::default() };
                self.follow_elf(&visit.file, elf, asker);
            }
            (Seen::Text(text), Role::Program(words)) => {
                self.programs_read.insert(visit.file.nid, Some(text));
                self.follow_program(&visit.file, words);
                for words in self.waiting.remove(&visit.file.nid).unwrap_or_default() {
                    self.follow_program(&visit.file, &words);
                }
            }
            (Seen::Text(text), Role::Script(words)) => {
                self.follow_script(&visit.file.path, &text, words);
            }
            (Seen::Text(text), Role::Sourced(shell, name)) => {
                self.follow_sourced(*shell, name, text)
            }
            (Seen::Text(text), Role::Module(imports)) => {
                self.follow_module(imports, &visit.file, text);
            }
            (Seen::Text(text), Role::Configuration) => self.follow_settings(&visit.file, &text),
            (Seen::Text(_), Role::Library(_)) | (Seen::Nothing, _) => {}
        }
    }

    /// Adds what a script that the kernel runs brings.
    fn follow_program(&mut self, file: &Found, words: &[Vec<u8>]) {
        let Some(Some(text)) = self.programs_read.get(&file.nid) else { return };
        let Some(interpreter) = command::shebang(text) else { return };
        let is_shell = interpreter.iter().any(|word| command::is_shell(word));
        let rest = words.get(1..).unwrap_or_default();
        if is_shell {
            let text = text.clone();
            self.run(&interpreter);
            self.follow_script(&file.path, &text, rest);
        } else {
            let script = slice::from_ref(&file.path);
            self.run(&[&interpreter, script, rest].concat());
        }
    }

    /// A program is run once more, with other words: scripts go by these.
    fn run_again(&mut self, file: &Found, words: &[Vec<u8>]) {
        let Some(again) = self.again.checked_sub(1) else { return };
        match self.programs_read.get(&file.nid) {
            Some(None) => {}
            Some(Some(_)) => {
                self.again = again;
                self.follow_program(file, words);
            }
            None => {
                self.again = again;
                self.waiting.entry(file.nid).or_default().push(words.to_vec());
            }
        }
    }

    fn follow_elf(&mut self, file: &Found, elf: Elf, asker: &Asker) {
        if file.size > WHOLE {
            self.want_parts(file, &elf);
        }
        if !is_of_c_library(file) {
            self.unsearched.push_back(file.clone());
        }
        self.follow_libraries(file, elf, asker);
    }

    /// Adds the dynamic linker and the libraries of a program or library.
    fn follow_libraries(&mut self, file: &Found, elf: Elf, asker: &Asker) {
        let asker = self.linker.asker(&mut self.paths, file, &elf, asker);
        if let Some(interpreter) = &elf.interpreter
            && let Some(found) = self.paths.file(b"/", interpreter)
        {
            self.visit(found, Role::Library(asker.clone()));
        }
        let (found, is_complete) = self.linker.libraries(&mut self.paths, file, &elf, &asker);
        for library in found {
            self.visit(library, Role::Library(asker.clone()));
        }
        if !is_complete {
            self.incomplete.push((file.clone(), elf, asker));
        }
    }

    /// Adds what is found with directories that a script names.
    pub(super) fn follow_library_path(&mut self, list: &[u8]) {
        if self.linker.add_library_path(list) {
            for (file, elf, asker) in mem::take(&mut self.incomplete) {
                self.follow_libraries(&file, elf, &asker);
            }
        }
    }

    /// Adds the files that a command reads.
    pub(super) fn run(&mut self, words: &[Vec<u8>]) {
        self.run_within(words, WRAPPERS);
    }

    fn run_within(&mut self, words: &[Vec<u8>], wrappers: usize) {
        if self.paths.is_spent() {
            return;
        }
        let Some((name, rest)) = words.split_first() else { return };
        let Some(file) = self.program(name) else { return };
        self.visit(file.clone(), Role::Program(words.to_vec()));
        self.add_settings(&file, words);
        let directory = self.process.directory.clone();
        let is_shell = command::is_shell(name);
        if let Some(shell) = command::shell_of_user(name, rest)
            && wrappers > 0
        {
            self.run_within(&[shell.to_vec()], wrappers - 1);
        }
        if let Some(at) = command::text_at(name, rest) {
            let text = rest.get(at).cloned().unwrap_or_default();
            return self.follow_script(name, &text, rest.get(at + 1..).unwrap_or_default());
        }
        if command::is_wrapper(name)
            && wrappers > 0
            && let Some(at) = rest.iter().position(|word| self.program(word).is_some())
        {
            return self.run_within(&rest[at..], wrappers - 1);
        }
        // `tool server` may run `tool-server`.
        if let Some((verb, rest)) = rest.split_first()
            && !verb.starts_with(b"-")
            && wrappers > 0
        {
            self.run_within(&[&[[name, &b"-"[..], verb].concat()], rest].concat(), wrappers - 1);
        }
        if let Some(launched) = command::launched(name)
            && wrappers > 0
        {
            return self.run_within(&[&[launched.to_vec()], rest].concat(), wrappers - 1);
        }
        let is_module = rest.iter().any(|word| word == b"-m");
        let mut applications = Vec::from_iter(is_module.then(|| directory.clone()));
        let mut scripts = Vec::new();
        // Java servers are told where their archives are: `-Dapp.home=/opt/app`.
        let mut told = Vec::new();
        for (at, word) in rest.iter().enumerate() {
            let value = word.rsplit(|byte| *byte == b'=').next().unwrap_or_default();
            if word.starts_with(b"-D") && word.len() > value.len() {
                told.extend(self.paths.directory(b"/", value));
            }
            let Some(script) = self.paths.file(&directory, value) else { continue };
            if is_shell {
                return self.visit(script, Role::Script(rest[at + 1..].to_vec()));
            }
            scripts.push(script.clone());
            if applications.is_empty() {
                // Its files may also be beside a link to it.
                let end = value.iter().rposition(|byte| *byte == b'/').map_or(0, |at| at + 1);
                applications.extend(self.paths.directory(&directory, &value[..end]));
                applications.push(script.directory().to_vec());
                applications.dedup();
                // `-jar /opt/app/bin/start.jar`
                let bin = applications.iter().filter_map(|path| path.strip_suffix(b"/bin"));
                told.extend(bin.map(<[u8]>::to_vec));
            }
        }
        // Servers load the application that is in the directory in which they start.
        let mut places = applications.clone();
        if directory != b"/" || places.is_empty() {
            places.push(directory);
        }
        self.follow_words(&file, &places, rest, scripts);
        applications.extend(told);
        for patterns in applications.iter().flat_map(|path| with_script(&file, path)) {
            for found in self.first_of(&patterns) {
                if found.is_library() {
                    self.visit(found, Role::Library(Asker::default()));
                } else if found.name().ends_with(b".jar") {
                    let java = Arc::new(Imports::within(Language::Java, found.directory()));
                    self.visit_module(found, &java);
                } else {
                    self.want(&found);
                }
            }
        }
    }

    /// The program that `name` means.
    pub(super) fn program(&mut self, name: &[u8]) -> Option<Found> {
        if name.contains(&b'/') {
            let found = self.paths.file(&self.process.directory, name);
            return found.filter(|file| file.is_executable);
        }
        let places = self.process.search_path();
        places
            .iter()
            .find_map(|place| self.paths.file(place, name).filter(|file| file.is_executable))
    }

    /// The start has opened a file that nothing named: a plug-in, perhaps, or a module.
    pub(super) fn open(&mut self, path: &[u8]) {
        let Some(file) = self.paths.file(b"/", path) else { return };
        if !self.follow_loaded(&file) {
            self.add_missed_settings(&file);
        }
    }

    /// Adds a program or library, with the files that go with it.
    pub(super) fn visit(&mut self, file: Found, role: Role) {
        let asker = if let Role::Library(asker) = &role { asker.clone() } else { Asker::default() };
        let mut new = VecDeque::from([(file, role)]);
        while let Some((file, role)) = new.pop_front() {
            let head = if file.size > WHOLE { HEAD } else { file.size };
            if self.want_head(&file, head) && file.size > WHOLE {
                let range = file.size - TAIL..file.size;
                self.want_piece(Piece { file: file.nid, range });
            }
            let is_wanted = self.known.contains(&file.nid);
            // What a script is sourced for depends on the shell.
            let is_sourced = matches!(role, Role::Sourced(..));
            if !is_wanted
                || !is_sourced && !self.followed.insert((file.nid, mem::discriminant(&role)))
            {
                if let Role::Program(words) = &role {
                    self.run_again(&file, words);
                }
                continue;
            }
            if matches!(role, Role::Program(_)) {
                self.programs.push(file.nid);
            }
            if !matches!(role, Role::Configuration | Role::Module(_) | Role::Sourced(..)) {
                self.add_habits(&file, &asker, &mut new);
            }
            self.unseen.push_back(Visit { file, role });
        }
    }

    /// Adds the files that go with a program or library; those to look into go to `new`.
    fn add_habits(&mut self, file: &Found, asker: &Asker, new: &mut VecDeque<(Found, Role)>) {
        for patterns in habits(file) {
            for found in self.first_of(&patterns) {
                if found.is_executable || found.is_library() {
                    new.push_back((found, Role::Library(asker.clone())));
                } else if habits::is_settings(&found) {
                    new.push_back((found, Role::Configuration));
                } else {
                    self.want(&found);
                }
            }
        }
    }

    /// The files of the first pattern that matches any.
    fn first_of(&mut self, patterns: &[Vec<u8>]) -> Vec<Found> {
        let found = patterns.iter().map(|pattern| self.paths.matching(pattern));
        found.into_iter().find(|found| !found.is_empty()).unwrap_or_default()
    }

    /// Returns whether the start runs a file, as far as it is known.
    pub(super) fn is_run(&self, file: &Found) -> bool {
        self.programs_read.contains_key(&file.nid)
    }

    /// Returns whether something of a file was added.
    pub(super) fn is_known(&self, file: &Found) -> bool {
        self.known.contains(&file.nid)
    }

    /// Adds a file other than a program or library, or the parts of a big file that are read first.
    pub(super) fn want(&mut self, file: &Found) {
        if file.size <= WHOLE {
            self.want_head(file, file.size);
        } else if file.name().ends_with(b".jar") {
            self.want_ends(file);
        } else if self.want_head(file, HEAD)
            && let Some(head) = habits::head(file)
        {
            let range = HEAD..head.min(file.size);
            self.doubtful.push(Piece { file: file.nid, range });
        }
    }

    /// Adds both ends of a big archive.
    pub(super) fn want_ends(&mut self, file: &Found) {
        if self.want_head(file, HEAD) {
            let range = file.size - HEAD..file.size;
            self.want_piece(Piece { file: file.nid, range });
        }
    }

    /// Adds the first `len` bytes of a file. Returns whether it is new and there is room for it.
    fn want_head(&mut self, file: &Found, len: u64) -> bool {
        let fits = self.known.len() < FILES && len <= self.budget;
        let is_new = fits && self.known.insert(file.nid);
        if is_new {
            self.want_piece(Piece { file: file.nid, range: 0..len });
        }
        is_new
    }

    /// Adds the parts of a big file between head and tail: executed and writable parts first,
    /// tables and constants at the end.
    fn want_parts(&mut self, file: &Found, elf: &Elf) {
        let end = file.size - TAIL;
        let mut between = Vec::new();
        let mut from = HEAD;
        let mut first = FIRST_CODE;
        for part in &elf.code_and_data {
            let part = part.start.clamp(from, end)..part.end.min(end);
            if !part.is_empty() {
                between.push(from..part.start);
                from = part.end;
                let late = part.end.min(part.start + first);
                first -= late - part.start;
                self.want_piece(Piece { file: file.nid, range: part.start..late });
                self.late.push(Piece { file: file.nid, range: late..part.end });
            }
        }
        between.push(from..end);
        if file.size <= BIG && elf.code >= file.size / DATA_PER_CODE {
            let pieces = between.into_iter().map(|range| Piece { file: file.nid, range });
            self.doubtful.extend(pieces);
        }
    }

    pub(super) fn want_piece(&mut self, piece: Piece) {
        let len = piece.range.end.saturating_sub(piece.range.start);
        if len > 0 && len <= self.budget {
            self.budget -= len;
            self.wanted.push(piece);
        }
    }
}
