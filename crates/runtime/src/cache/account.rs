//! Which image is charged for what is done about a blob.
//!
//! Whatever the images of a node share is shared out by account: events that wait, memory for
//! answers, processors, and the disk.

use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex},
};

use lazuli_image::Digest;

use super::{CachedBlob, durable::lock};

/// See the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Account {
    /// The only image in use that has the blob, by its manifest.
    Image(Digest),
    /// A blob that several images have, or that none has opened. No image may use up in its name
    /// what another one needs for its other blobs.
    Shared(Digest),
}

/// The images in use that have a blob, with how often each has it open.
#[derive(Debug, Default)]
pub(super) struct Owners(Mutex<HashMap<Digest, usize>>);

/// Names an image that has a blob, as long as it lives.
pub struct Owner {
    blob: Arc<CachedBlob>,
    image: Digest,
}

impl CachedBlob {
    /// Charges the image with this manifest for the blob, until the result is dropped.
    #[must_use]
    pub fn owned_by(self: &Arc<Self>, image: Digest) -> Owner {
        *lock(&self.owners.0).entry(image).or_default() += 1;
        Owner { blob: self.clone(), image }
    }

    /// Who is charged at this moment.
    pub fn account(&self) -> Account {
        let owners = lock(&self.owners.0);
        let mut images = owners.keys();
        match (images.next(), images.next()) {
            (Some(image), None) => Account::Image(*image),
            _ => Account::Shared(self.id()),
        }
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let mut owners = lock(&self.blob.owners.0);
        if let Some(count) = owners.get_mut(&self.image) {
            *count -= 1;
            if *count == 0 {
                owners.remove(&self.image);
            }
        }
    }
}

impl fmt::Debug for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Owner({} of {})", self.image, self.blob.id())
    }
}
