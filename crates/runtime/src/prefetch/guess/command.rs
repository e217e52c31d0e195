//! What a container runs, as its image's config says, and what shell scripts run.

use serde_json::Value;

/// Words of a command, commands of a script, and directories for programs that are looked at.
const WORDS: usize = 64;

/// What Linux and runtimes search when the image does not say.
const PATH: &[u8] = b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// A process as an image describes it.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Process {
    /// Entry point and command.
    pub(super) arguments: Vec<Vec<u8>>,
    /// Its directory.
    pub(super) directory: Vec<u8>,
    environment: Vec<(Vec<u8>, Vec<u8>)>,
}

impl Process {
    /// What `config`, an OCI image configuration, says; what is not as it should be is left out.
    pub(super) fn of(config: &Value) -> Self {
        let config = &config["config"];
        let texts = |name: &str| {
            let list = config[name].as_array().into_iter().flatten().take(WORDS);
            list.filter_map(Value::as_str).map(|text| text.as_bytes().to_vec())
        };
        let directory = config["WorkingDir"].as_str().filter(|path| path.starts_with('/'));
        let split = |variable: Vec<u8>| {
            let at = variable.iter().position(|byte| *byte == b'=')?;
            Some((variable[..at].to_vec(), variable[at + 1..].to_vec()))
        };
        Process {
            arguments: texts("Entrypoint").chain(texts("Cmd")).collect(),
            directory: directory.unwrap_or("/").into(),
            environment: texts("Env").filter_map(split).collect(),
        }
    }

    /// A variable of its environment.
    pub(super) fn variable(&self, name: &str) -> Option<&[u8]> {
        let mut variables = self.environment.iter();
        let found = variables.find(|(known, _)| known == name.as_bytes());
        found.map(|(_, value)| value.as_slice())
    }

    /// Where programs are looked for.
    pub(super) fn search_path(&self) -> Vec<Vec<u8>> {
        let path = self.variable("PATH").unwrap_or(PATH);
        path.split(|byte| *byte == b':').take(WORDS).map(<[u8]>::to_vec).collect()
    }
}

/// The interpreter of a script and its one argument, from the script's first bytes.
pub(super) fn shebang(script: &[u8]) -> Option<Vec<Vec<u8>>> {
    let line = script.strip_prefix(b"#!")?.split(|byte| *byte == b'\n').next()?;
    let words = line.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty());
    let words: Vec<_> = words.take(WORDS).map(<[u8]>::to_vec).collect();
    (!words.is_empty()).then_some(words)
}

/// Programs that read commands.
const SHELLS: [&str; 6] = ["sh", "bash", "dash", "ash", "ksh", "zsh"];

/// Programs that run the program that is named by their arguments.
const WRAPPERS: [&str; 13] = [
    "catatonit",
    "chpst",
    "docker-init",
    "dumb-init",
    "env",
    "gosu",
    "nice",
    "nohup",
    "setpriv",
    "setsid",
    "su-exec",
    "timeout",
    "tini",
];

/// Whether the program of this name or path is a shell.
pub(super) fn is_shell(program: &[u8]) -> bool {
    is_one_of(&SHELLS, program)
}

/// Whether a shell takes the word after this one as its script: `-c`, also together with other options.
pub(super) fn is_text_option(word: &[u8]) -> bool {
    word.starts_with(b"-") && !word.starts_with(b"--") && word.ends_with(b"c")
}

/// Whether the program of this name or path only runs another one.
pub(super) fn is_wrapper(program: &[u8]) -> bool {
    is_one_of(&WRAPPERS, program)
}

fn is_one_of(names: &[&str], program: &[u8]) -> bool {
    let name = program.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
    names.iter().any(|known| known.as_bytes() == name)
}

/// Words after which a shell expects a command.
const KEYWORDS: [&[u8]; 15] = [
    b"if", b"then", b"elif", b"else", b"while", b"until", b"do", b"!", b"{", b"time", b"exec",
    b"command", b"builtin", b"eval", b"nohup",
];

/// Commands that shells know themselves.
const BUILTINS: [&[u8]; 36] = [
    b".",
    b":",
    b"[",
    b"alias",
    b"bg",
    b"break",
    b"case",
    b"cd",
    b"continue",
    b"declare",
    b"done",
    b"echo",
    b"esac",
    b"exit",
    b"export",
    b"false",
    b"fi",
    b"for",
    b"function",
    b"getopts",
    b"in",
    b"kill",
    b"local",
    b"printf",
    b"pwd",
    b"read",
    b"return",
    b"set",
    b"shift",
    b"source",
    b"test",
    b"trap",
    b"true",
    b"umask",
    b"unset",
    b"wait",
];

/// The commands in a shell script, with their words, in the order of the text: what might run, not what will.
/// Quotes and expansions are not understood, only skipped.
pub(super) fn commands(script: &[u8]) -> Vec<Vec<Vec<u8>>> {
    let mut commands: Vec<Vec<Vec<u8>>> = Vec::new();
    for line in script.split(|byte| *byte == b'\n') {
        for part in line.split(|byte| b";&|()`".contains(byte)) {
            commands.push(Vec::new());
            for word in part.split(u8::is_ascii_whitespace) {
                let word = word.trim_ascii();
                let quote = |byte: &u8| b"\"'".contains(byte);
                let start = word.iter().position(|byte| !quote(byte)).unwrap_or(word.len());
                let end = word.iter().rposition(|byte| !quote(byte)).map_or(start, |at| at + 1);
                let word = &word[start..end];
                if word.starts_with(b"#") {
                    break;
                }
                let Some(command) = commands.last_mut() else { break };
                let is_skipped = command.is_empty()
                    && (KEYWORDS.contains(&word) || word.contains(&b'=') || word.starts_with(b"$"));
                if !word.is_empty() && !is_skipped && command.len() < WORDS {
                    command.push(word.to_vec());
                }
            }
            let name = commands.last().and_then(|words| words.first());
            if name.is_none_or(|name| BUILTINS.contains(&name.as_slice())) {
                commands.pop();
            }
            if commands.len() == WORDS {
                return commands;
            }
        }
    }
    commands
}

/// The modules that a server is told to load: words that end as libraries do, outside comments.
pub(super) fn modules(configuration: &[u8]) -> impl Iterator<Item = &[u8]> {
    let lines = configuration.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii_start);
    let words = lines
        .filter(|line| !line.starts_with(b"#"))
        .flat_map(|line| line.split(|byte| byte.is_ascii_whitespace() || b"\"';".contains(byte)));
    words.filter(|word| word.ends_with(b".so"))
}
