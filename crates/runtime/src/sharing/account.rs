//! Accounts: which image is charged for work on a blob.

use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex},
};

use lazuli_image::Digest;

use crate::sync::lock;

/// The image, or the shared blob, that work is charged to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Account {
    /// The only image in use that has the blob, by its manifest.
    Image(Digest),
    /// A blob that several images have, or that none has opened. No image may use up another's
    /// resources through a shared blob.
    Shared(Digest),
}

/// The images in use that have a blob, with how often each has it open.
#[derive(Clone, Debug, Default)]
pub(crate) struct Owners(Arc<Mutex<HashMap<Digest, usize>>>);

/// Names an image that has a blob, as long as it lives.
pub struct Owner {
    owners: Owners,
    image: Digest,
}

impl Owners {
    /// Charges the image with this manifest, until the result is dropped.
    pub(crate) fn add(&self, image: Digest) -> Owner {
        *lock(&self.0).entry(image).or_default() += 1;
        Owner { owners: self.clone(), image }
    }

    /// The account that `blob` is charged to at this moment.
    pub(crate) fn account(&self, blob: Digest) -> Account {
        let owners = lock(&self.0);
        let mut images = owners.keys();
        match (images.next(), images.next()) {
            (Some(image), None) => Account::Image(*image),
            _ => Account::Shared(blob),
        }
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let mut owners = lock(&self.owners.0);
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
        write!(f, "Owner({})", self.image)
    }
}
