//! ELF: the parts of a program or library that the kernel and the dynamic linker read at its start.

use std::{cell::Cell, ops::Range};

use object::{
    Endianness, elf,
    read::{
        ReadRef,
        elf::{Dyn as _, FileHeader, ProgramHeader as _},
    },
};

/// How ELF files begin.
pub(super) const MAGIC: &[u8] = &elf::ELFMAG;

/// Missing bytes are read in blocks of this size.
const BLOCK: u64 = 64 << 10;

/// The most bytes that a table in the file may have: 4096 entries of the dynamic section, a
/// thousand segments.
const TABLE: u64 = 64 << 10;

/// Libraries and directories that one file may name.
const NAMES: usize = 512;

/// The longest path, also of one library.
const PATH: u64 = 4096;

/// A file of which only parts are known.
#[derive(Debug)]
pub(super) struct Parts {
    size: u64,
    known: Vec<(u64, Vec<u8>)>,
    missing: Cell<Option<(u64, u64)>>,
}

/// The parts of an ELF file that matter to its start.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Elf {
    /// Its PT_INTERP: the dynamic linker.
    pub(super) interpreter: Option<Vec<u8>>,
    /// Names of libraries.
    pub(super) needed: Vec<Vec<u8>>,
    /// The directories to search for all libraries below it, if there is no [`Elf::runpath`];
    /// colons between directories.
    pub(super) rpath: Option<Vec<u8>>,
    /// The directories to search for its own libraries.
    pub(super) runpath: Option<Vec<u8>>,
    /// Its processor, as `e_machine` has it.
    pub(super) machine: u16,
    /// Bytes of code.
    pub(super) code: u64,
    /// The parts of the file that are code or are written to.
    pub(super) code_and_data: Vec<Range<u64>>,
}

/// Why a file cannot be understood.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Obstacle {
    /// These bytes of it are not known yet.
    Missing(Range<u64>),
    /// It is not a sound ELF file.
    Unsound,
}

impl Parts {
    /// Starts with nothing known of a file of `size` bytes.
    pub(super) fn new(size: u64) -> Self {
        Parts { size, known: Vec::new(), missing: Cell::new(None) }
    }

    /// Adds the bytes at `offset`.
    pub(super) fn add(&mut self, offset: u64, bytes: Vec<u8>) {
        self.known.push((offset, bytes));
    }

    /// Parses the file as far as its start needs it.
    pub(super) fn elf(&self) -> Result<Elf, Obstacle> {
        self.missing.take();
        let class = self.read_bytes_at(0, 5).map(|ident| elf::FileClass(ident[4]));
        let elf = match class {
            Ok(elf::ELFCLASS32) => parse::<elf::FileHeader32<Endianness>>(self),
            Ok(elf::ELFCLASS64) => parse::<elf::FileHeader64<Endianness>>(self),
            _ => None,
        };
        elf.ok_or_else(|| match self.missing.take() {
            Some((start, end)) => Obstacle::Missing(start..end),
            None => Obstacle::Unsound,
        })
    }
}

impl<'a> ReadRef<'a> for &'a Parts {
    fn len(self) -> Result<u64, ()> {
        Ok(self.size)
    }

    fn read_bytes_at(self, offset: u64, size: u64) -> Result<&'a [u8], ()> {
        // An empty segment needs no bytes of the file, and a request for none would never be
        // answered.
        if size == 0 {
            return Ok(&[]);
        }
        let end = offset.checked_add(size).filter(|end| *end <= self.size && size <= TABLE);
        let end = end.ok_or(())?;
        for (start, bytes) in &self.known {
            if *start <= offset && end <= start + bytes.len() as u64 {
                let at = (offset - start) as usize;
                return Ok(&bytes[at..at + size as usize]);
            }
        }
        let end = end.checked_next_multiple_of(BLOCK).map_or(self.size, |end| end.min(self.size));
        self.missing.set(Some((offset / BLOCK * BLOCK, end)));
        Err(())
    }

    fn read_bytes_at_until(self, range: Range<u64>, delimiter: u8) -> Result<&'a [u8], ()> {
        let end = range.end.min(self.size).min(range.start.saturating_add(PATH));
        let bytes = self.read_bytes_at(range.start, end.checked_sub(range.start).ok_or(())?)?;
        let len = bytes.iter().position(|byte| *byte == delimiter).ok_or(())?;
        Ok(&bytes[..len])
    }
}

fn parse<H: FileHeader<Endian = Endianness>>(file: &Parts) -> Option<Elf> {
    let header = H::parse(file).ok()?;
    let endian = header.endian().ok()?;
    let segments = header.program_headers(endian, file).ok()?;
    let mut elf = Elf { machine: header.e_machine(endian).0, ..Elf::default() };
    for segment in segments {
        if let Some(path) = segment.interpreter(endian, file).ok()? {
            elf.interpreter = Some(path.to_vec());
        }
        if segment.p_type(endian) == elf::PT_LOAD
            && segment.p_flags(endian).0 & (elf::PF_X.0 | elf::PF_W.0) != 0
        {
            let (start, len) = segment.file_range(endian);
            let is_code = segment.p_flags(endian).0 & elf::PF_X.0 != 0;
            elf.code = elf.code.saturating_add(if is_code { len } else { 0 });
            elf.code_and_data.push(start..start.saturating_add(len));
        }
    }
    let dynamic = segments.iter().find(|segment| segment.p_type(endian) == elf::PT_DYNAMIC);
    let Some(dynamic) = dynamic else { return Some(elf) };
    let entries = dynamic.dynamic(endian, file).ok()??;
    let entries = || entries.iter().map(|entry| (entry.d_tag(endian), entry.d_val(endian).into()));
    let entries = || entries().take_while(|(tag, _)| *tag != elf::DT_NULL);
    let Some((_, strings)) = entries().find(|(tag, _)| *tag == elf::DT_STRTAB) else {
        return Some(elf);
    };
    // The address of the table, which lies in one of the mapped segments.
    let strings = segments.iter().find_map(|segment| {
        let start = segment.p_vaddr(endian).into();
        let len: u64 = segment.p_filesz(endian).into();
        let within = strings.checked_sub(start).filter(|within| *within < len)?;
        let is_mapped = segment.p_type(endian) == elf::PT_LOAD;
        segment.p_offset(endian).into().checked_add(within).filter(|_| is_mapped)
    })?;
    for (tag, name) in entries() {
        let text = || -> Option<Vec<u8>> {
            let start = strings.checked_add(name)?;
            Some(file.read_bytes_at_until(start..u64::MAX, 0).ok()?.to_vec())
        };
        match tag {
            elf::DT_NEEDED if elf.needed.len() < NAMES => elf.needed.push(text()?),
            elf::DT_RPATH => elf.rpath = Some(text()?),
            elf::DT_RUNPATH => elf.runpath = Some(text()?),
            _ => {}
        }
    }
    Some(elf)
}

#[cfg(fuzzing)]
pub(crate) mod fuzz {
    use super::{Obstacle, Parts};

    /// A program or library, of which parts are read as they are asked for.
    pub fn elf(file: &[u8]) {
        let mut parts = Parts::new(file.len() as u64);
        // The guess reads no more parts of a file either.
        for _ in 0..64 {
            let Err(Obstacle::Missing(range)) = parts.elf() else { return };
            assert!(!range.is_empty() && range.end <= file.len() as u64);
            parts.add(range.start, file[range.start as usize..range.end as usize].to_vec());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_range_needs_no_bytes_of_the_file() {
        let parts = Parts::new(1 << 20);
        assert_eq!((&parts).read_bytes_at(4096, 0), Ok(&[][..]));
        assert_eq!(parts.missing.take(), None);
    }
}
