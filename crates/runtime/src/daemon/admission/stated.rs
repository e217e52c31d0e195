//! Indexes that a trusted key has stated, as they were found for an earlier start.

use lazuli_policy::SignedIndex;
use lazuli_registry::{ImageName, Manifest};

/// The node's memory of them.
pub(in crate::daemon) trait StatedIndexes {
    /// The index of `image` that was found for `name` or another one, if the present policy trusts
    /// its statement for this one.
    fn recall_index(&self, name: &ImageName, image: &Manifest) -> Option<SignedIndex>;

    /// Remembers an index of `image`.
    fn remember_index(&self, image: &Manifest, found: &SignedIndex);
}
