//! File names, valid by construction.

use std::{borrow::Borrow, fmt};

/// One component of a path: 1 to 255 bytes, no `/`, no NUL, neither `.` nor `..`.
///
/// Names are bytes, not text: Linux allows any encoding.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(Box<[u8]>);

/// Why bytes are not a [`Name`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidName {
    /// Nothing between two slashes.
    #[error("an empty file name")]
    Empty,
    /// Linux file systems stop at 255 bytes.
    #[error("a file name of {0} bytes: the limit is 255")]
    TooLong(usize),
    /// `.`, `..`, or a name with `/` or NUL in it.
    #[error("the file name `{0}` is not allowed")]
    Reserved(String),
}

impl Name {
    /// Linux's NAME_MAX.
    pub const MAX: usize = 255;

    /// Checks and wraps one path component.
    pub fn new(bytes: &[u8]) -> Result<Self, InvalidName> {
        match bytes {
            b"" => Err(InvalidName::Empty),
            _ if bytes.len() > Self::MAX => Err(InvalidName::TooLong(bytes.len())),
            b"." | b".." => Err(InvalidName::Reserved(bytes.escape_ascii().to_string())),
            _ if bytes.iter().any(|b| matches!(b, 0 | b'/')) => {
                Err(InvalidName::Reserved(bytes.escape_ascii().to_string()))
            }
            _ => Ok(Name(bytes.into())),
        }
    }

    /// The bytes of the name.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl Borrow<[u8]> for Name {
    fn borrow(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&String::from_utf8_lossy(&self.0), f)
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\"", self.0.escape_ascii())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_file_names_are_refused() {
        for bytes in [&b""[..], b".", b"..", b"a/b", b"a\0b", &[b'x'; 256]] {
            assert!(Name::new(bytes).is_err(), "{}", bytes.escape_ascii());
        }
        for bytes in [&b"..."[..], b".wh.x", b"\xff\xfe", &[b'x'; 255]] {
            assert_eq!(Name::new(bytes).unwrap().as_bytes(), bytes);
        }
    }
}
