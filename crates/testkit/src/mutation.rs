//! Damages bytes as faulty disks, faulty networks and attackers do.

use std::fmt;

use crate::content::Choices;

/// A change to some bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Mutation {
    /// One bit is flipped.
    BitFlip,
    /// Some bytes are replaced.
    Overwrite,
    /// An aligned number becomes extreme, or changes slightly.
    Number,
    /// The end is cut off.
    Truncation,
    /// Bytes are appended.
    Extension,
    /// Bytes are inserted; the rest moves back.
    Insertion,
    /// Bytes are removed; the rest moves forward.
    Removal,
}

impl fmt::Display for Mutation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Mutation::BitFlip => "bit flip",
            Mutation::Overwrite => "overwrite",
            Mutation::Number => "number",
            Mutation::Truncation => "truncation",
            Mutation::Extension => "extension",
            Mutation::Insertion => "insertion",
            Mutation::Removal => "removal",
        })
    }
}

/// Replacements for numbers.
const EXTREMES: [u64; 8] =
    [0, 1, 0xffff, 0x7fff_ffff, 0xffff_ffff, 1 << 32, u64::MAX >> 1, u64::MAX];
/// Maximum number of bytes overwritten, inserted or removed at once.
const PIECE: u64 = 64;
/// Maximum number of bytes appended or cut off.
const END: u64 = 8192;

/// Changes `bytes`, which must not be empty, at random.
pub fn mutate(bytes: &mut Vec<u8>, choices: &mut Choices) -> Mutation {
    // Half of the changes flip single bits; the rest are evenly distributed.
    let mutation = match choices.below(12) {
        0 => Mutation::Overwrite,
        1 => Mutation::Number,
        2 => Mutation::Truncation,
        3 => Mutation::Extension,
        4 => Mutation::Insertion,
        5 => Mutation::Removal,
        _ => Mutation::BitFlip,
    };
    let len = bytes.len() as u64;
    let at = choices.below(len) as usize;
    let piece = (1 + choices.below(PIECE.min(len - at as u64))) as usize;
    match mutation {
        Mutation::BitFlip => bytes[at] ^= 1 << choices.below(8),
        Mutation::Overwrite => {
            let noise = noise(piece, choices);
            bytes[at..at + piece].copy_from_slice(&noise);
        }
        Mutation::Number => number(bytes, at, choices),
        Mutation::Truncation if choices.below(2) == 0 => bytes.truncate(at),
        Mutation::Truncation => bytes.truncate((len - 1 - choices.below(END.min(len))) as usize),
        Mutation::Extension => {
            let more = 1 + choices.below(END) as usize;
            bytes.resize(bytes.len() + more, choices.any() as u8);
        }
        Mutation::Insertion => {
            let noise = noise(piece, choices);
            bytes.splice(at..at, noise);
        }
        Mutation::Removal => {
            bytes.drain(at..at + piece);
        }
    }
    mutation
}

fn noise(len: usize, choices: &mut Choices) -> Vec<u8> {
    (0..len).map(|_| choices.any() as u8).collect()
}

/// Changes the number of 2, 4 or 8 bytes around `at`.
fn number(bytes: &mut [u8], at: usize, choices: &mut Choices) {
    let size = 2 << choices.below(3);
    let at = at / size * size;
    let Some(number) = bytes.get_mut(at..at + size) else { return };
    let old = number.iter().rev().fold(0, |old, byte| old << 8 | u64::from(*byte));
    let new = match choices.below(10) {
        8 => old.wrapping_add(1),
        9 => old.wrapping_sub(1),
        extreme => EXTREMES[extreme as usize],
    };
    number.copy_from_slice(&new.to_le_bytes()[..size]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mutation_happens_and_is_the_same_again() {
        let run = || {
            let mut choices = Choices::new(1);
            let seen = (0..500).map(|_| {
                let mut bytes = vec![7; 100];
                let mutation = mutate(&mut bytes, &mut choices);
                (mutation, bytes)
            });
            seen.collect::<Vec<_>>()
        };
        let seen = run();
        assert_eq!(seen, run());
        let kinds: std::collections::BTreeSet<_> = seen.iter().map(|(kind, _)| kind).collect();
        assert_eq!(kinds.len(), 7);
        for len in 1..20 {
            mutate(&mut vec![0; len], &mut Choices::new(len as u64));
        }
    }
}
