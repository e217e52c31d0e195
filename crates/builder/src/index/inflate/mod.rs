//! Decodes deflate, RFC 1951, and tells at which bit of the input it is.
//!
//! The safe interface of zlib-rs does not tell that. miniz_oxide's does, and takes 1.4 times as
//! long.

mod codes;
#[cfg(any(test, fuzzing))]
pub(crate) mod compare;
mod symbols;

use self::codes::{
    Code, Coverage, DISTANCE_BITS, DISTANCE_ENTRIES, LENGTH_BITS, LITERAL_BITS, LITERAL_ENTRIES,
    MAX_CODES, fill, look_up,
};

/// Bytes behind the end of an output that are overwritten with anything.
pub(super) const SLACK: usize = STEP;

/// Bytes of a match that are copied at once.
const STEP: usize = 16;

const BAD_REPEAT: &str = "a repeated length of nothing, or for more codes than there are";

/// Why decoding has stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    /// The output is full.
    Full,
    /// The input is used up.
    NoInput,
    /// A block has ended, and another one follows.
    BlockEnd,
    /// The last block has ended.
    End,
}

/// The next part of the input.
#[derive(Clone, Copy, Debug)]
enum Next {
    Block,
    /// The size of a block that is stored as it is.
    StoredSize,
    /// So many bytes that are stored as they are.
    Stored(usize),
    /// The numbers of codes.
    Counts,
    /// The length of this one of the codes for lengths.
    LengthCode(usize),
    /// The length of this code.
    Length(usize),
    Symbols,
    End,
}

/// An element of an output: a byte, or a number that is a byte or a place before the output.
pub(super) trait Element: Copy + From<u8> {}

impl<T: Copy + From<u8>> Element for T {}

/// Where decoded bytes go.
pub(super) struct Output<'a, T> {
    /// Holds what was decoded before, and has [`SLACK`] bytes behind `end`.
    pub(super) buffer: &'a mut [T],
    /// The first byte that a match may refer to, if it is not too far.
    pub(super) floor: usize,
    /// The next byte.
    pub(super) at: usize,
    pub(super) end: usize,
}

/// Copies `count` bytes to `to` from `distance` before; overwrites up to [`SLACK`] bytes behind.
#[inline(always)]
fn copy<T: Element>(buffer: &mut [T], mut to: usize, distance: usize, count: usize) {
    let (mut from, end) = (to - distance, to + count);
    if distance == 1 {
        let byte = buffer[from];
        buffer[to..end].fill(byte);
        return;
    }
    // A step longer than the distance would copy bytes that do not exist yet: it advances by the
    // distance only, and the next one overwrites the rest.
    let step = distance.min(STEP);
    while to < end {
        // Assigned as arrays: without link-time optimization, `copy_from_slice` is a call for each
        // 16 bytes.
        let bytes: [T; STEP] = *buffer[from..].first_chunk().expect("it is before the next byte");
        *buffer[to..].first_chunk_mut().expect("there is slack") = bytes;
        (from, to) = (from + step, to + step);
    }
}

/// Input, and how much of it was taken.
struct Input<'a> {
    bytes: &'a [u8],
    taken: usize,
}

/// A decoder.
pub(super) struct Inflate {
    /// Input that was taken and is not used yet, the next bit lowest; zeros above.
    bits: u64,
    count: u32,
    next: Next,
    is_last: bool,
    /// The tables have the fixed codes. They are not made again for each block of a few bits.
    has_fixed_codes: bool,
    /// The bytes of a match that are still missing, and its distance.
    rest: (usize, usize),
    /// Numbers of codes in this block: for literals and lengths, for distances, and for lengths of
    /// codes.
    literals: usize,
    distances: usize,
    length_codes: usize,
    lengths: [u8; MAX_CODES],
    length_table: [Code; 1 << LENGTH_BITS],
    literal_table: [Code; LITERAL_ENTRIES],
    distance_table: [Code; DISTANCE_ENTRIES],
}

impl Default for Inflate {
    fn default() -> Self {
        Inflate {
            bits: 0,
            count: 0,
            next: Next::Block,
            is_last: false,
            has_fixed_codes: false,
            rest: (0, 0),
            literals: 0,
            distances: 0,
            length_codes: 0,
            lengths: [0; MAX_CODES],
            length_table: [Code::NONE; 1 << LENGTH_BITS],
            literal_table: [Code::NONE; LITERAL_ENTRIES],
            distance_table: [Code::NONE; DISTANCE_ENTRIES],
        }
    }
}

impl Inflate {
    /// Number of input bits that were taken and not used, less than 64.
    pub(super) fn bits_ahead(&self) -> u32 {
        self.count
    }

    /// The whole bytes among them, at most seven.
    pub(super) fn bytes_ahead(&self) -> Vec<u8> {
        let bytes = (self.bits >> (self.count % 8)).to_le_bytes();
        bytes[..self.count as usize / 8].to_vec()
    }

    /// Begins anew with the `count` upper bits of a byte; those that were not used are gone.
    pub(super) fn restart(&mut self, count: u8, byte: u8) {
        (self.bits, self.count) = (u64::from(byte) >> (8 - count), count.into());
        (self.next, self.rest) = (Next::Block, (0, 0));
    }

    /// Decodes until there is a reason to [`Stop`]. Also returns the number of bytes taken.
    pub(super) fn decode<T: Element>(
        &mut self,
        input: &[u8],
        output: &mut Output<'_, T>,
    ) -> (Result<Stop, &'static str>, usize) {
        let mut input = Input { bytes: input, taken: 0 };
        let stop = loop {
            match self.step(&mut input, output) {
                Ok(None) => {}
                Ok(Some(stop)) => break Ok(stop),
                Err(problem) => break Err(problem),
            }
        };
        (stop, input.taken)
    }

    fn step<T: Element>(
        &mut self,
        input: &mut Input<'_>,
        output: &mut Output<'_, T>,
    ) -> Result<Option<Stop>, &'static str> {
        match self.next {
            Next::Block => {
                let Some(bits) = self.take(input, 3) else { return Ok(Some(Stop::NoInput)) };
                self.is_last = bits & 1 == 1;
                self.next = match bits >> 1 {
                    0 => {
                        self.skip(self.count % 8);
                        Next::StoredSize
                    }
                    1 => {
                        if !self.has_fixed_codes {
                            self.use_fixed_codes()?;
                        }
                        Next::Symbols
                    }
                    2 => Next::Counts,
                    _ => return Err("a block of an unknown type"),
                };
            }
            Next::StoredSize => {
                let Some(bits) = self.take(input, 32) else { return Ok(Some(Stop::NoInput)) };
                let (size, complement) = (bits as u16, (bits >> 16) as u16);
                if size != !complement {
                    return Err("a stored block with two sizes");
                }
                self.next = Next::Stored(size.into());
            }
            Next::Stored(0) => return Ok(Some(self.end_block())),
            Next::Stored(left) => return Ok(self.copy_stored(left, input, output)),
            Next::Counts => {
                let Some(bits) = self.take(input, 14) else { return Ok(Some(Stop::NoInput)) };
                self.literals = 257 + (bits & 31) as usize;
                self.distances = 1 + (bits >> 5 & 31) as usize;
                self.length_codes = 4 + (bits >> 10) as usize;
                if self.literals > 286 || self.distances > 30 {
                    return Err("a block with too many codes");
                }
                self.lengths = [0; MAX_CODES];
                self.next = Next::LengthCode(0);
            }
            Next::LengthCode(number) => {
                const ORDER: [u8; 19] =
                    [16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15];
                if number == self.length_codes {
                    let lengths = &self.lengths[..ORDER.len()];
                    let filled = fill(&mut self.length_table, LENGTH_BITS, lengths, codes::length)?;
                    if filled != Coverage::Complete {
                        return Err("fewer codes than bits");
                    }
                    self.lengths = [0; MAX_CODES];
                    self.next = Next::Length(0);
                    return Ok(None);
                }
                let Some(bits) = self.take(input, 3) else { return Ok(Some(Stop::NoInput)) };
                self.lengths[usize::from(ORDER[number])] = bits as u8;
                self.next = Next::LengthCode(number + 1);
            }
            Next::Length(number) if number < self.literals + self.distances => {
                return self.read_length(number, input);
            }
            Next::Length(_) => {
                if self.lengths[256] == 0 {
                    return Err("a block that cannot end");
                }
                self.use_codes()?;
                self.next = Next::Symbols;
            }
            Next::Symbols => {
                self.copy_rest(output);
                return self.symbols(input, output);
            }
            Next::End => return Ok(Some(Stop::End)),
        }
        Ok(None)
    }

    fn end_block(&mut self) -> Stop {
        let (next, stop) =
            if self.is_last { (Next::End, Stop::End) } else { (Next::Block, Stop::BlockEnd) };
        self.next = next;
        stop
    }

    fn copy_stored<T: Element>(
        &mut self,
        left: usize,
        input: &mut Input<'_>,
        output: &mut Output<'_, T>,
    ) -> Option<Stop> {
        let most = left.min(output.end - output.at);
        let mut count = 0;
        while self.count > 0 && count < most {
            output.buffer[output.at + count] = T::from(self.bits as u8);
            self.skip(8);
            count += 1;
        }
        let rest = &input.bytes[input.taken..];
        let more = rest.len().min(most - count);
        for (to, from) in output.buffer[output.at + count..][..more].iter_mut().zip(rest) {
            *to = T::from(*from);
        }
        input.taken += more;
        count += more;
        output.at += count;
        self.next = Next::Stored(left - count);
        match count {
            0 if most == 0 => Some(Stop::Full),
            0 => Some(Stop::NoInput),
            _ => None,
        }
    }

    /// Reads the length of a code, or several.
    fn read_length(
        &mut self,
        number: usize,
        input: &mut Input<'_>,
    ) -> Result<Option<Stop>, &'static str> {
        self.refill(input);
        let (code, _) = look_up(&self.length_table, LENGTH_BITS, self.bits);
        let (extra, least) = match code.base() {
            16 => (2, 3),
            17 => (3, 3),
            18 => (7, 11),
            _ => (0, 1),
        };
        if code.bits() + extra > self.count {
            return Ok(Some(Stop::NoInput));
        }
        let times = least + (self.bits >> code.bits() & ((1 << extra) - 1)) as usize;
        self.skip(code.bits() + extra);
        let length = match code.base() {
            16 => {
                *number.checked_sub(1).and_then(|last| self.lengths.get(last)).ok_or(BAD_REPEAT)?
            }
            17 | 18 => 0,
            length => length as u8,
        };
        let end = number + times;
        if end > self.literals + self.distances {
            return Err(BAD_REPEAT);
        }
        self.lengths[number..end].fill(length);
        self.next = Next::Length(end);
        Ok(None)
    }

    fn use_fixed_codes(&mut self) -> Result<(), &'static str> {
        (self.literals, self.distances) = (288, 32);
        for (codes, length) in [(0..144, 8), (144..256, 9), (256..280, 7), (280..288, 8)] {
            self.lengths[codes].fill(length);
        }
        self.lengths[288..].fill(5);
        self.use_codes()?;
        self.has_fixed_codes = true;
        Ok(())
    }

    /// Fills the tables with codes of the lengths that were read.
    fn use_codes(&mut self) -> Result<(), &'static str> {
        self.has_fixed_codes = false;
        let lengths = &self.lengths[..self.literals + self.distances];
        let (literals, distances) = lengths.split_at(self.literals);
        fill(&mut self.literal_table, LITERAL_BITS, literals, codes::literal_or_length)?;
        fill(&mut self.distance_table, DISTANCE_BITS, distances, codes::distance)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use flate2::{Compression, write::DeflateEncoder};

    use super::compare::assert_like_zlib;

    /// Some text, bytes that repeat at many distances, and bytes that do not repeat.
    fn samples() -> Vec<Vec<u8>> {
        let mut state = 7_u64;
        let mut random = move |bound: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % bound
        };
        let text = (0..20_000).flat_map(|_| format!("{} ", random(5000)).into_bytes()).collect();
        let noise = (0..70_000).map(|_| random(256) as u8).collect();
        let mut runs: Vec<u8> = Vec::new();
        while runs.len() < 100_000 {
            runs.extend((0..random(20)).map(|_| random(256) as u8));
            let far = if random(4) == 0 { 40_000 } else { 40 };
            let from = runs.len().saturating_sub(1 + random(far) as usize);
            (0..random(300) as usize)
                .for_each(|at| runs.push(runs.get(from + at).copied().unwrap_or_default()));
        }
        vec![text, noise, runs, vec![0; 50_000], b"short".to_vec(), Vec::new()]
    }

    #[test]
    fn streams_are_decoded_like_by_zlib_whole_cut_and_damaged() {
        for sample in samples() {
            for level in [0, 1, 3, 6, 9] {
                let mut encoder = DeflateEncoder::new(Vec::new(), Compression::new(level));
                encoder.write_all(&sample).unwrap();
                let stored = encoder.finish().unwrap();
                for (taken, given) in [(usize::MAX, 1 << 20), (7, 1000), (1, 1), (5000, 511)] {
                    let taken = taken.min(stored.len());
                    assert_like_zlib(&stored, taken, given);
                }
                for round in 0..60 {
                    let place = round * 7919 % (stored.len() * 8).clamp(1, 3000);
                    let mut damaged = stored.clone();
                    damaged[place / 8] ^= 1 << (place % 8);
                    assert_like_zlib(&damaged, 1 << 17, 1 << 18);
                    assert_like_zlib(&stored[..place / 8], 100, 1 << 18);
                }
            }
        }
    }

    /// A last block with codes of these lengths, and bits behind them, the first one lowest.
    fn block(literals: &[(usize, u8)], distances: &[u8], symbols: (u64, u32)) -> Vec<u8> {
        let (mut stored, mut count) = (Vec::new(), 0_u32);
        let mut put = |bits: u64, size: u32| {
            for bit in 0..size {
                if count % 8 == 0 {
                    stored.push(0);
                }
                *stored.last_mut().unwrap() |= ((bits >> bit & 1) as u8) << (count % 8);
                count += 1;
            }
        };
        let most = 1 + literals.iter().map(|(symbol, _)| *symbol).max().unwrap().max(256);
        put(0b101, 3);
        put(most as u64 - 257, 5);
        put(distances.len() as u64 - 1, 5);
        // 19 lengths of codes: each length from 0 to 15 has a code of four bits, itself.
        put(15, 4);
        put(0, 9);
        (0..16).for_each(|_| put(4, 3));
        let mut lengths = vec![0; most];
        literals.iter().for_each(|(symbol, length)| lengths[*symbol] = *length);
        lengths.extend_from_slice(distances);
        lengths.iter().for_each(|length| put(u64::from(length.reverse_bits() >> 4), 4));
        put(symbols.0, symbols.1);
        stored
    }

    #[test]
    fn incomplete_codes_are_taken_and_refused_like_by_zlib() {
        // In these, `A` is 10, the end 11, and a length of three 0.
        let with_length = [(65, 2), (256, 2), (257, 1)];
        // In these, `A` is 0 and the end 1.
        let literals = [(65, 1), (256, 1)];
        for (literals, distances, symbols, is_whole) in [
            (&literals[..], &[0][..], (0b10, 2), true),
            (&literals, &[1], (0b10, 2), true),
            (&literals, &[1, 1], (0b10, 2), true),
            (&literals, &[2], (0b10, 2), false),
            (&literals, &[1, 1, 1], (0b10, 2), false),
            (&[(256, 1)], &[0], (0, 1), true),
            // No code, the rest of which is there.
            (&[(256, 1)], &[0], (1, 60), false),
            (&[(256, 2)], &[0], (0, 2), false),
            (&[(65, 1)], &[0], (0, 1), false),
            (&[(65, 1), (66, 1), (256, 1)], &[0], (0, 60), false),
            // `A`, three times what is one before, and the end.
            (&with_length, &[1], (0b11_00_01, 6), true),
            (&with_length, &[1, 1], (0b11_00_01, 6), true),
            // A distance that is no code, and one that is too far.
            (&with_length, &[1], (0b11_10_01, 60), false),
            (&with_length, &[1, 1], (0b11_10_01, 60), false),
            (&with_length, &[0], (0b11_00_01, 60), false),
        ] {
            let stored = block(literals, distances, symbols);
            let text = format!("{literals:?} {distances:?} {symbols:?}");
            assert_eq!(assert_like_zlib(&stored, 100, 100), is_whole, "{text}");
            assert_eq!(assert_like_zlib(&stored, 1, 1), is_whole, "{text}");
        }
    }

    #[test]
    fn fixed_and_other_codes_take_turns() {
        let own = &block(&[(65, 1), (256, 1)], &[0], (0b10, 2));
        let fixed = {
            let mut encoder = DeflateEncoder::new(Vec::new(), Compression::new(9));
            encoder.write_all(b"abc").unwrap();
            encoder.finish().unwrap()
        };
        assert_eq!(fixed[0] & 0b110, 0b010, "fixed codes");
        assert!(assert_like_zlib(&fixed, 100, 100));
        let mut inflate = super::Inflate::default();
        let mut decode = |stored: &[u8]| {
            let mut buffer = [0_u8; 100 + super::SLACK];
            let mut output = super::Output { buffer: &mut buffer, floor: 0, at: 0, end: 100 };
            inflate.restart(0, 0);
            assert_eq!(inflate.decode(stored, &mut output).0, Ok(super::Stop::End));
            let end = output.at;
            buffer[..end].to_vec()
        };
        for _ in 0..2 {
            assert_eq!(decode(&fixed), b"abc");
            assert_eq!(decode(&fixed), b"abc");
            assert_eq!(decode(own), b"A");
        }
    }

    #[test]
    fn streams_of_noise_are_decoded_like_by_zlib() {
        for round in 0..20_000_u64 {
            let bits = round.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let stored = [bits.to_le_bytes(), bits.rotate_left(23).to_le_bytes()].concat();
            assert_like_zlib(&stored, 16, 1000);
        }
    }
}
