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

use std::mem;

use super::{
    command, imports,
    linker::Asker,
    paths::{Found, STEPS},
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

/// Words, and names of plug-ins, that are compared for one image, and names of modules that are
/// looked up.
const WORDS: usize = 1 << 16;
const PLUGINS: usize = 1 << 14;
const NAMES: usize = 1 << 12;

/// Steps of the look-ups in directories that settings may take.
const LOOK_UPS: u32 = STEPS / 4;

/// The shortest name of a program, and the shortest word that means a plug-in.
const SHORTEST: usize = 2;

/// The endings of a program's settings in the directory in which it starts, besides `.config.*`.
const SETTINGS_HERE: [&[u8]; 6] = [b"conf", b"ini", b"json", b"toml", b"yaml", b"yml"];

/// Maximum bytes of data in `/usr/share` that are read: of one program, and of all in one image.
const DATA: u64 = 2 << 20;
const ALL_DATA: u64 = 8 << 20;

/// How the names of plug-ins end. `.la` describes the library beside it to those that load it.
const PLUGINS_END: [&[u8]; 8] = [b".so", b".la", b".lua", b".py", b".pl", b".pm", b".rb", b".js"];

/// Directories with plug-ins, in a directory that is called like the program.
const PLUGINS_IN: [&str; 5] =
    ["/usr/lib", "/usr/lib/*-linux-*", "/usr/lib64", "/usr/libexec", "/opt"];

impl<B: AsRef<[u8]>> Guess<'_, B> {
    /// Adds the settings of a program that was run by `words`, its own name first.
    pub(super) fn add_settings(&mut self, program: &Found, words: &[Vec<u8>]) {
        self.within_look_ups(|guess| guess.look_for_settings(program, words));
    }

    /// Takes the data of programs that were run.
    pub(super) fn take_data(&mut self) -> Vec<Found> {
        mem::take(&mut self.settings.data)
    }

    /// Runs `look` unless settings have taken too many look-ups: what else is guessed needs some.
    fn within_look_ups(&mut self, look: impl FnOnce(&mut Self)) {
        if self.settings.look_ups < LOOK_UPS {
            let before = self.paths.steps_left();
            look(self);
            self.settings.look_ups += before - self.paths.steps_left();
        }
    }

    fn look_for_settings(&mut self, program: &Found, words: &[Vec<u8>]) {
        let Some((name, arguments)) = words.split_first() else { return };
        let last = |path: &[u8]| path.rsplit(|byte| *byte == b'/').next().map(<[u8]>::to_vec);
        let current = self.process.directory.clone();
        if imports::is_interpreter(program.name()) {
            // `node lint.js` is run as `lint` elsewhere.
            let mut files = arguments.iter().filter(|word| !word.starts_with(b"-"));
            let script = files.find(|word| self.paths.file(&current, word).is_some());
            let name = script.and_then(|word| last(word)).unwrap_or_default();
            let stem = name.split(|byte| *byte == b'.').next().unwrap_or_default();
            return self.add_settings_here(stem);
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
        let arguments = arguments.iter().filter(|_| !command::is_file_tool(&name));
        for argument in arguments {
            let path = argument.rsplit(|byte| *byte == b'=').next().unwrap_or_default();
            if !is_word(path) {
                continue;
            }
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
        if self.settings.places.is_none() {
            let places = PLUGINS_IN.map(|place| self.paths.directories(place.as_bytes()));
            self.settings.places = Some(places.into_iter().flatten().collect());
        }
        for place in self.settings.places.clone().unwrap_or_default() {
            if let Some(directory) = self.paths.directory(&place, name) {
                self.add_plugins(directory);
            }
        }
        self.add_setting(&[&b"/etc/"[..], name, b".conf"].concat(), FILES);
        self.add_setting(&[&b"/etc/"[..], name].concat(), FILES);
        self.add_settings_here(name);
        let data = self.paths.matching(&[&b"/usr/share/"[..], name, b"/*"].concat());
        let bytes = data.iter().map(|file| file.size).fold(0, u64::saturating_add);
        if data.len() <= FILES && bytes <= DATA && self.settings.data_bytes + bytes <= ALL_DATA {
            self.settings.data_bytes += bytes;
            self.settings.data.extend(data);
        }
    }

    /// Adds the settings of a program in the directory in which it starts.
    fn add_settings_here(&mut self, name: &[u8]) {
        let current = self.process.directory.clone();
        let mut names = Vec::new();
        for found in self.paths.named(&current, name) {
            let ending = &found[name.len()..];
            let ending = ending.strip_prefix(b".").unwrap_or(ending);
            if ending.starts_with(b"config.") || SETTINGS_HERE.contains(&ending) {
                names.push(found.to_vec());
            }
        }
        let hidden = self.paths.named(&current, &[b".", name, b"rc"].concat());
        names.extend(hidden.iter().map(|found| found.to_vec()));
        for name in names {
            let Some(file) = self.paths.file(&current, &name) else { continue };
            self.add_setting(&file.path, 1);
            self.settings.scripts.push(file);
        }
    }

    /// Adds a directory that a constant of a program names.
    pub(super) fn add_constant_directory(&mut self, directory: &[u8]) {
        self.within_look_ups(|guess| guess.add_named_directory(directory));
    }

    /// Adds a directory that a program's constants or settings name: of settings, or of plug-ins.
    fn add_named_directory(&mut self, directory: &[u8]) {
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
        let found = match found.len() <= most {
            true => found,
            // What is read first names the rest.
            false => self.paths.matching(&[path, b"/*"].concat()),
        };
        if found.len() > most {
            return;
        }
        for file in found {
            if !self.settings.seen.insert(file.path.clone()) {
                continue;
            }
            let bytes = self.settings.bytes.saturating_add(file.size);
            // In some images every file may be executed.
            let is_program = file.is_executable && !file.name().contains(&b'.');
            if !is_program && file.size <= SETTINGS && bytes <= ALL_SETTINGS {
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
        if text.contains(&0) {
            return;
        }
        // What is relative is so to the file's directory, or to that of the server's own files.
        let bases = [file.directory().to_vec(), [file.directory(), b"/.."].concat()];
        for word in command::words(text).filter(|word| is_word(word)) {
            if self.paths.is_spent() || self.settings.words.len() >= WORDS {
                break;
            }
            if word.contains(&b'/') || word.contains(&b'.') {
                self.within_look_ups(|guess| guess.follow_path(&bases, word));
            }
            if self.settings.words.insert(word.to_vec()) {
                let is_name = word.contains(&b'.') || word.contains(&b':');
                if is_name && self.settings.names.len() < NAMES {
                    self.settings.names.push(word.to_vec());
                }
                for plugin in self.settings.plugins.remove(word).unwrap_or_default() {
                    self.add_plugin(plugin);
                }
            }
        }
        for directory in mem::take(&mut self.settings.unlisted) {
            self.within_look_ups(|guess| guess.list_plugins(&directory));
        }
    }

    fn follow_path(&mut self, bases: &[Vec<u8>], word: &[u8]) {
        let is_absolute = word.starts_with(b"/");
        if is_absolute {
            self.follow_application(word);
        }
        // A pattern of files in a directory that is named; others are for what a program handles.
        let star = word.iter().position(|byte| *byte == b'*');
        if star.is_some_and(|star| {
            !word[..star].contains(&b'/') || word.windows(2).any(|part| part == b"**")
        }) {
            return;
        }
        for base in bases.iter().take(if is_absolute { 1 } else { bases.len() }) {
            if !is_absolute && !self.paths.may_have(base, word) {
                continue;
            }
            let path = if is_absolute { word } else { &[base, &b"/"[..], word].concat() };
            if star.is_some() {
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
            if self.paths.is_spent() {
                break;
            }
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
            super::words_for(&[word, b".so"].concat());
        }
    }
}

/// Returns whether a text may be a name: `.` and `--` are none.
fn is_word(text: &[u8]) -> bool {
    text.iter().any(u8::is_ascii_alphanumeric)
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
