//! Integers of a few bytes, as in DWARF: seven bits in each, the lowest first.

use crate::{FormatError, Problem};

/// Appends a number.
pub(crate) fn write(bytes: &mut Vec<u8>, number: impl Into<u64>) {
    let mut number = number.into();
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
}

/// Reads numbers, and bytes between them.
pub(crate) struct Reader<'a> {
    what: &'static str,
    all: &'a [u8],
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    /// Starts at the first byte. `what` names the bytes in errors.
    pub(crate) fn new(what: &'static str, bytes: &'a [u8]) -> Self {
        Reader { what, all: bytes, rest: bytes }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    /// An error at the current position.
    pub(crate) fn error(&self, problem: impl Into<Problem>) -> FormatError {
        FormatError::new(self.what, (self.all.len() - self.rest.len()) as u64, problem)
    }

    pub(crate) fn take(&mut self, count: usize) -> Result<&'a [u8], FormatError> {
        let split = self.rest.split_at_checked(count);
        let (taken, rest) = split.ok_or_else(|| self.error("ends too early"))?;
        self.rest = rest;
        Ok(taken)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Result<&'a [u8; N], FormatError> {
        let taken = self.take(N)?;
        taken.first_chunk().ok_or_else(|| self.error("ends too early"))
    }

    pub(crate) fn number(&mut self, least: u32, most: u32, what: &str) -> Result<u32, FormatError> {
        Ok(self.leb128(5, least.into(), most.into(), what)? as u32)
    }

    pub(crate) fn long(&mut self, least: u64, most: u64, what: &str) -> Result<u64, FormatError> {
        self.leb128(9, least, most, what)
    }

    /// Reads a number of at most this many bytes of 7 bits each.
    fn leb128(
        &mut self,
        bytes: u32,
        least: u64,
        most: u64,
        what: &str,
    ) -> Result<u64, FormatError> {
        let mut number = 0_u64;
        for position in 0..bytes {
            let byte = self.take(1)?[0];
            number |= u64::from(byte & 0x7f) << (7 * position);
            if byte & 0x80 == 0 {
                let problem = || format!("{what}: {number}, expected {least} to {most}");
                return if (least..=most).contains(&number) {
                    Ok(number)
                } else {
                    Err(self.error(problem()))
                };
            }
        }
        Err(self.error(format!("{what}: more than {bytes} bytes")))
    }
}
