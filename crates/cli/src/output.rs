//! Output on the terminal.
//!
//! Names, media types and messages come from images and registries, and a terminal obeys what it is
//! sent. So control characters are shown as their escapes. A reader that has seen enough (`lazuli
//! status | head -1`) ends the command as SIGPIPE would, without a word.

use std::{
    fmt::Write as _,
    io::{self, Write},
};

/// 128 + SIGPIPE, as shells report the end of a program whose reader is gone.
const READER_GONE: i32 = 141;

/// As the standard library's.
macro_rules! println {
    ($($text:tt)*) => { $crate::output::line(::std::format!($($text)*)) };
}

/// As the standard library's. Nothing can be said about a message that cannot be printed.
macro_rules! eprintln {
    ($($text:tt)*) => { $crate::output::message(::std::format!($($text)*)) };
}

/// Prints `text` and ends the line.
pub(crate) fn line(mut text: String) {
    text.push('\n');
    write(&text);
}

/// Prints `text`.
pub(crate) fn write(text: &str) {
    let mut output = io::stdout();
    let written = output.write_all(printable(text).as_bytes()).and_then(|()| output.flush());
    if let Err(error) = written {
        let gone = error.kind() == io::ErrorKind::BrokenPipe;
        if !gone {
            message(format!("lazuli: cannot print: {error}"));
        }
        std::process::exit(if gone { READER_GONE } else { 1 });
    }
}

/// Prints a line to standard error.
pub(crate) fn message(mut text: String) {
    text.push('\n');
    let _ = io::stderr().write_all(printable(&text).as_bytes());
}

/// `text`, with escapes in place of all control characters but ends of lines and tabs. JSON has the
/// same escapes, and no control characters outside of strings.
fn printable(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for character in text.chars() {
        if character.is_control() && !matches!(character, '\n' | '\t') {
            let _ = write!(safe, "\\u{:04x}", u32::from(character));
        } else {
            safe.push(character);
        }
    }
    safe
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_shown() {
        assert_eq!(printable("a\tb\nc é ─"), "a\tb\nc é ─");
        assert_eq!(printable("\x1b]0;x\x07\r\u{9b}31m"), r"\u001b]0;x\u0007\u000d\u009b31m");
    }
}
