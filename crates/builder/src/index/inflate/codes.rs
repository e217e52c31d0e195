//! The tables that look up Huffman codes.

/// Bits of the first table. A longer code needs a second look-up, in a table that the first one
/// leads to. 11 bits are enough for nearly all literals and lengths, in 8 KiB.
pub(super) const LITERAL_BITS: u32 = 11;
pub(super) const DISTANCE_BITS: u32 = 8;

/// The longest code of the lengths of codes.
pub(super) const LENGTH_BITS: u32 = 7;

/// The most entries that such tables have, with codes of up to 15 bits: 286 or 288 literals and
/// lengths, and 30 or 32 distances.
pub(super) const LITERAL_ENTRIES: usize = 2342;
pub(super) const DISTANCE_ENTRIES: usize = 402;

/// The most codes that a block has.
pub(super) const MAX_CODES: usize = 288 + 32;

/// The longest code.
const MAX_BITS: usize = 15;

/// What a code stands for.
///
/// ```text
/// bit 31      set: a literal
/// bits 16–30  the literal, the base of a length or distance, or where a second table begins
/// bit 15      set: another table, the end of the block, or nothing
/// bits 8–12   bits of the code
/// bits 0–5    bits of the code and the extra ones behind it; or those that look up in that table
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Code(u32);

impl Code {
    const LITERAL: u32 = 1 << 31;
    const SPECIAL: u32 = 1 << 15;
    const TABLE: u32 = Self::SPECIAL | 1 << 14;
    const END: u32 = Self::SPECIAL | 1 << 13;

    /// No code.
    pub(super) const NONE: Code = Code(Self::SPECIAL);

    #[inline(always)]
    pub(super) fn is_literal(self) -> bool {
        self.0 & Self::LITERAL != 0
    }

    /// Neither a literal nor the base of a value.
    #[inline(always)]
    pub(super) fn is_special(self) -> bool {
        self.0 & Self::SPECIAL != 0
    }

    #[inline(always)]
    fn is_table(self) -> bool {
        self.0 & Self::TABLE == Self::TABLE
    }

    pub(super) fn is_end(self) -> bool {
        self.0 & Self::END == Self::END
    }

    /// The bits to consume.
    #[inline(always)]
    pub(super) fn bits(self) -> u32 {
        self.0 & 63
    }

    /// The literal, or the base of a value.
    #[inline(always)]
    pub(super) fn base(self) -> u32 {
        (self.0 & !Self::LITERAL) >> 16
    }

    /// A base and the extra bits of it, which are among `bits`.
    #[inline(always)]
    pub(super) fn value(self, bits: u64) -> usize {
        let extra = (bits & ((1 << self.bits()) - 1)) >> (self.0 >> 8 & 31);
        self.base() as usize + extra as usize
    }

    /// The entry for a code of this many bits.
    fn coded_in(self, bits: u32) -> Self {
        Code(self.0 + (bits << 8) + bits)
    }
}

/// Looks up the code with which `bits` begin, and the number of bits that led to a second table.
#[inline(always)]
pub(super) fn look_up(table: &[Code], size: u32, bits: u64) -> (Code, u32) {
    let code = table[bits as usize & ((1 << size) - 1)];
    if !code.is_table() {
        return (code, 0);
    }
    let place = (bits >> size) as usize & ((1 << code.bits()) - 1);
    (table[code.base() as usize + place], size)
}

/// A literal, the end of a block, or a length.
pub(super) fn literal_or_length(symbol: usize) -> Code {
    const BASES: [u16; 29] = [
        3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 15, 17, 19, 23, 27, 31, 35, 43, 51, 59, 67, 83, 99, 115,
        131, 163, 195, 227, 258,
    ];
    let number = match symbol {
        0..256 => return Code(Code::LITERAL | (symbol as u32) << 16),
        256 => return Code(Code::END),
        _ => symbol - 257,
    };
    let extra = match number {
        0..8 | 28 => 0,
        _ => number as u32 / 4 - 1,
    };
    BASES.get(number).map_or(Code::NONE, |base| Code(u32::from(*base) << 16 | extra))
}

pub(super) fn distance(symbol: usize) -> Code {
    let symbol = symbol as u32;
    match symbol {
        0..2 => Code((symbol + 1) << 16),
        2..30 => {
            let extra = symbol / 2 - 1;
            Code((((2 + symbol % 2) << extra) + 1) << 16 | extra)
        }
        _ => Code::NONE,
    }
}

/// The length of a code, or how it is repeated.
pub(super) fn length(symbol: usize) -> Code {
    Code((symbol as u32) << 16)
}

/// Whether all bits are codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Coverage {
    Complete,
    /// There is one code, of one bit, or none.
    Single,
}

/// Fills `table` with codes of these `lengths`; the first `size` bits look up.
///
/// # Errors
/// There are more codes than bits for them, or fewer, as other decoders count: one code, of one
/// bit, may be alone.
pub(super) fn fill(
    table: &mut [Code],
    size: u32,
    lengths: &[u8],
    entry: fn(usize) -> Code,
) -> Result<Coverage, &'static str> {
    let mut counts = [0_u16; MAX_BITS + 1];
    for length in lengths.iter().filter(|length| **length > 0) {
        counts[usize::from(*length)] += 1;
    }
    let (mut free, mut starts) = (1_i32, [0_u16; MAX_BITS + 2]);
    for bits in 1..=MAX_BITS {
        free = 2 * free - i32::from(counts[bits]);
        if free < 0 {
            return Err("more codes than bits for them");
        }
        starts[bits + 1] = starts[bits] + counts[bits];
    }
    let used = starts[MAX_BITS + 1];
    if free > 0 && (used > 1 || counts[1] != used) {
        return Err("fewer codes than bits");
    }
    let mut sorted = [0_u16; MAX_CODES];
    for (symbol, length) in lengths.iter().enumerate().filter(|(_, length)| **length > 0) {
        let place = &mut starts[usize::from(*length)];
        sorted[usize::from(*place)] = symbol as u16;
        *place += 1;
    }
    let sorted = sorted[..used.into()].iter().map(|symbol| usize::from(*symbol));
    table.fill(Code::NONE);
    // The next code, its bits in the order of the specification, the highest first.
    let (mut code, mut last) = (0_u32, 0);
    let mut end = 1 << size;
    // The second table that is being filled: the bits that lead to it, its start and its bits.
    let mut second = (u32::MAX, 0, 0);
    for (number, symbol) in sorted.clone().enumerate() {
        let bits = u32::from(lengths[symbol]);
        code <<= bits - last;
        last = bits;
        let reversed = code.reverse_bits() >> (u32::BITS - bits);
        code += 1;
        let first = reversed & ((1 << size) - 1);
        let (start, wide, place, bits) = if bits <= size {
            (0, size, reversed, bits)
        } else {
            if second.0 != first {
                let rest = sorted.clone().skip(number).map(|next| u32::from(lengths[next]) - size);
                let wide = bits_of_second(rest);
                table[first as usize] = Code(Code::TABLE | (end as u32) << 16 | wide);
                second = (first, end, wide);
                end += 1 << wide;
            }
            (second.1, second.2, reversed >> size, bits - size)
        };
        let entry = entry(symbol).coded_in(bits);
        for place in (place as usize..1 << wide).step_by(1 << bits) {
            table[start + place] = entry;
        }
    }
    Ok(if free == 0 { Coverage::Complete } else { Coverage::Single })
}

/// The bits of a second table: as many as its longest code has. `lengths` are those of its codes,
/// without the bits that lead to it, and of the ones that follow.
fn bits_of_second(mut lengths: impl Iterator<Item = u32>) -> u32 {
    let mut bits = 0;
    let mut free = 1_u32;
    while free > 0
        && let Some(length) = lengths.next()
    {
        free <<= length - bits;
        bits = length;
        free -= 1;
    }
    bits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_those_of_the_specification() {
        let length = |symbol, extra: u64| literal_or_length(symbol).coded_in(7).value(extra << 7);
        let lengths = [(257, 0, 3), (264, 0, 10), (265, 1, 12), (284, 31, 258), (285, 0, 258)];
        for (symbol, extra, expected) in lengths {
            assert_eq!(length(symbol, extra), expected, "{symbol}");
        }
        let distance = |symbol, extra: u64| distance(symbol).coded_in(5).value(extra << 5);
        for (symbol, extra, expected) in [(0, 0, 1), (3, 0, 4), (4, 1, 6), (29, 8191, 32768)] {
            assert_eq!(distance(symbol, extra), expected, "{symbol}");
        }
        assert!(literal_or_length(286) == Code::NONE && super::distance(30) == Code::NONE);
    }

    #[test]
    fn codes_fill_their_bits_or_are_refused() {
        let mut table = [Code::NONE; DISTANCE_ENTRIES];
        let mut fill = |lengths: &[u8]| fill(&mut table, DISTANCE_BITS, lengths, distance);
        assert_eq!(fill(&[1, 1]), Ok(Coverage::Complete));
        assert_eq!(fill(&[1]), Ok(Coverage::Single));
        assert_eq!(fill(&[0, 0]), Ok(Coverage::Single));
        for lengths in [&[1, 1, 1][..], &[2], &[1, 2], &[15; 30]] {
            assert!(fill(lengths).is_err(), "{lengths:?}");
        }
    }

    /// Lengths of so many codes that fill their bits: leaves of a tree that is split at random,
    /// more often where it is deepest.
    fn random_lengths(count: usize, random: &mut impl FnMut(usize) -> usize) -> Vec<u8> {
        let mut lengths = vec![1, 1];
        while lengths.len() < count {
            let mut leaves = 0..lengths.len();
            let leaf = if random(3) > 0 {
                leaves.filter(|leaf| lengths[*leaf] < 15).max_by_key(|leaf| lengths[*leaf])
            } else {
                leaves.nth(random(lengths.len())).filter(|leaf| lengths[*leaf] < 15)
            };
            if let Some(leaf) = leaf {
                lengths[leaf] += 1;
                lengths.push(lengths[leaf]);
            }
        }
        for place in (1..count).rev() {
            lengths.swap(place, random(place + 1));
        }
        lengths
    }

    #[test]
    fn each_code_leads_to_its_symbol_and_the_tables_hold_all() {
        let mut state = 1_u64;
        let mut random = |bound: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) as usize % bound
        };
        for round in 0..2000 {
            let (most, size, entries) = match round % 2 {
                0 => (288, LITERAL_BITS, LITERAL_ENTRIES),
                _ => (32, DISTANCE_BITS, DISTANCE_ENTRIES),
            };
            let lengths = random_lengths(2 + random(most - 1), &mut random);
            let mut table = vec![Code::NONE; entries];
            assert_eq!(fill(&mut table, size, &lengths, length), Ok(Coverage::Complete));
            let mut symbols: Vec<usize> = (0..lengths.len()).collect();
            symbols.sort_by_key(|symbol| lengths[*symbol]);
            let (mut code, mut last) = (0_u32, 0);
            for symbol in symbols {
                let bits = u32::from(lengths[symbol]);
                code <<= bits - last;
                last = bits;
                let behind = random(1 << 20) as u64;
                let stored = behind << bits | u64::from(code.reverse_bits() >> (32 - bits));
                let (found, before) = look_up(&table, size, stored);
                assert_eq!((found.base() as usize, before + found.bits()), (symbol, bits));
                code += 1;
            }
        }
    }
}
