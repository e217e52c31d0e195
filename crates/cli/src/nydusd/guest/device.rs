//! The device of virtio-fs, which a virtual machine monitor reaches by vhost-user.
//!
//! The guest is hostile: the libraries bound what its queues say by the memory that it has.

use std::{
    io,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use anyhow::{Context as _, Result, anyhow};
use fuse_backend_rs::{
    api::{Vfs, server::Server},
    transport::{Reader, VirtioFsWriter},
};
use tokio::runtime::Handle;
use vhost::vhost_user::{Listener, VhostUserProtocolFeatures, VhostUserVirtioFeatures};
use vhost_user_backend::{VhostUserBackend, VhostUserDaemon, VringMutex, VringT};
use virtio_bindings::{
    virtio_config::VIRTIO_F_VERSION_1,
    virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC},
};
use virtio_queue::{DescriptorChain, QueueOwnedT as _, QueueT as _};
use vm_memory::{GuestAddressSpace as _, GuestMemoryAtomic, GuestMemoryLoadGuard, GuestMemoryMmap};
use vmm_sys_util::{
    epoll::EventSet,
    event::{EventConsumer, EventFlag, EventNotifier, new_event_consumer_and_notifier},
};

use super::Share;

type Memory = GuestMemoryAtomic<GuestMemoryMmap>;
type Chain = DescriptorChain<GuestMemoryLoadGuard<GuestMemoryMmap>>;

/// Urgent requests and all others. A monitor may set up fewer descriptors for each.
const QUEUES: usize = 2;
const QUEUE_SIZE: usize = 1024;

/// Requests that are answered at a time.
const THREADS: usize = 64;

/// A socket at which a monitor will connect.
pub(in crate::nydusd) struct Socket(Listener);

impl Socket {
    /// Listens at a path, where a process that died may have left its socket.
    pub(in crate::nydusd) fn listen(path: &Path) -> Result<Self> {
        let listener = Listener::new(path, true);
        let listener = listener.map_err(|error| anyhow!("{error}"));
        Ok(Socket(listener.with_context(|| format!("cannot listen at {}", path.display()))?))
    }

    /// Serves the first monitor that connects until it is gone. Each request is answered on a
    /// thread of its own, [`THREADS`] at most: one that waits for a registry holds up no other.
    pub(in crate::nydusd) fn serve(mut self, share: &Share) -> Result<()> {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        let pool = builder.worker_threads(1).max_blocking_threads(THREADS).build()?;
        let memory = Memory::new(GuestMemoryMmap::new());
        let device = Arc::new(Device {
            server: Arc::new(Server::new(share.files())),
            memory: memory.clone(),
            takes_indexes: AtomicBool::new(false),
            in_flight: Arc::new(AtomicUsize::new(0)),
            pool: pool.handle().clone(),
        });
        let failed = |error| anyhow!("the guest cannot be served: {error}");
        let mut daemon =
            VhostUserDaemon::new("virtio-fs".to_owned(), device, memory).map_err(failed)?;
        daemon.start(&mut self.0).map_err(failed)?;
        // Every end of the monitor is as good as any other.
        if let Err(error) = daemon.wait() {
            tracing::debug!(%error, "the monitor is gone");
        }
        // Requests that wait for a registry have no guest any more.
        pool.shutdown_background();
        Ok(())
    }
}

struct Device {
    server: Arc<Server<Arc<Vfs>>>,
    memory: Memory,
    /// Whether the driver says up to which index it wants to be notified.
    takes_indexes: AtomicBool,
    /// Requests that are being answered. A guest has no more than fit into its queues.
    in_flight: Arc<AtomicUsize>,
    pool: Handle,
}

impl VhostUserBackend for Device {
    type Bitmap = ();
    type Vring = VringMutex<Memory>;

    fn num_queues(&self) -> usize {
        QUEUES
    }

    fn max_queue_size(&self) -> usize {
        QUEUE_SIZE
    }

    fn features(&self) -> u64 {
        1 << VIRTIO_F_VERSION_1
            | 1 << VIRTIO_RING_F_INDIRECT_DESC
            | 1 << VIRTIO_RING_F_EVENT_IDX
            | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits()
    }

    fn protocol_features(&self) -> VhostUserProtocolFeatures {
        VhostUserProtocolFeatures::MQ | VhostUserProtocolFeatures::REPLY_ACK
    }

    fn set_event_idx(&self, enabled: bool) {
        self.takes_indexes.store(enabled, Ordering::Relaxed);
    }

    /// The memory is shared with the daemon, which replaces it.
    fn update_memory(&self, _: Memory) -> io::Result<()> {
        Ok(())
    }

    fn exit_event(&self, _: usize) -> Option<(EventConsumer, EventNotifier)> {
        new_event_consumer_and_notifier(EventFlag::NONBLOCK).ok()
    }

    fn handle_event(
        &self,
        queue: u16,
        events: EventSet,
        queues: &[Self::Vring],
        _: usize,
    ) -> io::Result<()> {
        let queue = queues.get(usize::from(queue)).filter(|_| events == EventSet::IN);
        let queue = queue.ok_or_else(|| io::Error::other("an event of no queue"))?;
        if !self.takes_indexes.load(Ordering::Relaxed) {
            return self.take_all(queue);
        }
        // What arrives while notifications are on again is seen here or notified.
        loop {
            queue.disable_notification().map_err(io::Error::other)?;
            self.take_all(queue)?;
            if !queue.enable_notification().map_err(io::Error::other)? {
                return Ok(());
            }
        }
    }
}

impl Device {
    /// Begins to answer every request in a queue.
    fn take_all(&self, queue: &VringMutex<Memory>) -> io::Result<()> {
        let memory = self.memory.memory();
        let requests: Vec<_> = {
            let mut queue = queue.get_mut();
            queue.get_queue_mut().iter(memory).map_err(io::Error::other)?.collect()
        };
        for request in requests {
            if self.in_flight.fetch_add(1, Ordering::Relaxed) >= QUEUES * QUEUE_SIZE {
                return Err(io::Error::other("the guest has more requests than its queues hold"));
            }
            let (server, queue) = (self.server.clone(), queue.clone());
            let in_flight = self.in_flight.clone();
            self.pool.spawn_blocking(move || {
                let at = request.head_index();
                let written = answer(&server, request).unwrap_or_else(|error| {
                    tracing::warn!(error = format!("{error:#}"), "a request of the guest");
                    0
                });
                // Before the guest can put another one in its place.
                in_flight.fetch_sub(1, Ordering::Relaxed);
                if let Err(error) = finish(&queue, at, written) {
                    tracing::warn!(%error, "the guest gets no answer");
                }
            });
        }
        Ok(())
    }
}

/// Answers a request. The result is the number of bytes in the guest's memory that were written.
fn answer(server: &Server<Arc<Vfs>>, request: Chain) -> Result<u32> {
    let memory = request.memory().clone();
    let reader = Reader::from_descriptor_chain(&memory, request.clone())?;
    let writer = VirtioFsWriter::new(&memory, request)?;
    let written = server.handle_message(reader, writer.into(), None, None)?;
    Ok(u32::try_from(written)?)
}

/// Gives a request back to the guest.
fn finish(queue: &VringMutex<Memory>, at: u16, written: u32) -> io::Result<()> {
    // The monitor has stopped it: its memory may be another queue's by now.
    if !queue.get_ref().get_queue().ready() {
        return Ok(());
    }
    queue.add_used(at, written).map_err(io::Error::other)?;
    match queue.needs_notification().map_err(io::Error::other)? {
        true => queue.signal_used_queue(),
        false => Ok(()),
    }
}
