//! Compiled modules: IFF files, with tables of their atoms, of the functions that they call in
//! other modules, and of their literals.

use std::{collections::HashSet, io::Read as _};

use flate2::read::ZlibDecoder;

use super::terms::{Reader, Term};

/// Atoms, calls and literal terms of one module.
const TERMS: usize = 1 << 16;

/// Decompressed bytes of a module's literals that are read.
const LITERALS: u64 = 256 << 10;

/// What a module says about others.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Beam {
    /// The modules that it calls.
    pub(super) called: Vec<Vec<u8>>,
    /// It starts a supervisor: atoms that may be the modules of its children.
    pub(super) supervised: Vec<Vec<u8>>,
    /// It loads a library of its application.
    pub(super) is_native: bool,
    /// It makes the node one of a network, for which `epmd` is started.
    pub(super) is_distributed: bool,
    /// It asks for the modules of applications, as those do that find plugins by the attributes of
    /// modules: all of them are loaded.
    pub(super) is_listing: bool,
}

/// Reads a compiled module as far as it can be understood.
pub(super) fn beam(file: &[u8]) -> Beam {
    let mut beam = Beam::default();
    read(file, &mut beam);
    beam
}

fn read(file: &[u8], beam: &mut Beam) -> Option<()> {
    let mut reader = Reader { rest: file };
    if reader.take(4)? != b"FOR1" || reader.take(8)?[4..] != *b"BEAM" {
        return None;
    }
    let mut atoms: Vec<&[u8]> = Vec::new();
    let mut starts_supervisor = false;
    let mut parts = HashSet::new();
    while let Some(name) = reader.take(4) {
        let len = reader.number(4)?;
        // The last part that is needed may be cut off.
        let mut part = Reader { rest: &reader.rest[..len.min(reader.rest.len())] };
        match name {
            // A module has each part once.
            _ if !parts.insert(name) => {}
            b"AtU8" | b"Atom" => {
                let count = part.number(4)?;
                atoms.extend((0..count.min(TERMS)).map_while(|_| part.named(1)));
            }
            b"ImpT" => {
                let mut known: HashSet<_> = atoms.first().into_iter().collect();
                let count = part.number(4)?;
                for _ in 0..count.min(TERMS) {
                    // Module, function and arity; atoms count from 1.
                    let (Some(module), Some(function)) = (part.number(4), part.number(4)) else {
                        break;
                    };
                    part.take(4)?;
                    let atom = |at: usize| at.checked_sub(1).and_then(|at| atoms.get(at));
                    let (Some(module), Some(function)) = (atom(module), atom(function)) else {
                        continue;
                    };
                    if known.insert(module) {
                        beam.called.push(module.to_vec());
                    }
                    match (*module, *function) {
                        (b"erlang", b"load_nif") => beam.is_native = true,
                        (b"net_kernel", b"start") => beam.is_distributed = true,
                        (b"supervisor", b"start_link") => starts_supervisor = true,
                        (b"application", b"get_key") => {
                            beam.is_listing = atoms.contains(&&b"modules"[..]);
                        }
                        _ => {}
                    }
                }
                if starts_supervisor {
                    beam.supervised.extend(atoms.iter().take(TERMS).map(|atom| atom.to_vec()));
                }
            }
            b"LitT" if starts_supervisor => supervised(&mut part, beam)?,
            _ => {}
        }
        // Parts are padded to multiples of four bytes.
        reader.take(len.next_multiple_of(4))?;
    }
    Some(())
}

/// Adds the atoms in a table of literals: specifications of children are among them.
fn supervised(part: &mut Reader<'_>, beam: &mut Beam) -> Option<()> {
    let mut inflated = Vec::new();
    let table = match part.number(4)? {
        // Since OTP 28 a table may be stored as it is.
        0 => part.rest,
        _ => {
            let _ = ZlibDecoder::new(part.rest).take(LITERALS).read_to_end(&mut inflated);
            &inflated
        }
    };
    let mut table = Reader { rest: table };
    let count = table.number(4)?;
    for _ in 0..count.min(TERMS) {
        let mut literal = Reader { rest: table.named(4)? };
        literal.begin()?;
        while let Some(term) = literal.next() {
            if let Term::Atom(name) = term
                && beam.supervised.len() < TERMS
            {
                beam.supervised.push(name.to_vec());
            }
        }
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use flate2::{Compression, write::ZlibEncoder};

    use super::*;

    fn part(name: &[u8], content: &[u8]) -> Vec<u8> {
        let padding = vec![0; content.len().next_multiple_of(4) - content.len()];
        [name, &(content.len() as u32).to_be_bytes(), content, &padding].concat()
    }

    /// A module with these atoms and calls, whose atoms count from 1.
    fn module(atoms: &[&str], calls: &[[u32; 3]], more: &[u8]) -> Vec<u8> {
        let mut table = (atoms.len() as u32).to_be_bytes().to_vec();
        for atom in atoms {
            table.push(atom.len() as u8);
            table.extend(atom.as_bytes());
        }
        let numbers = calls.as_flattened().iter();
        let numbers: Vec<u8> = numbers.flat_map(|number| number.to_be_bytes()).collect();
        let calls = [&(calls.len() as u32).to_be_bytes(), &numbers[..]].concat();
        let parts = [part(b"AtU8", &table), part(b"Code", b"abcde"), part(b"ImpT", &calls)];
        [b"FOR1\0\0\0\0BEAM", &parts.concat()[..], more].concat()
    }

    #[test]
    fn a_module_names_those_that_it_calls() {
        let file = module(&["own", "lists", "map"], &[[1, 3, 2], [2, 3, 2], [2, 3, 1]], b"");
        assert_eq!(beam(&file), Beam { called: vec![b"lists".to_vec()], ..Beam::default() });
        (0..file.len()).for_each(|len| drop(beam(&file[..len])));
    }

    #[test]
    fn what_a_module_does_beside_calls_is_known_by_the_functions() {
        let atoms = ["own", "erlang", "load_nif", "application", "get_key", "net_kernel", "start"];
        let calls = [[2, 3, 2], [4, 5, 2], [6, 7, 1]];
        let known = beam(&module(&atoms, &calls, b""));
        assert!(known.is_native && known.is_distributed && !known.is_listing);
        let listing = beam(&module(&[&atoms[..], &["modules"]].concat(), &calls, b""));
        assert!(listing.is_listing && listing.supervised.is_empty());
    }

    #[test]
    fn a_supervisor_names_its_children_in_literals() {
        let literal = [&[131, b't', 0, 0, 0, 1, b'w', 5][..], b"startw\x05child"].concat();
        let table = [&[0, 0, 0, 1, 0, 0, 0, literal.len() as u8][..], &literal].concat();
        let mut deflated = ZlibEncoder::new(Vec::new(), Compression::default());
        deflated.write_all(&table).unwrap();
        let deflated = [&(table.len() as u32).to_be_bytes(), &deflated.finish().unwrap()[..]];
        for table in [deflated.concat(), [&[0; 4], &table[..]].concat()] {
            let atoms = ["own", "supervisor", "start_link"];
            let file = module(&atoms, &[[2, 3, 2]], &part(b"LitT", &table));
            assert_eq!(beam(&file).supervised[3..], [&b"start"[..], b"child"]);
            let file = module(&["own", "lists"], &[[2, 1, 2]], &part(b"LitT", &table));
            assert!(beam(&file).supervised.is_empty());
            (0..file.len()).for_each(|len| drop(beam(&file[..len])));
        }
    }

    #[test]
    fn parts_of_a_module_are_read_once() {
        let literal = b"\x83w\x05child";
        let table = [&[0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, literal.len() as u8][..], literal].concat();
        let calls = [1u32, 2, 3, 2].map(u32::to_be_bytes).concat();
        let more = [part(b"ImpT", &calls), part(b"LitT", &table)].concat().repeat(3);
        let atoms = ["own", "supervisor", "start_link"];
        let known = beam(&module(&atoms, &[[2, 3, 2]], &more)).supervised;
        assert_eq!(known, [&b"own"[..], b"supervisor", b"start_link", b"child"]);
    }
}
