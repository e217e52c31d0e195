//! Answers the kernel's FUSE requests.

use std::{
    os::fd::AsRawFd as _,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

use fuse_backend_rs::{
    Error as RequestError,
    api::{filesystem::FileSystem, server::Server},
    transport::{FuseBuf, FuseDevWriter, Reader},
};
use rustix::io::Errno;
use tracing::{debug, error};

use super::{
    connection::{Answer, Connection},
    journal::Slot,
};

/// A file system as the crate serves it.
pub(in crate::kernel) struct FileServer<F: FileSystem + Sync>(pub(in crate::kernel) Server<F>);

/// `FUSE_FORGET`, `FUSE_INTERRUPT` and `FUSE_BATCH_FORGET`, the last of which may be truncated
/// here. Node numbers follow from the image, so nothing is forgotten, and an interrupted reader
/// waits for its answer all the same.
pub(in crate::kernel) const WITHOUT_ANSWER: [u32; 3] = [2, 36, 42];

impl<F: FileSystem + Send + Sync + 'static> Answer for FileServer<F> {
    fn answer(
        self: &Arc<Self>,
        connection: &Arc<Connection>,
        slot: Slot,
        reply: &mut [u8],
    ) -> Option<Slot> {
        self.handle(connection, &mut slot.request(), reply);
        Some(slot)
    }
}

impl<F: FileSystem + Send + Sync> FileServer<F> {
    /// Handles one request. The kernel always gets an answer, since the reader waits for it.
    fn handle(&self, connection: &Connection, request: &mut [u8], reply: &mut [u8]) {
        // struct fuse_in_header: length, opcode, request id; in the byte order of the machine.
        let Some((header, _)) = request.split_first_chunk::<16>() else { return };
        let [_, _, _, _, o, p, q, r, a, b, c, d, e, f, g, h] = *header;
        let (opcode, id) =
            (u32::from_ne_bytes([o, p, q, r]), u64::from_ne_bytes([a, b, c, d, e, f, g, h]));
        if WITHOUT_ANSWER.contains(&opcode) {
            return;
        }
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            // Both constructors only wrap their buffers.
            let reader = Reader::<()>::from_fuse_buffer(FuseBuf::new(request)).ok()?;
            let device = connection.device().as_raw_fd();
            let writer = FuseDevWriter::<()>::new(device, reply).ok()?;
            self.0.handle_message(reader, writer.into(), None, None).err()
        }));
        let name = connection.name();
        match outcome {
            Ok(None) => return,
            // Usually the reader was killed, or the mount is going away.
            Ok(Some(RequestError::EncodeMessage(error))) => {
                debug!("{name}: request {id}: the kernel does not take the answer: {error}");
            }
            Ok(Some(problem)) => error!("{name}: request {id}: {problem}"),
            Err(_) => error!("{name}: request {id}: a panic, see above"),
        }
        connection.refuse(id, Errno::IO);
    }
}
