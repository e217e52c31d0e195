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
        let mut bytes = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let start = at - at % STEP;
            let piece = self.piece(layer, start).await?;
            let until = (range.end - start).min(piece.len() as u64);
            let part = piece.get((at - start) as usize..until as usize);
            bytes.extend_from_slice(part.ok_or(io::ErrorKind::UnexpectedEof)?);
            at = start + STEP;
        }
        Ok(bytes.into())
    }

    /// The piece of a layer from `start` on.
    async fn piece(&self, layer: &HeldLayer, start: u64) -> io::Result<Bytes> {
        let window = &self.0.layer_store.window;
        // The kernel reads ahead with several requests for one piece.
        let one = format!("{} of {} as stored", layer.layer, layer.pinned);
        let _one = self.0.admission.fetch_locks.lock(&one).await;
        if let Some(bytes) = window.get(layer, start) {
            return Ok(bytes);
        }
        let end = start.saturating_add(STEP).min(layer.stored_size);
        let read = self.fetch(layer, start..end).await;
        let bytes = read.map_err(|error| io::Error::other(error.for_people()))?;
        window.push(layer, start, bytes.clone());
        Ok(bytes)
    }

    async fn fetch(&self, layer: &HeldLayer, range: Range<u64>) -> Result<Bytes, DaemonError> {
        let name: ImageName = layer.pinned.parse()?;
        let repository = lazuli_registry::open(&name, &self.0.admission.registry)?;
        let range = Stored(range.start)..Stored(range.end);
        Ok(repository.read(&layer.layer, layer.stored_size, range, &|_| {}).await?)
    }
}
