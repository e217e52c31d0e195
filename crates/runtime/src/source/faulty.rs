//! A source that fails as told.

use std::{
    collections::VecDeque,
    io,
    ops::Range,
    sync::{Arc, Mutex},
    time::Duration,
};

use async_trait::async_trait;
use bytes::Bytes;
use lazuli_image::Stored;

use lazuli_registry::{Health, Urgency};

use super::{BlobSource, Progress, SourceError};

/// The fault of one read.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fault {
    /// Nothing.
    None,
    /// It fails and may be repeated.
    Transient,
    /// It fails, and the source asks for a pause.
    Busy(Duration),
    /// It fails permanently.
    Final,
    /// It never ends.
    Hang,
    /// One bit of the result is flipped.
    Flip,
    /// The last byte is missing, against the contract.
    Short,
    /// A byte comes each second, for ever.
    Drip,
    /// The source refers the caller to other sources.
    AskOthers,
    /// It takes this long.
    Slow(Duration),
}

/// Wraps a source, counts reads and injects faults into the first ones.
#[derive(Debug)]
pub(crate) struct Faulty {
    inner: Box<dyn BlobSource>,
    faults: Mutex<VecDeque<Fault>>,
    ranges: Mutex<Vec<Range<Stored>>>,
    server: Option<Arc<Health>>,
}

impl Faulty {
    pub(crate) fn new(
        inner: impl BlobSource + 'static,
        faults: impl IntoIterator<Item = Fault>,
    ) -> Self {
        Faulty {
            inner: Box::new(inner),
            faults: Mutex::new(faults.into_iter().collect()),
            ranges: Mutex::default(),
            server: None,
        }
    }

    /// The same at a server.
    pub(crate) fn at(self, server: &Arc<Health>) -> Self {
        Faulty { server: Some(server.clone()), ..self }
    }

    /// Number of reads so far, including empty and failed ones.
    pub(crate) fn reads(&self) -> usize {
        self.ranges.lock().unwrap().len()
    }

    /// The ranges read so far, in order.
    pub(crate) fn ranges(&self) -> Vec<Range<Stored>> {
        self.ranges.lock().unwrap().clone()
    }

    /// Sets the faults of the next reads.
    pub(crate) fn plan(&self, faults: impl IntoIterator<Item = Fault>) {
        *self.faults.lock().unwrap() = faults.into_iter().collect();
    }
}

#[async_trait]
impl BlobSource for Faulty {
    async fn read(
        &self,
        range: Range<Stored>,
        arrived: Progress<'_>,
    ) -> Result<Bytes, SourceError> {
        let fault = self.faults.lock().unwrap().pop_front().unwrap_or(Fault::None);
        self.ranges.lock().unwrap().push(range.clone());
        let failed = |transient, retry_after| SourceError::Failed {
            transient,
            retry_after,
            source: Arc::new(io::Error::other("told to fail")),
        };
        match fault {
            Fault::Transient => return Err(failed(true, None)),
            Fault::Busy(time) => return Err(failed(true, Some(time))),
            Fault::Final => return Err(failed(false, None)),
            Fault::Hang => std::future::pending().await,
            Fault::Slow(time) => tokio::time::sleep(time).await,
            Fault::Drip => loop {
                tokio::time::sleep(Duration::from_secs(1)).await;
                arrived(1);
            },
            Fault::None | Fault::AskOthers | Fault::Flip | Fault::Short => {}
        }
        let mut bytes = self.inner.read(range, arrived).await?.to_vec();
        match fault {
            Fault::Flip => {
                let middle = bytes.len() / 2;
                bytes[middle] ^= 0x10;
            }
            Fault::Short => drop(bytes.pop()),
            _ => {}
        }
        Ok(bytes.into())
    }

    fn describe(&self) -> String {
        self.inner.describe()
    }

    async fn suits(&self, _: &Range<Stored>, _: Urgency) -> bool {
        let mut faults = self.faults.lock().unwrap();
        let suits = !matches!(faults.front(), Some(Fault::AskOthers));
        if !suits {
            faults.pop_front();
        }
        suits
    }

    fn server_health(&self) -> Option<&Arc<Health>> {
        self.server.as_ref()
    }
}
