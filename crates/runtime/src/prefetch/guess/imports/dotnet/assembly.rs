//! Assemblies: PE files whose CLI header leads to tables of metadata (ECMA-335, partition II, 22 to
//! 25). Two of the tables name other files.

/// Assemblies and libraries that one assembly may name, and the longest of these names.
const NAMES: usize = 1024;
const LONGEST: usize = 256;

/// Sections of a PE file, and streams of its metadata: compilers make about five of each.
const PARTS: usize = 64;

/// Tables that are followed: libraries, and assemblies.
const MODULE_REF: usize = 0x1a;
const ASSEMBLY_REF: usize = 0x23;

/// The files that an assembly names, without the ends of their names.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Assembly {
    /// Assemblies with types that it uses.
    pub(super) references: Vec<Vec<u8>>,
    /// Libraries with functions that it calls (P/Invoke).
    pub(super) libraries: Vec<Vec<u8>>,
}

/// A column of a table.
#[derive(Clone, Copy)]
enum Column {
    /// So many bytes.
    Bytes(usize),
    /// A place in the heap of strings, of GUIDs, of blobs.
    Text,
    Guid,
    Blob,
    /// A row of this table.
    Row(usize),
    /// A row of one of these tables, of which so many bits say which.
    Coded(u32, &'static [usize]),
}

use Column::{Blob, Bytes, Coded, Guid, Row, Text};

const TYPE: Column = Coded(2, &[0x02, 0x01, 0x1b]);
const METHOD: Column = Coded(1, &[0x06, 0x0a]);
const WITH_ATTRIBUTES: Column = Coded(
    5,
    &[
        0x06, 0x04, 0x01, 0x02, 0x08, 0x09, 0x0a, 0x00, 0x0e, 0x17, 0x14, 0x11, 0x1a, 0x1b, 0x20,
        0x23, 0x26, 0x27, 0x28, 0x2a, 0x2c, 0x2b,
    ],
);

/// Columns of the tables by number, up to the last one that is read: each begins where the one
/// before it ends.
const TABLES: [&[Column]; ASSEMBLY_REF + 1] = [
    &[Bytes(2), Text, Guid, Guid, Guid],
    &[Coded(2, &[0x00, 0x1a, 0x23, 0x01]), Text, Text],
    &[Bytes(4), Text, Text, TYPE, Row(0x04), Row(0x06)],
    &[Row(0x04)],
    &[Bytes(2), Text, Blob],
    &[Row(0x06)],
    &[Bytes(8), Text, Blob, Row(0x08)],
    &[Row(0x08)],
    &[Bytes(4), Text],
    &[Row(0x02), TYPE],
    &[Coded(3, &[0x02, 0x01, 0x1a, 0x06, 0x1b]), Text, Blob],
    &[Bytes(2), Coded(2, &[0x04, 0x08, 0x17]), Blob],
    &[WITH_ATTRIBUTES, Coded(3, &[0x06, 0x0a]), Blob],
    &[Coded(1, &[0x04, 0x08]), Blob],
    &[Bytes(2), Coded(2, &[0x02, 0x06, 0x20]), Blob],
    &[Bytes(6), Row(0x02)],
    &[Bytes(4), Row(0x04)],
    &[Blob],
    &[Row(0x02), Row(0x14)],
    &[Row(0x14)],
    &[Bytes(2), Text, TYPE],
    &[Row(0x02), Row(0x17)],
    &[Row(0x17)],
    &[Bytes(2), Text, Blob],
    &[Bytes(2), Row(0x06), Coded(1, &[0x14, 0x17])],
    &[Row(0x02), METHOD, METHOD],
    &[Text],
    &[Blob],
    &[Bytes(2), Coded(1, &[0x04, 0x06]), Text, Row(MODULE_REF)],
    &[Bytes(4), Row(0x04)],
    &[Bytes(8)],
    &[Bytes(4)],
    &[Bytes(16), Blob, Text, Text],
    &[Bytes(4)],
    &[Bytes(12)],
    // Versions and flags, public key, name, culture, hash.
    &[Bytes(12), Blob, Text, Text, Blob],
];

/// The metadata of an assembly.
struct Metadata<'a> {
    /// Rows of all tables.
    rows: [usize; 64],
    /// Bits for heaps with more than 64 KiB: strings, GUIDs, blobs.
    heaps: u8,
    /// The rows of all tables, one after the other.
    tables: &'a [u8],
    texts: &'a [u8],
}

/// Reads an assembly as far as it can be understood. The bytes may be those at the beginning of its
/// file.
pub(super) fn assembly(file: &[u8]) -> Assembly {
    metadata(file).and_then(|metadata| metadata.assembly()).unwrap_or_default()
}

impl Metadata<'_> {
    fn assembly(&self) -> Option<Assembly> {
        let mut assembly = Assembly::default();
        let mut at = 0_usize;
        for (table, columns) in TABLES.iter().enumerate() {
            let width = columns.iter().map(|column| self.width(column)).sum::<usize>();
            let end = at.checked_add(self.rows[table].checked_mul(width)?)?;
            let rows = self.tables.get(at..end)?;
            let before = match table {
                MODULE_REF => 0,
                ASSEMBLY_REF => 12 + self.width(&Blob),
                _ => {
                    at = end;
                    continue;
                }
            };
            let names = rows.chunks_exact(width).take(NAMES);
            let names = names.filter_map(|row| self.text(number(row, before, self.width(&Text))?));
            match table {
                MODULE_REF => assembly.libraries = names.collect(),
                _ => assembly.references = names.collect(),
            }
            at = end;
        }
        Some(assembly)
    }

    /// Bytes of a column: an index has four if two are not enough for the rows that it may mean.
    fn width(&self, column: &Column) -> usize {
        let of_heap = |bit: u8| if self.heaps & bit == 0 { 2 } else { 4 };
        let of_rows = |rows: usize, bits: u32| if rows < 1 << (16 - bits) { 2 } else { 4 };
        match *column {
            Bytes(count) => count,
            Text => of_heap(1),
            Guid => of_heap(2),
            Blob => of_heap(4),
            Row(table) => of_rows(self.rows[table], 0),
            Coded(bits, tables) => {
                let rows = tables.iter().map(|table| self.rows[*table]).max();
                of_rows(rows.unwrap_or_default(), bits)
            }
        }
    }

    /// A name in the heap of strings that may be that of a file.
    fn text(&self, at: usize) -> Option<Vec<u8>> {
        let rest = self.texts.get(at..)?;
        let text = rest[..rest.len().min(LONGEST)].split(|byte| *byte == 0).next()?;
        let is_name = !text.is_empty() && !text.iter().any(|byte| b"/*".contains(byte));
        is_name.then(|| text.to_vec())
    }
}

/// Finds the metadata by way of the headers.
fn metadata(file: &[u8]) -> Option<Metadata<'_>> {
    if !file.starts_with(b"MZ") {
        return None;
    }
    let pe = file.get(number(file, 0x3c, 4)?..)?;
    if !pe.starts_with(b"PE\0\0") {
        return None;
    }
    let (sections, optional) = (number(pe, 6, 2)?.min(PARTS), number(pe, 20, 2)?);
    // Directories come after more numbers in files for 64 bits; the CLI header's is the 15th.
    let directories = match number(pe, 24, 2)? {
        0x10b => 24 + 96,
        0x20b => 24 + 112,
        _ => return None,
    };
    let sections = pe.get(24 + optional..)?.chunks_exact(40).take(sections);
    let place = |address: usize| {
        sections.clone().find_map(|section| {
            let within = address.checked_sub(number(section, 12, 4)?)?;
            (within < number(section, 16, 4)?)
                .then_some(number(section, 20, 4)?.checked_add(within)?)
        })
    };
    let header = file.get(place(number(pe, directories + 14 * 8, 4)?)?..)?;
    let root = file.get(place(number(header, 8, 4)?)?..)?;
    if !root.starts_with(b"BSJB") {
        return None;
    }
    let version = number(root, 12, 4)?;
    let mut streams = root.get(16_usize.checked_add(version)?..)?;
    let count = number(streams, 2, 2)?.min(PARTS);
    streams = &streams[4..];
    let (mut tables, mut texts) = (None, None);
    for _ in 0..count {
        let (start, len) = (number(streams, 0, 4)?, number(streams, 4, 4)?);
        let name = streams.get(8..)?.split(|byte| *byte == 0).next()?;
        // What is cut off is not needed, as long as the tables are there.
        let content = || root.get(start..start.saturating_add(len).min(root.len()));
        match name {
            b"#~" | b"#-" => tables = content(),
            b"#Strings" => texts = content(),
            _ => {}
        }
        // Names end with a zero and are padded to multiples of four bytes.
        streams = streams.get(8 + (name.len() + 1).next_multiple_of(4)..)?;
    }
    let (tables, texts) = (tables?, texts?);
    let heaps = *tables.get(6)?;
    let valid = u64::from_le_bytes(tables.get(8..16)?.try_into().ok()?);
    let mut rows = [0; 64];
    let mut at = 24;
    for table in (0..64).filter(|table| valid >> table & 1 == 1) {
        rows[table] = number(tables, at, 4)?;
        at += 4;
    }
    // Four more bytes, which nothing describes, in metadata that can be edited.
    at += if heaps & 0x40 == 0 { 0 } else { 4 };
    Some(Metadata { rows, heaps, tables: tables.get(at..)?, texts })
}

/// The number of `len` bytes at `at`.
fn number(bytes: &[u8], at: usize, len: usize) -> Option<usize> {
    let bytes = bytes.get(at..at.checked_add(len)?)?;
    Some(bytes.iter().rev().fold(0, |number, byte| number << 8 | usize::from(*byte)))
}
