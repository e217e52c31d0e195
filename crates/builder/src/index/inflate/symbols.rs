//! Literals and matches.

use super::{
    Element, Inflate, Input, Output, Stop,
    codes::{Code, DISTANCE_BITS, LITERAL_BITS, look_up},
    copy,
};

/// A round of [`Inflate::many`] loads 8 bytes at most twice, and writes up to three literals; a
/// match ends with the output.
const MOST_INPUT: usize = 16;
const MOST_LITERALS: usize = 3;

const BAD_CODE: &str = "bits that are no code";
const BAD_DISTANCE: &str = "a match that begins before the data";

impl Inflate {
    /// Decodes until the block ends, or there is no more input, or no more space.
    pub(super) fn symbols<T: Element>(
        &mut self,
        input: &mut Input<'_>,
        output: &mut Output<'_, T>,
    ) -> Result<Option<Stop>, &'static str> {
        if self.many(input, output)? {
            return Ok(Some(self.end_block()));
        }
        if output.at == output.end {
            return Ok(Some(Stop::Full));
        }
        self.one(input, output)
    }

    /// Copies what is missing of a match, as far as there is space.
    pub(super) fn copy_rest<T: Element>(&mut self, output: &mut Output<'_, T>) {
        let (left, distance) = self.rest;
        let count = left.min(output.end - output.at);
        if count > 0 {
            copy(output.buffer, output.at, distance, count);
            output.at += count;
            self.rest.0 = left - count;
        }
    }

    /// Decodes while there is much input and space. Returns whether the block has ended.
    fn many<T: Element>(
        &mut self,
        input: &mut Input<'_>,
        output: &mut Output<'_, T>,
    ) -> Result<bool, &'static str> {
        // In registers.
        let (mut bits, mut count, mut from) = (self.bits, self.count, input.taken);
        let Output { buffer, floor, at, end } = output;
        let (bytes, buffer, floor, end) = (input.bytes, &mut **buffer, *floor, *end);
        let (mut to, mut rest) = (*at, self.rest);
        let literals = &self.literal_table;
        let mut has_ended = false;
        // Leaves at least 56 bits. Those above `count` are what follows, and are loaded once more.
        macro_rules! refill {
            () => {
                let next = bytes[from..].first_chunk().copied().unwrap_or_default();
                bits |= u64::from_le_bytes(next) << count;
                from += ((63 - count) >> 3) as usize;
                count |= 56;
            };
        }
        macro_rules! look_up_next {
            () => {{
                refill!();
                first(literals, bits)
            }};
        }
        macro_rules! consume {
            ($bits:expr) => {
                bits >>= $bits;
                count -= $bits;
            };
        }
        macro_rules! write {
            ($literal:expr) => {
                consume!($literal.bits());
                buffer[to] = T::from($literal.base() as u8);
                to += 1;
            };
        }
        if bytes.len() - from < MOST_INPUT {
            return Ok(false);
        }
        // The next one is looked up before a match is copied.
        let mut code = look_up_next!();
        while end - to > MOST_LITERALS && bytes.len() - from >= MOST_INPUT {
            // Codes in the first table have 11 bits at most, so three of them are here, or two and
            // any other one.
            if code.is_literal() {
                write!(code);
                code = first(literals, bits);
                if code.is_literal() {
                    write!(code);
                    code = first(literals, bits);
                    if code.is_literal() {
                        write!(code);
                        code = look_up_next!();
                        continue;
                    }
                }
            }
            if code.is_special() {
                let (second, before) = look_up(literals, LITERAL_BITS, bits);
                consume!(before);
                code = second;
                if code.is_literal() {
                    write!(code);
                    code = look_up_next!();
                    continue;
                }
                if code.is_end() {
                    consume!(code.bits());
                    has_ended = true;
                    break;
                }
                if code.is_special() {
                    return Err(BAD_CODE);
                }
            }
            let length = code.value(bits);
            consume!(code.bits());
            refill!();
            let (second, before) = look_up(&self.distance_table, DISTANCE_BITS, bits);
            consume!(before);
            if second.is_special() {
                return Err(BAD_CODE);
            }
            let distance = second.value(bits);
            consume!(second.bits());
            code = look_up_next!();
            if distance > to - floor {
                return Err(BAD_DISTANCE);
            }
            let now = length.min(end - to);
            copy(buffer, to, distance, now);
            to += now;
            rest = (length - now, distance);
        }
        (self.bits, self.count, input.taken) = (bits & ((1 << count) - 1), count, from);
        (*at, self.rest) = (to, rest);
        Ok(has_ended)
    }

    /// Decodes one literal or match, or the end of the block, if all of its bits are here.
    fn one<T: Element>(
        &mut self,
        input: &mut Input<'_>,
        output: &mut Output<'_, T>,
    ) -> Result<Option<Stop>, &'static str> {
        self.refill(input);
        // Without all of its bits a code looks like another one, but never like a shorter one.
        let (code, before) = look_up(&self.literal_table, LITERAL_BITS, self.bits);
        let used = before + code.bits();
        if used > self.count {
            return Ok(Some(Stop::NoInput));
        }
        if code.is_literal() {
            self.skip(used);
            output.buffer[output.at] = T::from(code.base() as u8);
            output.at += 1;
            return Ok(None);
        }
        if code.is_end() {
            self.skip(used);
            return Ok(Some(self.end_block()));
        }
        if code.is_special() {
            return Err(BAD_CODE);
        }
        let length = code.value(self.bits >> before);
        let (code, before) = look_up(&self.distance_table, DISTANCE_BITS, self.bits >> used);
        let before = used + before;
        if before + code.bits() > self.count {
            return Ok(Some(Stop::NoInput));
        }
        if code.is_special() {
            return Err(BAD_CODE);
        }
        let distance = code.value(self.bits >> before);
        if distance > output.at - output.floor {
            return Err(BAD_DISTANCE);
        }
        self.skip(before + code.bits());
        self.rest = (length, distance);
        Ok(None)
    }

    /// Takes whole bytes while there is space for them: 56 bits if there are as many.
    pub(super) fn refill(&mut self, input: &mut Input<'_>) {
        while self.count < 56
            && let Some(byte) = input.bytes.get(input.taken)
        {
            self.bits |= u64::from(*byte) << self.count;
            self.count += 8;
            input.taken += 1;
        }
    }

    /// Takes and uses `count` bits, at most 32; nothing if there are not as many.
    pub(super) fn take(&mut self, input: &mut Input<'_>, count: u32) -> Option<u64> {
        self.refill(input);
        let bits = self.bits & ((1 << count) - 1);
        (self.count >= count).then(|| {
            self.skip(count);
            bits
        })
    }

    pub(super) fn skip(&mut self, count: u32) {
        self.bits >>= count;
        self.count -= count;
    }
}

#[inline(always)]
fn first(table: &[Code], bits: u64) -> Code {
    table[bits as usize & ((1 << LITERAL_BITS) - 1)]
}
