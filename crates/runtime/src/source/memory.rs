//! A blob in memory.

use std::ops::Range;

use async_trait::async_trait;
use bytes::Bytes;
use lazuli_image::Stored;

use super::{BlobSource, Progress, SourceError};

/// A blob that is in memory as a whole.
#[derive(Clone, Debug)]
pub struct Memory(Bytes);

impl Memory {
    /// A source of these bytes.
    pub fn new(blob: impl Into<Bytes>) -> Self {
        Memory(blob.into())
    }
}

#[async_trait]
impl BlobSource for Memory {
    async fn read(
        &self,
        range: Range<Stored>,
        arrived: Progress<'_>,
    ) -> Result<Bytes, SourceError> {
        let size = self.0.len();
        let out_of_range = || SourceError::OutOfRange { range: range.clone(), size: size as u64 };
        let start = usize::try_from(range.start.0).map_err(|_| out_of_range())?;
        let end = usize::try_from(range.end.0).map_err(|_| out_of_range())?;
        if start > end || end > size {
            return Err(out_of_range());
        }
        arrived((end - start) as u64);
        Ok(self.0.slice(start..end))
    }

    fn describe(&self) -> String {
        format!("{} bytes of memory", self.0.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::contract;

    #[tokio::test]
    async fn memory_keeps_the_contract_of_a_source() {
        let content = contract::content();
        contract::check(&Memory::new(content.clone()), &content).await;
    }
}
