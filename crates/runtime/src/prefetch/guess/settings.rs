//! Follows the settings of servers to plug-ins and further settings.
//!
//! ```text
//! program ─┬─▶ settings ─┬─▶ settings ─▶ …
//!          │             └─▶ words ────────┬─▶ plug-ins ─▶ …
//!          └─▶ directories of plug-ins ────┘
//! ```
//!
//! A word means a plug-in that is called after it: `pap` in `/etc/server/server.conf` means
//! `/usr/lib/server/rlm_pap.so`.

use std::{
    collections::{HashMap, HashSet},
    mem,
};

use super::{
    command, imports,
    linker::Asker,
    paths::Found,
    state::{Guess, Role},
};

/// Limits of the bytes of settings: of one file, and of all in one image. FreeRADIUS has 1 MB, most
/// of it dictionaries.
const SETTINGS: u64 = 128 << 10;
const ALL_SETTINGS: u64 = 4 << 20;

/// Files of a program's own directory that are all settings, and of one that is named. Directories
/// with more hold data, as /etc/ssl/certs does.
const FILES: usize = 256;
const NAMED_FILES: usize = 64;

/// Words, and names of plug-ins, that are compared for one image.
const WORDS: usize = 1 << 16;
const PLUGINS: usize = 1 << 14;

/// The shortest name of a program, and the shortest word that means a plug-in.
const SHORTEST: usize = 2;

/// The settings of the program `$NAME`.
const SETTINGS_OF: [&str; 2] = ["/etc/$NAME.conf", "/etc/$NAME"];

/// Its settings in the directory in which it starts.
const SETTINGS_HERE: [&str; 8] = [
    "$NAME.config.*",
    ".$NAMErc*",
    "$NAME.conf",
    "$NAME.ini",
    "$NAME.json",
    "$NAME.toml",
    "$NAME.yaml",
    "$NAME.yml",
];

/// Its data, and how many bytes of it are read at most.
const DATA_OF: &str = "/usr/share/$NAME/*";
const DATA: u64 = 2 << 20;

/// How the names of plug-ins end. `.la` describes the library beside it to those that load it.
const PLUGINS_END: [&[u8]; 8] = [b".so", b".la", b".lua", b".py", b".pl", b".pm", b".rb", b".js"];

/// Directories with its plug-ins.
const PLUGINS_OF: [&str; 5] = [
    "/usr/lib/$NAME",
    "/usr/lib/*-linux-*/$NAME",
    "/usr/lib64/$NAME",
    "/usr/libexec/$NAME",
    "/opt/$NAME",
];

/// What the settings of one image are known to say.
#[derive(Debug, Default)]
pub(super) struct Settings {
    /// Programs, files with settings, and directories with plug-ins that were looked at.
    seen: HashSet<Vec<u8>>,
    /// Directories with plug-ins, to be listed as soon as there are settings.
    unlisted: Vec<Vec<u8>>,
    /// Directories and patterns of settings that were listed.
    listed: HashSet<Vec<u8>>,
    words: HashSet<Vec<u8>>,
    /// Plug-ins by the words that mean them.
    plugins: HashMap<Vec<u8>, Vec<Found>>,
    /// Plug-ins that are scripts, and words that may name modules, which were not followed.
    scripts: Vec<Found>,
    names: Vec<Vec<u8>>,
    /// Bytes of settings that were read.
    bytes: u64,
}

impl<B: AsRef<[u8]>> Guess<'_, B> {
    /// Adds the settings of a program that was run by `words`, its own name first.
    pub(super) fn add_settings(&mut self, program: &Found, words: &[Vec<u8>]) {
        let Some((name, arguments)) = words.split_first() else { return };
        let last = |path: &[u8]| path.rsplit(|byte| *byte == b'/').next().map(<[u8]>::to_vec);
        let current = self.process.directory.clone();
        if imports::is_interpreter(program.name()) {
            // `node lint.js` is run as `lint` elsewhere.
            let mut files = arguments.iter().filter(|word| !word.starts_with(b"-"));
            let script = files.find_map(|word| Some((word, self.paths.file(&current, word)?)));
            let name = script.and_then(|(word, _)| last(word)).unwrap_or_default();
            let stem = name.split(|byte| *byte == b'.').next().unwrap_or_default();
            return self.add_settings_of(stem);
        }
        let name = last(name).unwrap_or_default();
        if !may_have_settings(&name) {
            return;
        }
        for name in [&name, program.name()] {
            // `sshd` has its settings in /etc/ssh.
            let shorter = [&b"d"[..], b"ctl", b"-server"].map(|end| name.strip_suffix(end));
            for name in [Some(name)].into_iter().chain(shorter).flatten() {
                self.add_settings_of(name);
            }
        }
        for argument in arguments {
            let path = argument.rsplit(|byte| *byte == b'=').next().unwrap_or_default();
            if let Some(directory) = self.paths.directory(&current, path) {
                self.add_named_directory(&directory);
            } else if let Some(file) = self.paths.file(&current, path) {
                self.add_setting(&file.path, 1);
            }
        }
    }

    fn add_settings_of(&mut self, name: &[u8]) {
        let is_name = name.len() >= SHORTEST && !name.contains(&b'*');
        if !is_name || !self.settings.seen.insert(name.to_vec()) {
            return;
        }
        let fill = |pattern: &str| {
            let parts = pattern.split("$NAME").map(str::as_bytes).collect::<Vec<_>>();
            parts.join(name)
        };
        let places = PLUGINS_OF.map(|place| self.paths.directories(&fill(place)));
        places.into_iter().flatten().for_each(|place| self.add_plugins(place));
        for place in SETTINGS_OF {
            self.add_setting(&fill(place), FILES);
        }
        for pattern in SETTINGS_HERE {
            let pattern = [&self.process.directory, &b"/"[..], &fill(pattern)].concat();
            for file in self.paths.matching(&pattern) {
                self.add_setting(&file.path, 1);
                self.settings.scripts.push(file);
            }
        }
        let data = self.paths.matching(&fill(DATA_OF));
        let bytes: u64 = data.iter().map(|file| file.size).sum();
        if data.len() <= FILES && bytes <= DATA {
            data.iter().for_each(|file| self.want(file));
        }
    }

    /// Adds a directory that a program's constants or settings name: of settings, or of plug-ins.
    pub(super) fn add_named_directory(&mut self, directory: &[u8]) {
        let parts = directory.split(|byte| *byte == b'/').skip(1).collect::<Vec<_>>();
        match parts[..] {
            [b"etc", _, ..] => self.add_setting(directory, NAMED_FILES),
            // Others have whatever the image has.
            [b"usr", b"lib" | b"lib64" | b"libexec" | b"share", _, ..] | [b"opt", _, ..]
                if !self.linker.looks_in(directory) =>
            {
                self.add_plugins(directory.to_vec());
            }
            _ => {}
        }
    }

    /// Adds a file as settings, or those that a pattern matches, or all in a directory if there are
    /// not more than `most`.
    fn add_setting(&mut self, path: &[u8], most: usize) {
        let found = match self.paths.directory(b"/", path) {
            Some(directory) if !self.settings.listed.insert(directory.clone()) => return,
            Some(directory) => {
                self.paths.below(&directory).into_iter().map(|(_, file)| file).collect()
            }
            None if !path.contains(&b'*') => self.paths.file(b"/", path).into_iter().collect(),
            None if self.settings.listed.insert(path.to_vec()) => self.paths.matching(path),
            None => return,
        };
        if found.len() > most {
            return;
        }
        for file in found {
            let bytes = self.settings.bytes + file.size;
            if !self.settings.seen.insert(file.path.clone()) {
                continue;
            }
            if !file.is_executable && file.size <= SETTINGS && bytes <= ALL_SETTINGS {
                self.settings.bytes = bytes;
                self.visit(file, Role::Configuration);
            }
        }
    }

    /// Adds a file that the start has read and that nothing names, if it may be settings.
    pub(super) fn add_missed_settings(&mut self, file: &Found) {
        if !self.settings.words.is_empty() {
            self.add_setting(&file.path, 1);
        }
    }

    /// Adds what a file of settings names.
    pub(super) fn follow_settings(&mut self, file: &Found, text: &[u8]) {
        // What is relative is so to the file's directory, or to that of the server's own files.
        let bases = [file.directory().to_vec(), [file.directory(), b"/.."].concat()];
        for word in command::words(text) {
            if self.paths.is_spent() || self.settings.words.len() >= WORDS {
                break;
            }
            if word.contains(&b'/') || word.contains(&b'.') {
                self.follow_path(&bases, word);
            }
            if self.settings.words.insert(word.to_vec()) {
                if word.contains(&b'.') || word.contains(&b':') {
                    self.settings.names.push(word.to_vec());
                }
                for plugin in self.settings.plugins.remove(word).unwrap_or_default() {
                    self.add_plugin(plugin);
                }
            }
        }
        for directory in mem::take(&mut self.settings.unlisted) {
            self.list_plugins(&directory);
        }
    }

    fn follow_path(&mut self, bases: &[Vec<u8>], word: &[u8]) {
        if word.starts_with(b"/") {
            self.follow_application(word);
        }
        for base in bases {
            let is_pattern = word.contains(&b'*');
            if !word.starts_with(b"/") && !is_pattern && !self.paths.may_have(base, word) {
                continue;
            }
            let path =
                if word.starts_with(b"/") { word } else { &[base, &b"/"[..], word].concat() };
            if is_pattern {
                self.add_setting(path, NAMED_FILES);
            } else if let Some(directory) = self.paths.directory(b"/", path) {
                return self.add_named_directory(&directory);
            } else if let Some(file) = self.paths.file(b"/", path) {
                return match file.is_library() {
                    true => self.visit(file, Role::Library(Asker::default())),
                    false => self.add_setting(path, 1),
                };
            }
        }
    }

    /// Adds a directory with plug-ins.
    fn add_plugins(&mut self, directory: Vec<u8>) {
        if self.settings.words.is_empty() {
            self.settings.unlisted.push(directory);
        } else {
            self.list_plugins(&directory);
        }
    }

    /// Compares the plug-ins in a directory with the words that are known.
    fn list_plugins(&mut self, directory: &[u8]) {
        if !self.settings.seen.insert(directory.to_vec()) {
            return;
        }
        for (name, file) in self.paths.below(directory) {
            let names = words_for(&name);
            if names.iter().any(|name| self.settings.words.contains(name)) {
                self.add_plugin(file);
            } else if self.settings.plugins.len() < PLUGINS {
                for name in names {
                    self.settings.plugins.entry(name).or_default().push(file.clone());
                }
            }
        }
    }

    fn add_plugin(&mut self, file: Found) {
        if file.is_library() {
            return self.visit(file, Role::Library(Asker::default()));
        }
        self.want(&file);
        self.settings.scripts.push(file);
    }

    /// Follows scripts and modules that settings name, once it is known where modules are. Returns
    /// whether there are any.
    pub(super) fn follow_scripts(&mut self) -> bool {
        let scripts = mem::take(&mut self.settings.scripts);
        let names = mem::take(&mut self.settings.names);
        for script in &scripts {
            self.follow_loaded(script);
        }
        for name in &names {
            self.follow_named(name);
        }
        !scripts.is_empty() || !names.is_empty()
    }
}

#[cfg(fuzzing)]
pub(crate) mod fuzz {
    /// Every word in the bytes, as if they were settings, and what it means as a plug-in.
    pub fn settings(bytes: &[u8]) {
        for word in super::command::words(bytes) {
            assert!(!word.is_empty());
            super::words_for(word);
        }
    }
}

/// Returns whether a program has settings by its own name: interpreters run programs that do.
pub(super) fn may_have_settings(name: &[u8]) -> bool {
    !command::is_shell(name) && !command::is_wrapper(name) && !imports::is_interpreter(name)
}

/// The words that mean the plug-in `libmod_a_b.so`: `libmod_a_b`, `mod_a_b`, `a_b`. None if no file
/// of this name is a plug-in.
fn words_for(name: &[u8]) -> Vec<Vec<u8>> {
    if !PLUGINS_END.iter().any(|end| name.ends_with(end)) {
        return Vec::new();
    }
    let stem = name.split(|byte| *byte == b'.').next().unwrap_or_default();
    let bare = stem.strip_prefix(b"lib").unwrap_or(stem);
    let kind = bare.iter().position(|byte| b"_-".contains(byte)).map_or(0, |at| at + 1);
    let mut words = vec![stem.to_vec(), bare.to_vec(), bare[kind..].to_vec()];
    words.retain(|word| word.len() >= SHORTEST);
    words.dedup();
    words
}
