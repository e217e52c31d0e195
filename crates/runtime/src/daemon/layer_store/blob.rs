//! Reads layers as they are stored, from their registries.

use std::{io, ops::Range, sync::Mutex};

use bytes::Bytes;
use lazuli_image::{Digest, Stored};
use lazuli_registry::ImageName;

use super::held::HeldLayer;
use crate::{
    daemon::{DaemonError, images::Images},
    sync::lock,
};

/// Bytes of a request: the kernel reads a file in pieces of 128 KiB, each of which would cost a
/// round trip.
const STEP: u64 = 4 << 20;

/// The piece of a layer that was read last. Clients read layers from beginning to end.
#[derive(Debug, Default)]
pub(super) struct Window(Mutex<Option<(Digest, u64, Bytes)>>);

impl Window {
    fn get(&self, layer: &Digest, start: u64) -> Option<Bytes> {
        let known = lock(&self.0);
        let (_, _, bytes) = known.as_ref().filter(|it| it.0 == *layer && it.1 == start)?;
        Some(bytes.clone())
    }
}

impl Images {
    /// A part of a layer as stored. Nothing checks it: the client knows the digest of the whole.
    pub(super) async fn read_stored(
        &self,
        layer: &HeldLayer,
        range: Range<u64>,
    ) -> io::Result<Bytes> {
        let window = &self.0.layer_store.window;
        let start = range.start - range.start % STEP;
        let bytes = match window.get(&layer.layer, start) {
            Some(bytes) => bytes,
            None => {
                let end = start.saturating_add(STEP).min(layer.stored_size);
                let read = self.fetch(layer, start..end).await;
                let bytes = read.map_err(|error| io::Error::other(error.for_people()))?;
                *lock(&window.0) = Some((layer.layer, start, bytes.clone()));
                bytes
            }
        };
        let from = ((range.start - start) as usize).min(bytes.len());
        let until = (range.end.saturating_sub(start) as usize).clamp(from, bytes.len());
        Ok(bytes.slice(from..until))
    }

    async fn fetch(&self, layer: &HeldLayer, range: Range<u64>) -> Result<Bytes, DaemonError> {
        let name: ImageName = layer.pinned.parse()?;
        let repository = lazuli_registry::open(&name, &self.0.admission.registry)?;
        let range = Stored(range.start)..Stored(range.end);
        Ok(repository.read(&layer.layer, layer.stored_size, range, &|_| {}).await?)
    }
}
