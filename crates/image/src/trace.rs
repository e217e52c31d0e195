//! Traces: the chunks that starts of an image read, in order.
//!
//! A trace is only a hint: fetched bytes are checked as always, and chunks that the image does not
//! have are ignored. It also records where hot chunks are stored, so that they can be fetched at
//! the same time as the bootstrap. As bytes (integers are LEB128 of at most 32 bits, or 63 where
//! noted):
//!
//! ```text
//! "lazuli trace 1\n"
//! starts                             recorded starts, 1 to 16
//! blobs                              number of blobs, then 32 bytes of SHA-256 for each
//! spans                              number of spans, then for each:
//!   blob                             position in the list above
//!   start                            of the stored bytes; 63 bits
//!   length                           at least 1; 63 bits
//! runs, to the end:
//!   blob                             position in the list above
//!   first chunk                      number, less the one after the blob's last run; zigzag
//!   chunks - 1                       consecutive numbers
//!   milliseconds                     since the run before, from the first touch on
//!   starts                           in which it was touched
//! ```

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    ops::Range,
};

use crate::{
    Algorithm, Digest, FormatError, Stored,
    leb128::{Reader, write},
};

const MAGIC: &[u8] = b"lazuli trace 1\n";

/// Maximum size of an encoded trace, in bytes: 64 KiB as base64, which fits into an annotation of a
/// manifest several times over. Starts of real images need 0.2 to 4 KiB.
pub const MAX_BYTES: usize = 48 << 10;

/// Maximum number of chunks of a trace. At 1 MiB each that is 64 GiB.
pub const MAX_TOUCHES: usize = 1 << 16;

/// Maximum number of blobs of an image, as the format counts them.
const MAX_BLOBS: u32 = 255;

/// Chunk numbers have 24 bits.
const MAX_NUMBER: u32 = (1 << 24) - 1;

/// Starts after which older ones begin to count less.
const MAX_STARTS: u32 = 16;

/// Most spans. Starts of real images have 2 to 40.
pub const MAX_SPANS: usize = 256;

/// Stored bytes of a blob have an offset below this, as files in Linux.
const MAX_STORED: u64 = 1 << 62;

/// A chunk is hot when at least one in this many starts touched it.
const HOT: u32 = 4;

/// One chunk that was touched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Touch {
    /// Position in [`Trace::blobs`].
    pub blob: u8,
    /// [`Chunk::number`](crate::Chunk::number).
    pub number: u32,
    /// Milliseconds from the first touch of the start to this one.
    pub at: u32,
    /// Recorded starts in which it was touched, at least 1.
    pub starts: u32,
}

/// Stored bytes with hot chunks.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Span {
    blob: u8,
    range: Range<u64>,
}

/// The chunks that starts of one image touched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    starts: u32,
    blobs: Vec<Digest>,
    spans: Vec<Span>,
    touches: Vec<Touch>,
}

impl Trace {
    /// A trace of one start from the chunks that it touched, in order: positions in `blobs`, chunk
    /// numbers, and milliseconds. Touches beyond [`MAX_TOUCHES`] are dropped.
    pub fn of_start(blobs: Vec<Digest>, touched: impl IntoIterator<Item = (u8, u32, u32)>) -> Self {
        let touch = |(blob, number, at)| Touch { blob, number, at, starts: 1 };
        let touches = touched.into_iter().take(MAX_TOUCHES).map(touch).collect();
        Trace { starts: 1, blobs, spans: Vec::new(), touches }
    }

    /// Starts that were recorded.
    pub fn starts(&self) -> u32 {
        self.starts
    }

    /// The blobs that [`Touch::blob`] indexes.
    pub fn blobs(&self) -> &[Digest] {
        &self.blobs
    }

    /// All chunks that were touched, the first one first.
    pub fn touches(&self) -> &[Touch] {
        &self.touches
    }

    /// The chunks that the next start will most likely touch: those of at least a quarter of the
    /// starts, in order.
    pub fn hot(&self) -> impl Iterator<Item = (Digest, u32)> {
        self.hot_touches().map(|touch| (self.blobs[usize::from(touch.blob)], touch.number))
    }

    fn hot_touches(&self) -> impl Iterator<Item = &Touch> {
        self.touches.iter().filter(|touch| touch.starts * HOT >= self.starts)
    }

    /// Returns the stored places of hot chunks, as far as they were [located](Trace::locate), in
    /// the order of their first touch.
    pub fn spans(&self) -> impl Iterator<Item = (Digest, Range<Stored>)> {
        let span = |span: &Span| {
            let range = Stored(span.range.start)..Stored(span.range.end);
            (self.blobs[usize::from(span.blob)], range)
        };
        self.spans.iter().map(span)
    }

    /// Records the stored places of hot chunks; `place` looks up a chunk by blob and number. Chunks
    /// with at most `gap` other bytes between them share a span. Chunks touched after [`MAX_SPANS`]
    /// are full are left out.
    pub fn locate(&mut self, gap: u64, place: impl Fn(&Digest, u32) -> Option<Range<Stored>>) {
        let located = self.hot_touches().enumerate().filter_map(|(order, touch)| {
            let range = place(&self.blobs[usize::from(touch.blob)], touch.number)?;
            Some((touch.blob, range.start.0, range.end.0, order))
        });
        let mut located: Vec<_> = located.collect();
        located.sort_unstable();
        let mut spans: Vec<(usize, Span)> = Vec::new();
        for (blob, start, end, order) in located {
            match spans.last_mut() {
                Some((first, last)) if last.blob == blob && start <= last.range.end + gap => {
                    last.range.end = last.range.end.max(end);
                    *first = order.min(*first);
                }
                _ => spans.push((order, Span { blob, range: start..end })),
            }
        }
        spans.sort_by_key(|(first, _)| *first);
        self.spans = spans.into_iter().map(|(_, span)| span).take(MAX_SPANS).collect();
    }

    /// Merges a later start. Chunks of blobs that are not `seen` count as touched again: the kernel
    /// asked nothing about these blobs.
    pub fn merge(&mut self, later: &Trace, seen: impl Fn(&Digest) -> bool) {
        type Times = (u32, u32);
        let mut all: HashMap<(Digest, u32), Times> = HashMap::new();
        for touch in &self.touches {
            let blob = self.blobs[usize::from(touch.blob)];
            let unseen = if seen(&blob) { 0 } else { later.starts };
            all.insert((blob, touch.number), (touch.at, touch.starts + unseen));
        }
        for touch in &later.touches {
            let blob = later.blobs[usize::from(touch.blob)];
            let (at, starts) = all.entry((blob, touch.number)).or_insert((touch.at, 0));
            *at = touch.at.min(*at);
            *starts += touch.starts;
        }
        self.starts += later.starts;
        while self.starts > MAX_STARTS {
            self.starts /= 2;
            all.retain(|_, (_, starts)| {
                *starts /= 2;
                *starts > 0
            });
        }
        for blob in &later.blobs {
            if !self.blobs.contains(blob) && self.blobs.len() < MAX_BLOBS as usize {
                self.blobs.push(*blob);
            }
        }
        let blobs = self.blobs.iter().zip(0..);
        let positions: BTreeMap<_, u8> = blobs.map(|(blob, at)| (*blob, at)).collect();
        let touch = |((blob, number), (at, starts)): ((Digest, u32), Times)| {
            let blob = *positions.get(&blob)?;
            Some(Touch { blob, number, at, starts: starts.min(self.starts) })
        };
        for Span { blob, range } in &later.spans {
            let Some(blob) = positions.get(&later.blobs[usize::from(*blob)]) else { continue };
            let span = Span { blob: *blob, range: range.clone() };
            if self.spans.len() < MAX_SPANS && !self.spans.contains(&span) {
                self.spans.push(span);
            }
        }
        self.touches = all.into_iter().filter_map(touch).collect();
        self.touches.sort_by_key(|touch| (touch.at, touch.blob, touch.number));
        self.touches.truncate(MAX_TOUCHES);
    }

    /// Appends what `other` has and this trace has not, after everything else.
    pub fn append(&mut self, other: &Trace) {
        let mut known: HashSet<_> = self
            .touches
            .iter()
            .map(|touch| (self.blobs[usize::from(touch.blob)], touch.number))
            .collect();
        let last = self.touches.last().map_or(0, |touch| touch.at);
        for touch in &other.touches {
            let blob = other.blobs[usize::from(touch.blob)];
            if self.touches.len() < MAX_TOUCHES
                && known.insert((blob, touch.number))
                && let Some(blob) = self.position(blob)
            {
                self.touches.push(Touch { blob, at: last.saturating_add(touch.at), ..*touch });
            }
        }
        for Span { blob, range } in &other.spans {
            if self.spans.len() < MAX_SPANS
                && let Some(blob) = self.position(other.blobs[usize::from(*blob)])
            {
                self.spans.push(Span { blob, range: range.clone() });
            }
        }
    }

    /// The position of a blob, which is added if there is room.
    fn position(&mut self, blob: Digest) -> Option<u8> {
        let at = self.blobs.iter().position(|known| *known == blob).unwrap_or(self.blobs.len());
        if at == self.blobs.len() {
            (at < MAX_BLOBS as usize).then(|| self.blobs.push(blob))?;
        }
        u8::try_from(at).ok()
    }

    /// Encodes the trace in at most [`MAX_BYTES`] bytes. If it is too long, the touches recorded
    /// last are left out.
    pub fn encode(&self) -> Vec<u8> {
        self.encode_in(MAX_BYTES)
    }

    /// The same in at most `most` bytes, if blobs and spans have no more.
    pub fn encode_in(&self, most: usize) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        write(&mut bytes, self.starts);
        write(&mut bytes, self.blobs.len() as u32);
        self.blobs.iter().for_each(|blob| bytes.extend_from_slice(&blob.hash));
        write(&mut bytes, self.spans.len() as u32);
        for Span { blob, range } in &self.spans {
            write(&mut bytes, *blob);
            write(&mut bytes, range.start);
            write(&mut bytes, range.end - range.start);
        }
        let mut next = vec![0_u32; self.blobs.len()];
        let mut now = 0;
        for run in self.touches.chunk_by(continues) {
            let (first, blob) = (run[0], usize::from(run[0].blob));
            let before = bytes.len();
            write(&mut bytes, first.blob);
            write(&mut bytes, zigzag(first.number.cast_signed() - next[blob].cast_signed()));
            write(&mut bytes, run.len() as u32 - 1);
            write(&mut bytes, first.at.saturating_sub(now));
            write(&mut bytes, first.starts);
            if bytes.len() > most {
                bytes.truncate(before);
                break;
            }
            next[blob] = first.number + run.len() as u32;
            now = first.at;
        }
        bytes
    }

    /// Decodes the output of [`Trace::encode`].
    pub fn decode(bytes: &[u8]) -> Result<Self, FormatError> {
        let mut reader = Reader::new("trace", bytes);
        if bytes.len() > MAX_BYTES {
            let problem = format!("{} bytes, at most {MAX_BYTES} are allowed", bytes.len());
            return Err(reader.error(problem));
        }
        if reader.take(MAGIC.len())? != MAGIC {
            return Err(FormatError::new("trace", 0, "does not begin with `lazuli trace 1`"));
        }
        let starts = reader.number(1, MAX_STARTS, "starts")?;
        let blobs = reader.number(0, MAX_BLOBS, "blobs")?;
        let mut trace = Trace { starts, blobs: Vec::new(), spans: Vec::new(), touches: Vec::new() };
        for _ in 0..blobs {
            let hash = reader.take(32)?.try_into().map_err(|_| reader.error("no digest"))?;
            trace.blobs.push(Digest { algorithm: Algorithm::Sha256, hash });
        }
        for _ in 0..reader.number(0, MAX_SPANS as u32, "spans")? {
            let blob = reader.number(0, blobs.saturating_sub(1), "blob of a span")? as u8;
            if blobs == 0 {
                return Err(reader.error("a span without a blob"));
            }
            let start = reader.long(0, MAX_STORED, "start of a span")?;
            let length = reader.long(1, MAX_STORED - start, "length of a span")?;
            trace.spans.push(Span { blob, range: start..start + length });
        }
        let mut next = vec![0_u32; trace.blobs.len()];
        let mut now = 0_u32;
        while !reader.is_empty() {
            let blob = reader.number(0, blobs.saturating_sub(1), "blob of a run")? as u8;
            if blobs == 0 {
                return Err(reader.error("a run without a blob"));
            }
            let next = &mut next[usize::from(blob)];
            let step = unzigzag(reader.number(0, u32::MAX, "first chunk of a run")?);
            let first = next.checked_add_signed(step).filter(|first| *first <= MAX_NUMBER);
            let first = first.ok_or_else(|| reader.error("the first chunk of a run"))?;
            let more = reader.number(0, MAX_NUMBER - first, "chunks of a run")?;
            let wait = reader.number(0, u32::MAX, "milliseconds of a run")?;
            now = now.checked_add(wait).ok_or_else(|| reader.error("milliseconds of a run"))?;
            let starts = reader.number(1, starts, "starts of a run")?;
            if trace.touches.len() + more as usize >= MAX_TOUCHES {
                return Err(reader.error(format!("more than {MAX_TOUCHES} chunks")));
            }
            let touch = |number| Touch { blob, number, at: now, starts };
            trace.touches.extend((first..=first + more).map(touch));
            *next = first + more + 1;
        }
        Ok(trace)
    }
}

/// Returns whether `b` extends the run that ends with `a`.
fn continues(a: &Touch, b: &Touch) -> bool {
    Touch { number: a.number + 1, ..*a } == *b
}

fn zigzag(number: i32) -> u32 {
    ((number << 1) ^ (number >> 31)).cast_unsigned()
}

fn unzigzag(number: u32) -> i32 {
    (number >> 1).cast_signed() ^ -(number & 1).cast_signed()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn blob(number: u8) -> Digest {
        Digest::sha256([number; 32])
    }

    fn start(touched: &[(u8, u32, u32)]) -> Trace {
        Trace::of_start(vec![blob(0), blob(1)], touched.iter().copied())
    }

    #[test]
    fn an_encoded_run_takes_a_few_bytes() {
        let trace = start(&[(0, 5, 0), (0, 6, 0), (0, 7, 0), (1, 0, 12), (0, 3, 300)]);
        let bytes = trace.encode();
        assert_eq!(bytes.len(), MAGIC.len() + 2 + 64 + 1 + 5 + 5 + 6);
        assert_eq!(Trace::decode(&bytes).unwrap(), trace);
    }

    #[test]
    fn damage_is_named() {
        let good = start(&[(0, 5, 0), (1, 70, 9)]).encode();
        let at = |offset: usize, byte: u8| {
            let mut bytes = good.clone();
            bytes[offset] = byte;
            bytes
        };
        let first = MAGIC.len();
        for (bytes, expected) in [
            (at(0, b'L'), "does not begin"),
            (at(first, 17), "starts: 17, expected 1 to 16"),
            (at(first + 1, 3), "ends too early"),
            (at(first + 66, 1), "length of a span: 0, expected 1 to"),
            (at(first + 67, 2), "blob of a run: 2, expected 0 to 1"),
            (at(first + 68, 1), "the first chunk of a run"),
            (at(first + 71, 2), "starts of a run: 2, expected 1 to 1"),
            (good[..good.len() - 1].to_vec(), "ends too early"),
            (vec![0; MAX_BYTES + 1], "at most"),
            ([&good[..], &[0, 0x80, 0x80, 0x80, 0x80, 0x80]].concat(), "more than 5 bytes"),
            ([&good[..], &[0, 0, 0xff, 0xff, 0xff, 7, 0, 1]].concat(), "chunks of a run"),
            ([&good[..], &[0, 0, 0xff, 0xff, 0x7f, 0, 1]].concat(), "more than 65536 chunks"),
        ] {
            let error = Trace::decode(&bytes).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}, expected {expected}");
        }
    }

    #[test]
    fn chunks_that_most_starts_skip_are_not_hot() {
        let mut trace = start(&[(0, 1, 0), (0, 2, 5), (1, 9, 6)]);
        for _ in 0..3 {
            trace.merge(&start(&[(0, 1, 1), (0, 3, 2)]), |_| true);
        }
        let hot = |trace: &Trace| trace.hot().collect::<Vec<_>>();
        assert_eq!(hot(&trace), [(blob(0), 1), (blob(0), 3), (blob(0), 2), (blob(1), 9)]);
        // Blob 1 was complete and invisible this time.
        trace.merge(&start(&[(0, 1, 0)]), |seen| *seen == blob(0));
        assert_eq!(hot(&trace), [(blob(0), 1), (blob(0), 3), (blob(1), 9)]);
        for _ in 0..100 {
            trace.merge(&start(&[(0, 7, 0)]), |_| true);
        }
        assert!(trace.starts() <= MAX_STARTS);
        assert_eq!(trace.touches().len(), 1);
    }

    #[test]
    fn hot_chunks_are_found_without_a_bootstrap() {
        let touched = [(1, 70, 0), (0, 5, 1), (0, 6, 2), (0, 9, 3), (1, 71, 4), (0, 1, 5)];
        let mut trace = start(&touched);
        // Chunks of 1000 bytes, but the ninth is far away, and the 71st is unknown.
        trace.locate(10_000, |_, number| {
            let at = u64::from(number) * 1000 + if number == 9 { 20_000 } else { 0 };
            (number != 71).then(|| Stored(at)..Stored(at + 1000))
        });
        let expected = [
            (blob(1), Stored(70_000)..Stored(71_000)),
            (blob(0), Stored(1000)..Stored(7000)),
            (blob(0), Stored(29_000)..Stored(30_000)),
        ];
        let trace = Trace::decode(&trace.encode()).unwrap();
        assert_eq!(trace.spans().collect::<Vec<_>>(), expected);

        let mut both = start(&[(0, 5, 0)]);
        both.merge(&trace, |_| true);
        both.merge(&trace, |_| true);
        assert_eq!(both.spans().collect::<Vec<_>>(), expected);
        both.locate(0, |_, _| None);
        assert_eq!(both.spans().count(), 0);
    }

    #[test]
    fn an_appended_trace_comes_after_everything_else() {
        let mut trace = Trace::of_start(vec![blob(0), blob(1)], [(0, 7, 0), (1, 3, 2)]);
        let mut other = Trace::of_start(vec![blob(2), blob(1)], [(1, 3, 0), (0, 5, 1), (1, 4, 1)]);
        other.locate(0, |_, number| {
            let start = u64::from(number) * 100;
            (number == 5).then_some(Stored(start)..Stored(start + 100))
        });
        trace.append(&other);
        let hot: Vec<_> = trace.hot().collect();
        assert_eq!(hot, [(blob(0), 7), (blob(1), 3), (blob(2), 5), (blob(1), 4)]);
        assert_eq!(trace.spans().collect::<Vec<_>>(), [(blob(2), Stored(500)..Stored(600))]);
        assert_eq!(Trace::decode(&trace.encode()).unwrap(), trace);
    }

    proptest! {
        #[test]
        fn a_decoded_trace_is_what_was_encoded(
            mut touched in prop::collection::vec((0_u8..2, 0..=MAX_NUMBER, any::<u32>()), 0..200),
        ) {
            touched.sort_by_key(|touch| touch.2);
            let trace = start(&touched);
            prop_assert_eq!(Trace::decode(&trace.encode()).unwrap(), trace);
        }

        #[test]
        fn a_long_trace_is_cut_to_fit(step in 1_u32..4, count in 1_usize..80_000) {
            let touched = (0..count as u32).map(|n| (0, n * step % (MAX_NUMBER + 1), n));
            let trace = Trace::of_start(vec![blob(0)], touched);
            let read = Trace::decode(&trace.encode()).unwrap();
            prop_assert_eq!(read.touches(), &trace.touches()[..read.touches().len()]);
            prop_assert!(read.touches().len() >= 5000.min(count));
        }

        #[test]
        fn no_bytes_make_decoding_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = Trace::decode(&[MAGIC, &bytes].concat());
        }
    }
}
