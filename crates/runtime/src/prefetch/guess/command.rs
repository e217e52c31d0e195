//! The command line in an image's config.

use serde_json::Value;

/// Words of a command, commands of a script, and directories for programs that are looked at.
const WORDS: usize = 64;

/// The longest word of settings that is a name or a path.
const LONGEST_WORD: usize = 256;

/// The search path of Linux and runtimes if the image has none.
const PATH: &[u8] = b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// A process as an image describes it.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Process {
    /// Entry point and command.
    pub(super) arguments: Vec<Vec<u8>>,
    /// Its directory.
    pub(super) directory: Vec<u8>,
    pub(super) environment: Vec<(Vec<u8>, Vec<u8>)>,
}

impl Process {
    /// The process in `config`, an OCI image configuration. Malformed parts are left out.
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

    /// The directories that are searched for programs.
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

/// Programs that give a shell the text after `-c`, and the one after `-s` is the shell.
const OF_USERS: [&str; 2] = ["su", "runuser"];

/// Programs whose arguments are files that they handle, and no settings.
const FILE_TOOLS: [&str; 18] = [
    "basename", "cat", "chgrp", "chmod", "chown", "cp", "dirname", "find", "grep", "install", "ln",
    "ls", "mkdir", "mv", "rm", "sed", "tar", "touch",
];

/// Programs that run the program that is named by their arguments.
const WRAPPERS: [&str; 14] = [
    "catatonit",
    "chpst",
    "docker-init",
    "dumb-init",
    "env",
    "gosu",
    "nice",
    "nohup",
    "runuser",
    "setpriv",
    "setsid",
    "su-exec",
    "timeout",
    "tini",
];

/// Returns whether the program of this name or path is a shell.
pub(super) fn is_shell(program: &[u8]) -> bool {
    is_one_of(&SHELLS, program)
}

/// Returns whether the program of this name or path handles the files that its arguments name.
pub(super) fn is_file_tool(program: &[u8]) -> bool {
    is_one_of(&FILE_TOOLS, program)
}

/// Where the script is among the words after the name of `program`, if it runs one that an option
/// gives it.
pub(super) fn text_at(program: &[u8], words: &[Vec<u8>]) -> Option<usize> {
    if is_shell(program) {
        return Some(words.iter().position(|word| is_text_option(word))? + 1);
    }
    // Behind `--`, and of `runuser -u`, it is an option of the program that is run.
    let mut own = words.iter().take_while(|word| !matches!(&word[..], b"--" | b"-u"));
    let at = own.position(|word| word == b"-c")?;
    is_one_of(&OF_USERS, program).then_some(at + 1)
}

/// The shell in the words after the name of `su`.
pub(super) fn shell_of_user<'a>(program: &[u8], words: &'a [Vec<u8>]) -> Option<&'a [u8]> {
    let at = words.iter().position(|word| word == b"-s")?;
    is_one_of(&OF_USERS, program).then(|| words.get(at + 1).map(Vec::as_slice))?
}

/// Returns whether a shell takes the next word as its script: `-c`, perhaps combined with other
/// options.
fn is_text_option(word: &[u8]) -> bool {
    word.starts_with(b"-") && !word.starts_with(b"--") && word.ends_with(b"c")
}

/// Returns whether the program of this name or path only runs another one.
pub(super) fn is_wrapper(program: &[u8]) -> bool {
    is_one_of(&WRAPPERS, program)
}

fn is_one_of(names: &[&str], program: &[u8]) -> bool {
    let name = program.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
    names.iter().any(|known| known.as_bytes() == name)
}

/// The words of a server's settings, outside lines that are comments.
pub(super) fn words(settings: &[u8]) -> impl Iterator<Item = &[u8]> {
    const COMMENTS: [&[u8]; 4] = [b"#", b";", b"//", b"--"];
    let lines = settings.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii_start);
    let lines = lines.filter(|line| !COMMENTS.iter().any(|comment| line.starts_with(comment)));
    let is_between = |byte: &u8| byte.is_ascii_whitespace() || b"\"',;=<>(){}[]".contains(byte);
    let words = lines.flat_map(move |line| line.split(is_between));
    let words = words.map(|word| word.strip_suffix(b":").unwrap_or(word));
    words.filter(|word| (1..=LONGEST_WORD).contains(&word.len()))
}

/// The program that a launcher starts to do its work.
pub(super) fn launched(program: &[u8]) -> Option<&'static [u8]> {
    const LAUNCHERS: [(&[u8], &[u8]); 1] = [(b"Rscript", b"R")];
    let name = program.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
    LAUNCHERS.iter().find(|(known, _)| *known == name).map(|(_, launched)| *launched)
}

/// The variables in which interpreters look for directories with modules.
pub(super) const MODULE_PATHS: [&str; 8] = [
    "PYTHONPATH",
    "NODE_PATH",
    "RUBYLIB",
    "PERL5LIB",
    "LUA_PATH",
    "LUA_CPATH",
    "ERL_LIBS",
    "MONO_PATH",
];
