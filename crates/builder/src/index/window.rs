//! Which bytes of a window are used.

use lazuli_image::points::{MAX_WINDOW, NewPoint};

use super::inflate::{Inflate, Output, SLACK, Stop};

/// Numbers below stand for bytes, and others for places in the window.
const PLACES: usize = 256;

/// Finds the bytes of windows that the data behind them refers to. Keeps its working memory.
#[derive(Default)]
pub(crate) struct Thinner {
    decoder: Box<Inflate>,
    /// What is decoded, behind the numbers of the window's places.
    numbers: Vec<u16>,
}

impl Thinner {
    /// Reduces `point`'s window to the bytes that `stored` refers to. `stored` decodes to at least
    /// `size` bytes, or to fewer at the end of a member. Unused bytes become zeros, which compress
    /// well; unused bytes at the front are dropped.
    pub(crate) fn used(
        &mut self,
        point: &NewPoint,
        stored: &[u8],
        size: usize,
    ) -> Result<Vec<u8>, &'static str> {
        let window = &point.window[point.window.len().saturating_sub(MAX_WINDOW)..];
        self.numbers.clear();
        // At most 32 Ki places, so that all numbers fit.
        self.numbers.extend((PLACES..PLACES + window.len()).map(|number| number as u16));
        let (start, end) = (window.len(), window.len() + size);
        self.numbers.resize(end + SLACK, 0);
        self.decoder.restart(point.bits, point.before);
        let mut output = Output { buffer: &mut self.numbers, floor: 0, at: start, end };
        let mut rest = stored;
        loop {
            let (stop, taken) = self.decoder.decode(rest, &mut output);
            rest = &rest[taken..];
            match stop? {
                Stop::BlockEnd => {}
                Stop::Full | Stop::NoInput | Stop::End => break,
            }
        }
        let end = output.at;
        let mut thin = vec![0; window.len()];
        let mut first = window.len();
        for number in &self.numbers[start..end] {
            if let Some(place) = usize::from(*number).checked_sub(PLACES) {
                thin[place] = window[place];
                first = first.min(place);
            }
        }
        Ok(thin.split_off(first))
    }
}

#[cfg(test)]
mod tests {
    use flate2::{Compress, Compression, FlushCompress};
    use lazuli_image::Stored;

    use super::*;

    #[test]
    fn a_window_keeps_what_is_copied_from_it_also_by_copies_of_copies() {
        let noise = |seed: u32| {
            (0..600_u32).map(move |n| ((n + seed).wrapping_mul(2_654_435_761) >> 23) as u8 | 1)
        };
        // Noise: nothing in it repeats.
        let unused: Vec<u8> = noise(0).collect();
        let copied: Vec<u8> = noise(5000).collect();
        let window = [&unused[..], &copied, &unused[..100]].concat();
        let rest = [&copied[..400], b"something else", &copied[100..400]].concat();
        let mut raw = Compress::new(Compression::new(9), false);
        let mut compress = |bytes: &[u8], flush| {
            let mut stored = Vec::with_capacity(10_000);
            raw.compress_vec(bytes, &mut stored, flush).unwrap();
            stored
        };
        // The window goes first, and is flushed to a byte.
        compress(&window, FlushCompress::Sync);
        let stored = compress(&rest, FlushCompress::Finish);
        let point = NewPoint { stored: Stored(0), bits: 0, before: 0, window: window.clone() };
        let mut thinner = Thinner::default();
        for _ in 0..2 {
            let thin = thinner.used(&point, &stored, rest.len()).unwrap();
            let mut expected = copied[..400].to_vec();
            expected.resize(700, 0);
            assert_eq!(thin, expected);
        }
        // Less is used of less.
        assert!(thinner.used(&point, &stored, 100).unwrap()[100..].iter().all(|byte| *byte == 0));
        assert!(thinner.used(&point, &[0xff, 0xff], 100).is_err());
    }
}
