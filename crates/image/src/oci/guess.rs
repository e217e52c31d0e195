//! What a start most likely reads, as the maker of an image guessed.

use std::collections::BTreeMap;

use base64::{Engine as _, engine::general_purpose::STANDARD};

use super::{Manifest, annotation};
use crate::{FormatError, Trace};

/// Maximum bytes of a guess that is noted, before base64: the manifest still arrives in the first
/// round trip of a new connection, which carries ten segments of 1,460 bytes. The rest is left to
/// the node's own guess.
const NOTED_BYTES: usize = 8 << 10;

/// The text of the annotation [`GUESS`](annotation::GUESS): a [`Trace`] in base64, with all chunks
/// that are known at the same time at the same millisecond.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotedGuess(String);

impl NotedGuess {
    /// The annotation for this guess, as much of its beginning as fits; `None` if it has no chunks.
    pub fn of(guess: &Trace) -> Option<Self> {
        let is_empty = guess.touches().is_empty();
        (!is_empty).then(|| NotedGuess(STANDARD.encode(guess.encode_in(NOTED_BYTES))))
    }

    /// The chunks, in the order in which to fetch them.
    ///
    /// # Errors
    /// The text is malformed.
    pub fn decode(&self) -> Result<Trace, FormatError> {
        let malformed = |error| FormatError::new("guess", 0, format!("is not base64: {error}"));
        Trace::decode(&STANDARD.decode(&self.0).map_err(malformed)?)
    }

    /// Puts it into a manifest's annotations.
    pub fn note(&self, annotations: &mut BTreeMap<String, String>) {
        annotations.insert(annotation::GUESS.to_owned(), self.0.clone());
    }
}

impl Manifest {
    /// What a start most likely reads, if the image's maker guessed.
    pub fn guess(&self) -> Option<NotedGuess> {
        self.annotations.get(annotation::GUESS).cloned().map(NotedGuess)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Digest;

    #[test]
    fn a_long_guess_is_cut_to_fit() {
        let blob = Digest::sha256([7; 32]);
        assert_eq!(NotedGuess::of(&Trace::of_start(vec![blob], [])), None);
        // No two of them share a run.
        let every_other = (0..9000).map(|number| (0, 2 * number, 0));
        let long = Trace::of_start(vec![blob], every_other);
        let noted = NotedGuess::of(&long).unwrap();
        let mut annotations = BTreeMap::new();
        noted.note(&mut annotations);
        let text = &annotations[annotation::GUESS];
        assert!((10_000..=11_000).contains(&text.len()), "{}", text.len());
        let read = noted.decode().unwrap();
        let count = read.touches().len();
        assert!(count > 1000 && read.touches() == &long.touches()[..count], "{count}");
    }

    #[test]
    fn a_malformed_annotation_is_an_error() {
        for text in ["", "?", "bGF6dWxpIHRyYWNlIDIK"] {
            NotedGuess(text.to_owned()).decode().unwrap_err();
        }
    }
}
