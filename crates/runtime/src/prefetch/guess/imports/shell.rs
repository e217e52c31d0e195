//! Shell scripts: the commands in their text, with variables filled in.
//!
//! Lines are taken in the order of the text, ignoring conditions and loops. Values that only a run
//! could determine are empty; the directory of the script, defaults of variables and the image's
//! environment are known. Scripts look for a directory in several places, one after the other, so a
//! variable keeps a path that the image has. Scripts that are sourced are evaluated in their place,
//! if their text is known.

use std::{
    collections::{HashMap, HashSet},
    iter::Peekable,
    slice,
};

/// Commands, files and variables of one script, and words of one command.
const COMMANDS: usize = 256;
const WORDS: usize = 256;

/// Bytes of all commands of one script, which ends with the command that goes beyond.
const BYTES: usize = 1 << 20;

/// Maximum length of a word; longer ones are cut.
const LONGEST: usize = 4096;

/// Substitutions within each other.
const DEPTH: usize = 8;

/// Words after which a shell expects a command.
const KEYWORDS: [&[u8]; 16] = [
    b"if", b"then", b"elif", b"else", b"while", b"until", b"do", b"!", b"{", b"}", b"time",
    b"exec", b"command", b"builtin", b"eval", b"nohup",
];

/// Commands that declare variables.
const DECLARING: [&[u8]; 5] = [b"export", b"readonly", b"local", b"declare", b"typeset"];

/// Further builtins of shells.
const BUILTINS: [&[u8]; 30] = [
    b":",
    b"alias",
    b"bg",
    b"break",
    b"case",
    b"cd",
    b"continue",
    b"done",
    b"echo",
    b"esac",
    b"exit",
    b"false",
    b"fi",
    b"function",
    b"getopts",
    b"in",
    b"kill",
    b"printf",
    b"pwd",
    b"read",
    b"return",
    b"set",
    b"shift",
    b"trap",
    b"true",
    b"umask",
    b"unset",
    b"wait",
    b"let",
    b"ulimit",
];

type Word = Vec<u8>;

/// The commands found in scripts so far.
#[derive(Debug, Default)]
pub(in super::super) struct Script {
    /// Commands with their words.
    pub(in super::super) commands: Vec<Vec<Word>>,
    /// Scripts that are sourced, whose text is not known.
    pub(in super::super) sourced: Vec<Word>,
    /// Files that are asked about, and archives; with `*` for any part of a name.
    pub(in super::super) files: Vec<Word>,
    /// Variables that the text sets.
    pub(in super::super) variables: HashMap<Word, Word>,
    /// Bytes of its commands.
    bytes: usize,
}

/// A script and how it is started.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Started<'a> {
    /// Its path.
    pub(in super::super) path: &'a [u8],
    /// The words after its name.
    pub(in super::super) arguments: &'a [Word],
    pub(in super::super) environment: &'a [(Word, Word)],
    /// Texts of scripts that it sources, by the path that it gives.
    pub(in super::super) sources: &'a HashMap<Word, Vec<u8>>,
}

/// Evaluates a script, given its text. `exists` says whether the image has something at a path.
pub(in super::super) fn run(
    text: &[u8],
    started: Started<'_>,
    exists: &mut dyn FnMut(&[u8]) -> bool,
) -> Script {
    let (sourced, functions, script) = Default::default();
    let mut shell = Shell { started, exists, sourced, functions, script };
    shell.run(text);
    shell.script
}

/// Joins lines that end with a backslash to the next ones.
fn join_lines(text: &[u8]) -> Vec<u8> {
    let mut joined = Vec::with_capacity(text.len());
    let mut bytes = text.iter().peekable();
    while let Some(byte) = bytes.next() {
        if *byte == b'\\' && bytes.next_if_eq(&&b'\n').is_some() {
            joined.push(b' ');
        } else {
            joined.push(*byte);
        }
    }
    joined
}

struct Shell<'a> {
    started: Started<'a>,
    exists: &'a mut dyn FnMut(&[u8]) -> bool,
    /// Scripts that were sourced, each once: a script may source itself.
    sourced: Vec<Word>,
    /// Functions that are defined.
    functions: HashSet<Word>,
    script: Script,
}

/// A word that stands for all arguments.
const ALL: &[u8] = b"\0@";

type Bytes<'a> = Peekable<slice::Iter<'a, u8>>;

impl Shell<'_> {
    fn run(&mut self, text: &[u8]) {
        let joined = join_lines(text);
        for line in joined.split(|byte| *byte == b'\n') {
            if let Some(name) = defined(line)
                && self.functions.len() < COMMANDS
            {
                self.functions.insert(name.to_vec());
            }
            for command in self.split(line, DEPTH) {
                self.note(command);
            }
            if self.script.commands.len() >= COMMANDS || self.script.bytes >= BYTES {
                break;
            }
        }
    }

    /// Evaluates a script in its place, or notes that its text is not known.
    fn source(&mut self, path: &[u8]) {
        let sources = self.started.sources;
        let Some(text) = sources.get(path) else { return add(&mut self.script.sourced, path) };
        if !self.sourced.iter().any(|known| known == path) {
            self.sourced.push(path.to_vec());
            self.run(text);
        }
    }

    /// The commands of a line, with everything filled in.
    fn split(&mut self, line: &[u8], depth: usize) -> Vec<Vec<Word>> {
        let mut commands: Vec<Vec<Word>> = vec![Vec::new()];
        let mut word: Option<Word> = None;
        let mut bytes = line.iter().peekable();
        while let Some(&byte) = bytes.next() {
            match byte {
                b'#' if word.is_none() => break,
                b'\'' => {
                    let quoted = word.get_or_insert_default();
                    quoted.extend(bytes.by_ref().take_while(|byte| **byte != b'\''));
                }
                b'"' => {
                    let quoted = self.quoted(&mut bytes, depth);
                    push(word.get_or_insert_default(), &quoted);
                }
                b'\\' => word.get_or_insert_default().extend(bytes.next()),
                b'$' | b'`' => {
                    let value = self.value(byte, &mut bytes, depth);
                    let is_assigned =
                        word.as_deref().is_some_and(|word| assignment(word).is_some());
                    if is_assigned || value == ALL {
                        push(word.get_or_insert_default(), &value);
                        continue;
                    }
                    // Without quotes, a value may be several words.
                    for (at, part) in value.split(u8::is_ascii_whitespace).enumerate() {
                        if at > 0 {
                            self.finish(&mut commands, &mut word);
                        }
                        push(word.get_or_insert_default(), part);
                    }
                }
                b';' | b'&' | b'|' | b'(' | b')' => {
                    self.finish(&mut commands, &mut word);
                    commands.push(Vec::new());
                    // An assignment holds for the rest of the line.
                    let count = commands.len();
                    self.assign(&commands[count - 2]);
                }
                byte if byte.is_ascii_whitespace() => {
                    self.finish(&mut commands, &mut word);
                }
                byte => word.get_or_insert_default().push(byte),
            }
        }
        self.finish(&mut commands, &mut word);
        if let Some(last) = commands.last() {
            self.assign(last);
        }
        commands
    }

    fn finish(&self, commands: &mut [Vec<Word>], word: &mut Option<Word>) {
        let (Some(word), Some(command)) = (word.take(), commands.last_mut()) else { return };
        if word == ALL {
            command.extend_from_slice(self.started.arguments);
        } else if !word.is_empty() {
            command.push(word);
        }
        command.truncate(WORDS);
    }

    /// The rest of a text in double quotes.
    fn quoted(&mut self, bytes: &mut Bytes<'_>, depth: usize) -> Word {
        let mut word = Word::new();
        while let Some(&byte) = bytes.next() {
            match byte {
                b'"' => break,
                // Mostly for `eval`, which takes the text in the quotes apart.
                b'\\' if bytes.peek() != Some(&&b'$') => {
                    word.extend(bytes.next().filter(|byte| **byte != b'"'));
                }
                b'\\' => {}
                b'$' | b'`' => push(&mut word, &self.value(byte, bytes, depth)),
                byte => word.push(byte),
            }
        }
        word
    }

    /// The value of an expression after `$`, or between backquotes.
    fn value(&mut self, sign: u8, bytes: &mut Bytes<'_>, depth: usize) -> Word {
        if sign == b'`' {
            let inner: Word = bytes.by_ref().take_while(|byte| **byte != b'`').copied().collect();
            return self.output(&inner, depth);
        }
        match bytes.peek() {
            Some(b'(') => {
                let inner = enclosed(bytes, b'(', b')');
                self.output(&inner, depth)
            }
            Some(b'{') => {
                let inner = enclosed(bytes, b'{', b'}');
                self.parameter(&inner, depth)
            }
            Some(byte) if byte.is_ascii_alphabetic() || **byte == b'_' => {
                let mut name = Word::new();
                while let Some(byte) = bytes.next_if(|byte| is_of_name(**byte)) {
                    name.push(*byte);
                }
                self.variable(&name)
            }
            Some(b'0') => {
                bytes.next();
                self.started.path.to_vec()
            }
            Some(b'@' | b'*') => {
                bytes.next();
                ALL.to_vec()
            }
            Some(byte @ b'1'..=b'9') => {
                let at = usize::from(**byte - b'1');
                bytes.next();
                self.started.arguments.get(at).cloned().unwrap_or_default()
            }
            // Values that only a run could determine.
            Some(byte) if byte.is_ascii_digit() || b"#?$!-".contains(byte) => {
                bytes.next();
                Word::new()
            }
            _ => Word::new(),
        }
    }

    /// The output of a command, for the few commands about file names.
    fn output(&mut self, text: &[u8], depth: usize) -> Word {
        let Some(depth) = depth.checked_sub(1) else { return Word::new() };
        let mut printed = Word::new();
        let mut directory = None;
        for command in self.split(text, depth) {
            let Some((name, words)) = command.split_first() else { continue };
            let argument =
                words.iter().rfind(|word| !word.starts_with(b"-") && !word.contains(&b'>'));
            let argument = argument.cloned().unwrap_or_default();
            match name.as_slice() {
                b"dirname" => printed = directory_of(&argument).to_vec(),
                b"basename" => printed = last_of(&argument).to_vec(),
                b"readlink" | b"realpath" | b"which" | b"cygpath" => printed = argument,
                b"command" if words.first().is_some_and(|word| word == b"-v") => printed = argument,
                b"cd" => directory = Some(argument),
                b"pwd" => printed = directory.take().unwrap_or_default(),
                b"echo" | b"printf" => {
                    printed = words.join(&b' ');
                    printed.truncate(LONGEST);
                }
                // A function that is given a path mostly prints it in another form.
                name if self.functions.contains(name) && (self.exists)(&argument) => {
                    printed = argument;
                }
                _ => {}
            }
            self.note(command);
        }
        printed
    }

    /// `${NAME}`, with a default or with a part taken away.
    fn parameter(&mut self, text: &[u8], depth: usize) -> Word {
        if text == b"@" || text.ends_with(b"\"$@\"") {
            return ALL.to_vec();
        }
        let end = text.iter().position(|byte| !is_of_name(*byte)).unwrap_or(text.len());
        let (name, rest) = text.split_at(end);
        let value = match name {
            b"0" => self.started.path.to_vec(),
            name => self.variable(name),
        };
        let rest = rest.strip_prefix(b"[0]").unwrap_or(rest);
        let rest = rest.strip_prefix(b":").unwrap_or(rest);
        match rest.split_first() {
            Some((b'-', default)) if value.is_empty() => self.filled(default, depth),
            Some((b'=', default)) if value.is_empty() => {
                let value = self.filled(default, depth);
                self.set(name, &value);
                value
            }
            Some((b'+', other)) if !value.is_empty() => self.filled(other, depth),
            Some((b'+', _)) => Word::new(),
            Some((b'%', b"/*" | b"%/*")) => directory_of(&value).to_vec(),
            Some((b'#', b"#*/" | b"*/")) => last_of(&value).to_vec(),
            _ => value,
        }
    }

    fn filled(&mut self, text: &[u8], depth: usize) -> Word {
        let Some(depth) = depth.checked_sub(1) else { return Word::new() };
        // Quotes within the braces have their own ends.
        let text: Word = text.iter().filter(|byte| **byte != b'"').copied().collect();
        self.quoted(&mut text.iter().peekable(), depth)
    }

    fn variable(&self, name: &[u8]) -> Word {
        if name == b"BASH_SOURCE" {
            return self.started.path.to_vec();
        }
        let of_image = self.started.environment.iter().find(|(known, _)| known == name);
        let value = of_image.map(|(_, value)| value).or_else(|| self.script.variables.get(name));
        value.cloned().unwrap_or_default()
    }

    /// Keeps the variables that a command sets.
    fn assign(&mut self, command: &[Word]) {
        let words = command.iter().skip_while(|word| {
            KEYWORDS.contains(&word.as_slice()) || DECLARING.contains(&word.as_slice())
        });
        for (name, value) in words.map_while(|word| assignment(word)) {
            self.set(name, value);
        }
    }

    /// Sets a variable, unless its value is lost by that: a path in the image.
    fn set(&mut self, name: &[u8], value: &[u8]) {
        if value.is_empty() || self.script.variables.len() >= COMMANDS {
            return;
        }
        let known = self.script.variables.get(name).filter(|known| known.starts_with(b"/"));
        let is_worse =
            |known: &Word| value.starts_with(b"/") && !(self.exists)(value) && (self.exists)(known);
        if !known.is_some_and(is_worse) {
            self.script.variables.insert(name.to_vec(), value.to_vec());
        }
    }

    /// Analyses a command: the program it runs, and the files it names.
    fn note(&mut self, mut command: Vec<Word>) {
        for word in &command {
            let value = assignment(word).map_or(word.as_slice(), |(_, value)| value);
            let archives = value.split(|byte| *byte == b':');
            let archives =
                archives.filter(|path| path.starts_with(b"/") && path.ends_with(b".jar"));
            archives.for_each(|path| add(&mut self.script.files, path));
        }
        let is_skipped = |word: &Word| {
            word.is_empty() || KEYWORDS.contains(&word.as_slice()) || assignment(word).is_some()
        };
        let skipped = command.iter().take_while(|word| is_skipped(word)).count();
        command.drain(..skipped);
        let Some((name, words)) = command.split_first() else { return };
        match name.as_slice() {
            b"." | b"source" => {
                words.iter().take(1).for_each(|word| self.source(word));
            }
            b"[" | b"[[" | b"test" => {
                let files = words.iter().filter(|word| word.starts_with(b"/"));
                files.for_each(|word| add(&mut self.script.files, word));
            }
            b"for" => {
                if let [variable, _, first, ..] = words {
                    let found = words[2..].iter().find(|word| (self.exists)(word));
                    self.script.variables.insert(variable.clone(), found.unwrap_or(first).clone());
                }
                let files = words.iter().filter(|word| word.starts_with(b"/"));
                files.for_each(|word| add(&mut self.script.files, word));
            }
            name if DECLARING.contains(&name) || BUILTINS.contains(&name) => {}
            _ if self.script.commands.len() < COMMANDS => {
                self.script.bytes += command.iter().map(Vec::len).sum::<usize>();
                self.script.commands.push(command);
            }
            _ => {}
        }
    }
}

fn add(list: &mut Vec<Word>, word: &[u8]) {
    if list.len() < COMMANDS && !word.is_empty() && !list.iter().any(|known| known == word) {
        list.push(word.to_vec());
    }
}

fn push(word: &mut Word, more: &[u8]) {
    let room = LONGEST.saturating_sub(word.len()).min(more.len());
    word.extend_from_slice(&more[..room]);
}

/// The text between the next bracket and its closing one.
fn enclosed(bytes: &mut Bytes<'_>, open: u8, close: u8) -> Word {
    let mut depth = 0;
    let mut inner = Word::new();
    for &byte in bytes {
        depth += i32::from(byte == open) - i32::from(byte == close);
        if depth == 0 {
            break;
        }
        inner.push(byte);
    }
    inner.drain(..1.min(inner.len()));
    inner
}

/// The function whose definition begins in a line.
fn defined(line: &[u8]) -> Option<&[u8]> {
    let at = line.windows(2).position(|pair| pair == b"()")?;
    let name = line[..at].trim_ascii();
    let name = name.strip_prefix(b"function ").unwrap_or(name);
    (!name.is_empty() && name.iter().all(|byte| is_of_name(*byte))).then_some(name)
}

fn is_of_name(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_'
}

/// A word that sets a variable.
fn assignment(word: &[u8]) -> Option<(&[u8], &[u8])> {
    let at = word.iter().position(|byte| *byte == b'=')?;
    let name = &word[..at];
    let is_name = name.first()?.is_ascii_digit() || !name.iter().all(|byte| is_of_name(*byte));
    (!is_name).then_some((name, &word[at + 1..]))
}

fn directory_of(path: &[u8]) -> &[u8] {
    let at = path.iter().rposition(|byte| *byte == b'/');
    at.map_or(b".", |at| &path[..at.max(1)])
}

fn last_of(path: &[u8]) -> &[u8] {
    path.rsplit(|byte| *byte == b'/').next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn script(text: &str, environment: &[(&str, &str)]) -> Script {
        let word = |text: &str| text.as_bytes().to_vec();
        let environment: Vec<_> =
            environment.iter().map(|(name, value)| (word(name), word(value))).collect();
        let arguments = ["one", "two"].map(word);
        let path = b"/opt/app/bin/start";
        let sources = [
            ("/etc/app", "HOME_=/etc\n. /etc/app\n. /etc/app"),
            ("/etc/paths", ": ${LIBRARIES=$HOME_/lib}"),
        ];
        let sources = sources.map(|(path, text)| (word(path), word(text))).into();
        let started =
            Started { path, arguments: &arguments, environment: &environment, sources: &sources };
        run(text.as_bytes(), started, &mut |path| path.starts_with(b"/here"))
    }

    fn texts(commands: &[Vec<Word>]) -> Vec<String> {
        commands.iter().map(|words| String::from_utf8(words.join(&b' ')).unwrap()).collect()
    }

    #[test]
    fn variables_and_the_place_of_the_script_are_filled_in() {
        for (text, expected) in [
            ("exec a b", "a b"),
            ("A=/x; exec \"$A/b\" 'c d'", "/x/b c d"),
            ("exec ${ERL_DIR}erl -boot x", "erl -boot x"),
            ("exec $JAVA run", "run"),
            ("A='-a b'; B=$A; run $B \"$B\"c", "run -a b -a bc"),
            ("export A=b\nif $A; then :; fi", "b"),
            (
                "HOME_=\"$(cd \"$(dirname \"$0\")/..\" && pwd)\"\nexec \"$HOME_/lib/run\"",
                "/opt/app/bin/../lib/run",
            ),
            ("D=${0%/*}; $D/run", "/opt/app/bin/run"),
            ("${0%/*}/run ${0##*/}", "/opt/app/bin/run start"),
            ("\"${X:-/usr/bin/y}\" z", "/usr/bin/y z"),
            (": ${X:=\"/usr/bin/y\"}\n$X z", "/usr/bin/y z"),
            ("A=1 B=2 run \\\n  more # not this", "run more"),
            ("eval \"\\\"$JAVA_HOME/bin/java\\\"\" go", "/jvm/bin/java go"),
            (
                "eval exec \"\\\"\\$JAVA_HOME/bin/java\\\"\" -Da=\"\\\"\\$JAVA_HOME\\\"\"",
                "/jvm/bin/java -Da=/jvm",
            ),
            ("[ -x /a ] && /a", "/a"),
            ("exec \"$@\"", "one two"),
            ("run ${1+\"$@\"} $2", "run one two two"),
        ] {
            let found = script(text, &[("JAVA_HOME", "/jvm")]);
            assert_eq!(texts(&found.commands).last().unwrap(), expected, "{text}");
        }
    }

    #[test]
    fn builtins_of_shells_are_no_commands() {
        let mut text = "if test a; then echo b; fi\n".repeat(40);
        text.push_str("X=$(LC_ALL=C stat file) || exit 1\nchmod 755 file\n");
        let commands = texts(&script(&text, &[]).commands);
        assert_eq!(commands, ["stat file", "chmod 755 file"]);
    }

    #[test]
    fn the_image_decides_what_a_variable_is() {
        let found = script("A=/default\nexec $A", &[("A", "/own")]);
        assert_eq!(texts(&found.commands), ["/own"]);
    }

    #[test]
    fn a_variable_keeps_a_path_that_the_image_has() {
        let text = "A=/there\nA=/here/first\nA=/there/too\nA=/here/last\nA=/there\nrun $A";
        assert_eq!(texts(&script(text, &[]).commands), ["run /here/last"]);
        let text = "for i in /there /here/x /here/y; do\nA=$i; done\nrun $A";
        assert_eq!(texts(&script(text, &[]).commands), ["run /here/x"]);
    }

    #[test]
    fn what_a_script_sources_is_evaluated_in_its_place() {
        let found =
            script("HOME_=/opt\n. /etc/app\n. /etc/paths\nrun $LIBRARIES\n. /etc/other", &[]);
        assert_eq!(texts(&found.commands), ["run /etc/lib"]);
        assert_eq!(found.sourced, [b"/etc/other"]);
    }

    #[test]
    fn files_and_other_scripts_are_named() {
        let found = script(
            "for i in $(dirname $0)/../lib/*.jar; do CP=$CP:$i; done\n[ -f /etc/app ] && . /etc/one\n\
             CLASSPATH=/usr/share/a.jar:/usr/share/b.jar",
            &[],
        );
        let files =
            ["/opt/app/bin/../lib/*.jar", "/etc/app", "/usr/share/a.jar", "/usr/share/b.jar"];
        let found_files: Vec<_> =
            found.files.iter().map(|file| str::from_utf8(file).unwrap()).collect();
        assert_eq!(found_files, files);
        assert_eq!(found.sourced, [b"/etc/one"]);
    }

    #[test]
    fn endless_expansions_are_cut_off() {
        let doubling = format!("A=xxxxxxxxxxxxxxxx\n{}run $A", "A=$A$A\n".repeat(64));
        let found = script(&doubling, &[]);
        let longest = found.commands[0][1].len();
        assert!((LONGEST / 2..=LONGEST).contains(&longest), "{longest}");
        let nested = format!("{}a{}", "$(echo ".repeat(500), ")".repeat(500));
        script(&nested, &[]);
        script(&"${".repeat(5000), &[]);
        script("\"`$(${'", &[]);
        script(&". /etc/app\n".repeat(10_000), &[]);
        let many = script(&"run\n".repeat(10_000), &[]);
        assert_eq!(many.commands.len(), COMMANDS);
    }
}
