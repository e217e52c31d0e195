//! Terms in Erlang's external format.

/// Bytes of one name.
const LONGEST: usize = 1024;

pub(super) enum Term<'a> {
    Atom(&'a [u8]),
    Text(&'a [u8]),
    Other,
}

/// Reads terms sequentially, regardless of nesting.
pub(super) struct Reader<'a> {
    pub(super) rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(super) fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.rest.split_at_checked(count)?;
        self.rest = rest;
        Some(taken)
    }

    pub(super) fn number(&mut self, bytes: usize) -> Option<usize> {
        Some(self.take(bytes)?.iter().fold(0, |number, byte| number << 8 | usize::from(*byte)))
    }

    /// Bytes after their number.
    pub(super) fn named(&mut self, bytes: usize) -> Option<&'a [u8]> {
        let len = self.number(bytes)?;
        self.take(len)
    }

    /// Takes the version of the format, with which each value begins.
    pub(super) fn begin(&mut self) -> Option<()> {
        const VERSION: u8 = 131;
        (self.take(1)? == [VERSION]).then_some(())
    }

    pub(super) fn next(&mut self) -> Option<Term<'a>> {
        let tag = self.take(1)?[0];
        let short = |text: &'a [u8]| if text.len() <= LONGEST { text } else { b"" };
        Some(match tag {
            // Atoms: of Latin-1 and of UTF-8, with a length of one byte or two.
            b'd' | b'v' => Term::Atom(short(self.named(2)?)),
            b's' | b'w' => Term::Atom(short(self.named(1)?)),
            // Strings and binaries.
            b'k' => Term::Text(short(self.named(2)?)),
            b'm' => Term::Text(short(self.named(4)?)),
            // Tuples, lists and maps: their elements follow, and those of references to functions.
            b'h' => self.take(1).map(|_| Term::Other)?,
            b'i' | b'l' | b't' => self.take(4).map(|_| Term::Other)?,
            b'j' | b'q' => Term::Other,
            // Numbers.
            b'a' => self.take(1).map(|_| Term::Other)?,
            b'b' => self.take(4).map(|_| Term::Other)?,
            b'F' => self.take(8).map(|_| Term::Other)?,
            b'n' => {
                let len = self.number(1)?;
                self.take(len + 1).map(|_| Term::Other)?
            }
            _ => return None,
        })
    }
}
