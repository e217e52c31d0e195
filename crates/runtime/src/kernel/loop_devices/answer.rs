//! Answers the kernel's requests about blobs.

use std::{
    os::unix::fs::FileExt as _,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, atomic::Ordering},
};

use lazuli_image::Decoded;
use rustix::io::Errno;
use tracing::{debug, error};

use super::{
    super::{
        errno::errno,
        fuse::{
            connection::{Answer, Connection},
            journal::Slot,
        },
    },
    abi::{self, BlobRequest},
    disk::{Disk, Shared},
};

/// Reads that the kernel may have in flight. There are some slots more in the journal, for other
/// requests.
const READS: u16 = 4000;

impl Answer for Shared {
    fn answer(
        self: &Arc<Self>,
        connection: &Arc<Connection>,
        slot: Slot,
        reply: &mut [u8],
    ) -> Option<Slot> {
        let request = slot.request();
        let Ok((number, node)) = abi::numbers(&request) else { return Some(slot) };
        let pending = Pending { connection: connection.clone(), slot: Some(slot), number };
        let answer = || match abi::parse(&request) {
            Ok(BlobRequest::Read { offset, size }) => {
                self.read(pending, node, (offset, size), reply)
            }
            Ok(request) => self.tell(pending, node, request),
            Err(error) => {
                error!("{}: request {number}: {error}", connection.name());
                pending.refuse(Errno::IO)
            }
        };
        // A panic drops the pending request, which answers it; the thread has no slot any more
        // then.
        catch_unwind(AssertUnwindSafe(answer)).unwrap_or_default()
    }
}

impl Shared {
    fn tell(&self, pending: Pending, node: u64, request: BlobRequest<'_>) -> Option<Slot> {
        let size = |node| match node {
            abi::ROOT => Some(0),
            node => self.disks.get(node).map(|disk| disk.blob.file_size()),
        };
        let body = match request {
            BlobRequest::Init { flags, readahead } => abi::init(flags, readahead, READS),
            BlobRequest::Lookup(name) => match self.disks.named(name) {
                Some(disk) => abi::entry(disk.identity.node, disk.blob.file_size()),
                None => return pending.refuse(Errno::NOENT),
            },
            BlobRequest::Attributes => match size(node) {
                Some(size) => abi::attributes(node, size),
                None => return pending.refuse(Errno::NOENT),
            },
            BlobRequest::Space => abi::space(),
            BlobRequest::List => Vec::new(),
            BlobRequest::Note => return pending.forget(),
            // ENOSYS makes the kernel stop sending optional requests.
            BlobRequest::Read { .. } | BlobRequest::Other => return pending.refuse(Errno::NOSYS),
        };
        pending.reply(&body)
    }

    fn read(
        self: &Arc<Self>,
        pending: Pending,
        node: u64,
        (offset, size): (u64, u32),
        reply: &mut [u8],
    ) -> Option<Slot> {
        let Some(disk) = self.disks.get(node) else {
            debug!(node, "a read of a blob that nothing uses");
            return pending.refuse(Errno::IO);
        };
        disk.requests.fetch_add(1, Ordering::Relaxed);
        let range = disk.range(offset, size);
        if disk.blob.is_ready(&range) {
            return pending.send(&disk, range.start, &mut reply[..len(&range)]);
        }
        if !disk.fetches.load(Ordering::Acquire) {
            return pending.refuse(Errno::IO);
        }
        // No thread waits for the network: a blob with a hanging registry occupies slots, no more
        // than its loop device has reads in flight.
        self.runtime.spawn(async move {
            if let Err(error) = disk.blob.ensure(range.clone()).await {
                disk.blob.report_failed_read(&range, &error, None);
                pending.refuse(errno(&error));
                return;
            }
            let copy = move || drop(pending.send(&disk, range.start, &mut vec![0; len(&range)]));
            // Ends with the process at the latest.
            drop(tokio::task::spawn_blocking(copy));
        });
        None
    }
}

fn len(range: &std::ops::Range<Decoded>) -> usize {
    (range.end.0 - range.start.0) as usize
}

/// A request whose reader waits. Dropping it answers with an error.
struct Pending {
    connection: Arc<Connection>,
    /// `None` after the answer.
    slot: Option<Slot>,
    number: u64,
}

impl Pending {
    /// Answers with bytes of the blob, which are in its file.
    fn send(self, disk: &Disk, from: Decoded, bytes: &mut [u8]) -> Option<Slot> {
        match disk.blob.file().read_exact_at(bytes, from.0) {
            Ok(()) => self.reply(bytes),
            Err(error) => {
                error!(path = %disk.blob.path().display(), %error, "cannot read");
                self.refuse(Errno::IO)
            }
        }
    }

    fn reply(mut self, body: &[u8]) -> Option<Slot> {
        if let Err(error) = self.connection.reply(self.number, body) {
            let name = self.connection.name();
            debug!("{name}: request {}: the kernel does not take the answer: {error}", self.number);
        }
        self.answered()
    }

    fn refuse(mut self, error: Errno) -> Option<Slot> {
        self.connection.refuse(self.number, error);
        self.answered()
    }

    /// Ends a request without an answer.
    fn forget(mut self) -> Option<Slot> {
        self.answered()
    }

    fn answered(&mut self) -> Option<Slot> {
        let mut slot = self.slot.take()?;
        self.connection.answered(&mut slot);
        Some(slot)
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if let Some(mut slot) = self.slot.take() {
            error!("{}: request {}: given up", self.connection.name(), self.number);
            self.connection.refuse(self.number, Errno::IO);
            self.connection.answered(&mut slot);
        }
    }
}
