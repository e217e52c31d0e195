//! Reads layers as they are stored, from their registries.

use std::{io, ops::Range};

use bytes::Bytes;
use lazuli_image::Stored;
use lazuli_registry::ImageName;

use super::held::HeldLayer;
use crate::daemon::{DaemonError, images::Images};

/// Bytes of a request: the kernel reads a file in pieces of 128 KiB, each of which would cost a
/// round trip.
const STEP: u64 = 4 << 20;

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
                window.set(layer.layer, start, bytes.clone());
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
