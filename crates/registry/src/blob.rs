//! Transfers of whole blobs.

use std::{
    fmt,
    io::{self, Read},
    path::PathBuf,
    pin::Pin,
    task::{Context, Poll, ready},
};

use lazuli_image::{Digest, digest::Hasher};
use tokio::{
    io::{AsyncRead, ReadBuf},
    sync::watch,
};
use tokio_util::io::SyncIoBridge;

use crate::error::RegistryError;

/// How far a blob has grown in its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Growth {
    /// The file begins with this many bytes of the blob.
    Bytes(u64),
    /// The file is the blob, with this digest and size.
    Whole(Digest, u64),
    /// The blob is not wanted any more.
    GivenUp,
}

/// A blob that grows in a file while it is pushed. Dropping the other end of `growth` before the
/// push is over gives it up, too.
#[derive(Clone, Debug)]
pub struct Growing {
    /// The file.
    pub file: PathBuf,
    /// Its progress.
    pub growth: watch::Receiver<Growth>,
}

impl Growing {
    /// Waits until the blob is whole, or has more than `bytes` bytes.
    ///
    /// # Errors
    /// It was given up, also when it has more.
    pub(crate) async fn beyond(&self, bytes: u64) -> Result<Growth, RegistryError> {
        let mut growth = self.growth.clone();
        let there = |growth: &Growth| !matches!(growth, Growth::Bytes(there) if *there <= bytes);
        let grown = async { growth.wait_for(there).await.map(|growth| *growth) };
        tokio::select! {
            biased;
            error = self.given_up() => Err(error),
            grown = grown => match grown {
                Ok(growth) if growth != Growth::GivenUp => Ok(growth),
                _ => Err(self.given_up().await),
            },
        }
    }

    /// Waits until the blob is given up, and returns that as an error.
    pub(crate) async fn given_up(&self) -> RegistryError {
        let mut growth = self.growth.clone();
        let _ = growth.wait_for(|growth| *growth == Growth::GivenUp).await;
        RegistryError::io(&self.file, io::Error::other("the rest of the blob was never written"))
    }
}

/// Why bytes are fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Urgency {
    /// A reader waits for them.
    Demand,
    /// Ahead of any reader.
    Prefetch,
}

/// The outcome of a push.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pushed {
    /// The place had the blob.
    Existed,
    /// The registry linked it from another of its repositories.
    Mounted,
    /// This many bytes were sent; more than the blob's size if parts were sent again.
    Uploaded(u64),
}

/// Called with the number of further bytes that are done. For a push they add up to the blob's
/// size, also if nothing was sent; for a successful read to that of the range, part by part as they
/// arrive.
pub type Progress<'a> = &'a (dyn Fn(u64) + Send + Sync);

/// A blob, read from its beginning and checked on the way.
///
/// The end of file is only reported after size and digest were found right; else the read that
/// reaches the end fails with an [`io::Error`] that wraps a [`RegistryError`]. A caller that uses
/// bytes before the end must be able to undo that.
pub struct BlobReader {
    inner: Pin<Box<dyn AsyncRead + Send>>,
    /// Gone once the end was reached and found right.
    hasher: Option<Hasher>,
    place: String,
    digest: Digest,
    size: u64,
    seen: u64,
}

impl fmt::Debug for BlobReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "BlobReader({} from {}, {} of {} bytes)",
            self.digest, self.place, self.seen, self.size
        )
    }
}

impl BlobReader {
    /// Checks that `inner` yields the `size` bytes of `digest`; `place` is for messages.
    pub(crate) fn new(
        inner: impl AsyncRead + Send + 'static,
        place: &str,
        digest: &Digest,
        size: u64,
    ) -> Self {
        BlobReader {
            inner: Box::pin(inner),
            hasher: Some(digest.algorithm.hasher()),
            place: place.to_owned(),
            digest: *digest,
            size,
            seen: 0,
        }
    }

    fn check_end(&mut self) -> Result<(), RegistryError> {
        let (place, object) = (self.place.clone(), format!("blob {}", self.digest));
        if self.seen != self.size {
            let (expected, got) = (self.size, self.seen);
            return Err(RegistryError::WrongSize { place, object, expected, got });
        }
        let Some(hasher) = self.hasher.take() else { return Ok(()) };
        let got = hasher.finish();
        if got != self.digest {
            return Err(RegistryError::WrongDigest { place, object, expected: self.digest, got });
        }
        Ok(())
    }
}

impl AsyncRead for BlobReader {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if buffer.remaining() == 0 {
            return Poll::Ready(Ok(()));
        }
        let before = buffer.filled().len();
        ready!(self.inner.as_mut().poll_read(context, buffer))?;
        let read = buffer.filled()[before..].len();
        self.seen += read as u64;
        if read == 0 || self.seen > self.size {
            buffer.set_filled(before);
            return Poll::Ready(self.check_end().map_err(io::Error::other));
        }
        if let Some(hasher) = &mut self.hasher {
            hasher.update(&buffer.filled()[before..]);
        }
        Poll::Ready(Ok(()))
    }
}

/// Turns the reader into a blocking one for a synchronous consumer. Reading it on a worker thread
/// of the runtime panics, since it would block the runtime: use a thread of your own or
/// `spawn_blocking`.
pub fn into_blocking(reader: BlobReader, handle: tokio::runtime::Handle) -> impl Read + Send {
    SyncIoBridge::new_with_handle(reader, handle)
}
