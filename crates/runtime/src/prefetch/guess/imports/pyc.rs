//! Modules that compiled Python names: constants and names of a module's own code, from CPython's
//! marshal format.
//!
//! Imports at load time are in the code of the module itself and of its classes; functions' imports
//! run when they are called, and are ignored. The names in that code are those of modules, of
//! imported objects, and of attributes. Which of them are modules depends on the image.

use std::ops::Range;

/// Objects below each other. CPython's own limit is 2000; constants of real modules are 5 deep.
const DEPTH: usize = 32;

/// The flag of code with variables of its own: functions have it, modules and classes do not.
const NEW_LOCALS: u32 = 2;

/// Objects of one file.
const OBJECTS: usize = 1 << 16;

/// Bytes before the code: magic number, flags, time and size of the source, or a hash of it.
const HEADER: usize = 16;

/// How CPython stores code objects: which numbers and objects are before the names, and after them.
#[derive(Clone, Copy)]
struct Layout {
    numbers: usize,
    objects_after_names: usize,
    objects_at_the_end: usize,
}

/// From 3.8 on.
const OLD: Layout = Layout { numbers: 6, objects_after_names: 5, objects_at_the_end: 1 };

/// From 3.11 on.
const NEW: Layout = Layout { numbers: 5, objects_after_names: 5, objects_at_the_end: 2 };

/// The magic numbers of 3.8, of 3.11, and of the first unknown version.
const FIRST_OLD: u16 = 3400;
const FIRST_NEW: u16 = 3450;
const UNKNOWN: u16 = 4000;

/// The relevant kinds of objects.
#[derive(Clone, Debug)]
enum Object {
    Text(Range<usize>),
    List(Vec<Object>),
    Number(i32),
    Code { flags: u32, constants: Box<Object>, names: Box<Object> },
    Other,
}

/// The names in a module's own code.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Module {
    /// Names of modules and other objects, in the order of their first use.
    pub(super) names: Vec<Vec<u8>>,
    /// Texts among the constants, including names imported from modules.
    pub(super) texts: Vec<Vec<u8>>,
    /// Up to how many packages above it relative imports may lead.
    pub(super) level: usize,
}

/// Reads a `.pyc` file; `None` for an unknown version.
pub(super) fn module(file: &[u8]) -> Option<Module> {
    let magic = u16::from_le_bytes(*file.first_chunk()?);
    if file.get(2..4)? != b"\r\n" || !(FIRST_OLD..UNKNOWN).contains(&magic) {
        return None;
    }
    let layout = if magic < FIRST_NEW { OLD } else { NEW };
    let mut reader = Reader { bytes: file, at: HEADER, layout, known: Vec::new(), left: OBJECTS };
    let code = reader.object(DEPTH)?;
    matches!(code, Object::Code { .. }).then(|| {
        let mut module = Module::default();
        module.note(&code, file);
        module
    })
}

impl Module {
    fn note(&mut self, constant: &Object, file: &[u8]) {
        match constant {
            Object::Text(_) => self.texts.extend(constant.text(file)),
            Object::List(list) => list.iter().for_each(|constant| self.note(constant, file)),
            // The level of a relative import is a constant, too.
            Object::Number(number @ 1..=4) => self.level = self.level.max(*number as usize),
            Object::Code { flags, constants, names } if flags & NEW_LOCALS == 0 => {
                if let Object::List(names) = &**names {
                    self.names.extend(names.iter().filter_map(|name| name.text(file)));
                }
                self.note(constants, file);
            }
            _ => {}
        }
    }
}

impl Object {
    fn text(&self, file: &[u8]) -> Option<Vec<u8>> {
        let Object::Text(range) = self else { return None };
        file.get(range.clone()).map(<[u8]>::to_vec)
    }
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    layout: Layout,
    /// Objects that later ones refer to.
    known: Vec<Object>,
    /// The remainder of [`OBJECTS`].
    left: usize,
}

impl Reader<'_> {
    fn take(&mut self, count: usize) -> Option<Range<usize>> {
        let end = self.at.checked_add(count).filter(|end| *end <= self.bytes.len())?;
        let taken = self.at..end;
        self.at = end;
        Some(taken)
    }

    fn byte(&mut self) -> Option<u8> {
        let at = self.take(1)?.start;
        Some(self.bytes[at])
    }

    fn number(&mut self) -> Option<u32> {
        let range = self.take(4)?;
        Some(u32::from_le_bytes(self.bytes[range].try_into().ok()?))
    }

    fn list(&mut self, count: usize, depth: usize) -> Option<Object> {
        let mut list = Vec::new();
        for _ in 0..count {
            list.push(self.object(depth)?);
        }
        Some(Object::List(list))
    }

    fn object(&mut self, depth: usize) -> Option<Object> {
        /// A flag of a type: later objects refer to this one.
        const KEPT: u8 = 0x80;
        let depth = depth.checked_sub(1)?;
        self.left = self.left.checked_sub(1)?;
        let kind = self.byte()?;
        // A container is numbered before its elements.
        let kept = (kind & KEPT != 0).then_some(self.known.len());
        if kept.is_some() {
            self.known.push(Object::Other);
        }
        let object = self.value(kind & !KEPT, depth)?;
        if let Some(at) = kept {
            self.known[at] = object.shallow();
        }
        Some(object)
    }

    fn value(&mut self, kind: u8, depth: usize) -> Option<Object> {
        Some(match kind {
            b'0' | b'N' | b'F' | b'T' | b'S' | b'.' => Object::Other,
            b'i' => Object::Number(self.number()?.cast_signed()),
            b'g' => self.skip(8)?,
            b'y' => self.skip(16)?,
            b'l' => {
                let digits = self.number()?.cast_signed().unsigned_abs() as usize;
                self.skip(digits.checked_mul(2)?)?
            }
            b's' => {
                let len = self.number()? as usize;
                self.skip(len)?
            }
            b't' | b'u' | b'a' | b'A' => {
                let len = self.number()? as usize;
                Object::Text(self.take(len)?)
            }
            b'z' | b'Z' => {
                let len = self.byte()?.into();
                Object::Text(self.take(len)?)
            }
            b')' => {
                let count = self.byte()?.into();
                self.list(count, depth)?
            }
            b'(' | b'[' | b'<' | b'>' => {
                let count = self.number()? as usize;
                self.list(count, depth)?
            }
            b':' => self.list(3, depth)?,
            b'c' => self.code(depth)?,
            b'r' => {
                let at = self.number()? as usize;
                self.known.get(at)?.clone()
            }
            _ => return None,
        })
    }

    fn skip(&mut self, count: usize) -> Option<Object> {
        self.take(count).map(|_| Object::Other)
    }

    fn code(&mut self, depth: usize) -> Option<Object> {
        // The last of them are the flags.
        self.take(4 * (self.layout.numbers - 1))?;
        let flags = self.number()?;
        self.object(depth)?;
        let constants = Box::new(self.object(depth)?);
        let names = Box::new(self.object(depth)?);
        for _ in 0..self.layout.objects_after_names {
            self.object(depth)?;
        }
        self.take(4)?;
        for _ in 0..self.layout.objects_at_the_end {
            self.object(depth)?;
        }
        Some(Object::Code { flags, constants, names })
    }
}

impl Object {
    /// The value of later references to the object: texts and numbers only. A list of lists of
    /// references could stand for gigabytes.
    fn shallow(&self) -> Object {
        match self {
            Object::Text(_) | Object::Number(_) => self.clone(),
            _ => Object::Other,
        }
    }
}

#[cfg(test)]
pub(in super::super) mod forge {
    /// `import os.path`, `from . import own`, a function and a class, as CPython 3.11 compiles
    /// them.
    pub(in super::super::super) fn compiled() -> Vec<u8> {
        let text = |text: &str| [&[b'z' | 0x80, text.len() as u8], text.as_bytes()].concat();
        let list = |items: &[Vec<u8>]| [vec![b')', items.len() as u8], items.concat()].concat();
        let number = |number: u32| [vec![b'i'], number.to_le_bytes().to_vec()].concat();
        let bytes = |bytes: &[u8]| {
            [vec![b's'], (bytes.len() as u32).to_le_bytes().to_vec(), bytes.to_vec()].concat()
        };
        let code = |flags: u32, constants: Vec<u8>, names: Vec<u8>| {
            [
                vec![b'c' | 0x80],
                [0_u8; 16].to_vec(),
                flags.to_le_bytes().to_vec(),
                bytes(b"\x97\0"),
                constants,
                names,
                list(&[]),
                bytes(b""),
                text("a.py"),
                text("<module>"),
                text("<module>"),
                1_u32.to_le_bytes().to_vec(),
                bytes(b""),
                bytes(b""),
            ]
            .concat()
        };
        let function = code(3, list(&[vec![b'N']]), list(&[text("later")]));
        let class = code(0, list(&[vec![b'N']]), list(&[text("of_class")]));
        let own = list(&[text("own")]);
        let constants = list(&[number(0), vec![b'N'], number(1), own, function, class]);
        // The code itself is the first that is kept, `own` the second.
        let own = [vec![b'r'], 1_u32.to_le_bytes().to_vec()].concat();
        let module = code(0, constants, list(&[text("os.path"), own]));
        [&3495_u16.to_le_bytes()[..], b"\r\n", &[0; 12], &module].concat()
    }
}

#[cfg(test)]
mod tests {
    use super::{forge::compiled, *};

    #[test]
    fn a_module_names_what_it_imports_and_not_what_its_functions_do() {
        let module = module(&compiled()).unwrap();
        assert_eq!(module.names, [&b"os.path"[..], b"own", b"of_class"]);
        assert_eq!(module.texts, [b"own"]);
        assert_eq!(module.level, 1);
    }

    #[test]
    fn truncated_files_and_other_versions_are_no_modules() {
        let whole = compiled();
        for len in 0..whole.len() {
            assert_eq!(module(&whole[..len]), None, "{len} bytes");
        }
        let other = [&336_u16.to_le_bytes()[..], &whole[2..]].concat();
        assert_eq!(module(&other), None);
    }

    #[test]
    fn lists_within_lists_end() {
        let deep =
            [&3495_u16.to_le_bytes()[..], b"\r\n", &[0; 12], &[b')', 1].repeat(4096)].concat();
        assert_eq!(module(&deep), None);
        let wide = [&3495_u16.to_le_bytes()[..], b"\r\n", &[0; 12], b"(", &[0xff; 4]].concat();
        assert_eq!(module(&wide), None);
    }
}
