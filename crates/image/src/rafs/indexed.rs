//! Bootstraps of indexed layers, completed from the indexes.

use super::{Bootstrap, Placed, WrittenIndex, ci_table_of, place_chunks};
use crate::{BlobIndex, FormatError, Points};

/// A bootstrap that has the places of its chunks in indexed layers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IndexedBootstrap {
    /// The metadata file.
    pub bytes: Vec<u8>,
    /// The points at which decoders can begin in gzip layers.
    pub points: Vec<(BlobIndex, Points)>,
}

impl IndexedBootstrap {
    /// Writes into `bytes`, a bootstrap, where its chunks are in `layers`.
    ///
    /// # Errors
    /// The indexes do not go with the bootstrap.
    pub fn new(mut bytes: Vec<u8>, layers: &[WrittenIndex]) -> Result<Self, FormatError> {
        let opened = Bootstrap::open(&bytes[..])?;
        let mut tables = Vec::new();
        for index in opened.unplaced() {
            let blob = &opened.blobs()[usize::from(index.0)];
            let layer = layers.iter().find(|layer| layer.record.blob.id == blob.id);
            if let Some(layer) = layer {
                tables.push((*index, ci_table_of(&layer.bytes, &layer.record.tail)?));
            }
        }
        drop(opened);
        if tables.is_empty() {
            return Ok(IndexedBootstrap { bytes, points: Vec::new() });
        }
        let Placed { at, table, points } = place_chunks(&bytes, &tables)?;
        let at = at as usize;
        bytes[at..at + table.len()].copy_from_slice(&table);
        Ok(IndexedBootstrap { bytes, points })
    }

    /// Opens it.
    ///
    /// # Errors
    /// It breaks the format.
    pub fn open(&self) -> Result<Bootstrap<&[u8]>, FormatError> {
        let mut bootstrap = Bootstrap::open(&self.bytes[..])?;
        for (index, points) in &self.points {
            bootstrap.set_points(*index, points.clone())?;
        }
        Ok(bootstrap)
    }
}
