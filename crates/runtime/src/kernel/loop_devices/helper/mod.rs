//! A process that makes system calls which wait for the worker's own answers.
//!
//! Opening a blob's file, or detaching it, sends the worker a FUSE request. A thread of the worker
//! that makes the call and is killed meanwhile would wait for an answer that only the next worker
//! can give, while the next worker cannot begin before all threads of this one have ended. So
//! another process makes these calls. When the worker ends, it ends as soon as its call is
//! answered. It holds a lock while it lives, so that a state directory has a single active helper.

mod serve;
mod wire;

use std::{
    collections::HashMap,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    process::Child,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    thread,
};

use lazuli_sys::loop_device::LoopDevice;

pub use self::serve::run;
pub(super) use self::wire::BLOCK;
use self::{
    serve::serve,
    wire::{Answer, Order},
};
use crate::{
    keeper::{Link, Role},
    sync::lock,
};

/// The worker's end of it. Every call blocks.
pub(super) struct Helper {
    link: Arc<Link>,
    inner: Mutex<Inner>,
    next: AtomicU64,
    /// Number of descriptors that the helper was told to close and has not closed yet.
    releasing: AtomicUsize,
}

#[derive(Default)]
struct Inner {
    process: Option<(OwnedFd, Option<Child>)>,
    /// Descriptors that it holds. The worker has them too, for the next helper if this one dies.
    held: HashMap<u64, Arc<OwnedFd>>,
}

impl Helper {
    /// A helper that is started on the first call.
    pub(super) fn new(link: &Arc<Link>) -> Arc<Self> {
        let (inner, next, releasing) = Default::default();
        Arc::new(Helper { link: link.clone(), inner, next, releasing })
    }

    /// Returns when the helper of an earlier worker is gone.
    pub(super) fn wait_for_others(&self) -> io::Result<()> {
        self.ask(&Order::Wait, &[]).map(drop)
    }

    /// Opens a file or directory in `directory`.
    pub(super) fn open(&self, directory: BorrowedFd<'_>, name: &str) -> io::Result<OwnedFd> {
        let order = Order::Open { name: name.to_owned() };
        self.ask(&order, &[directory])?.1.ok_or_else(lost)
    }

    /// Shows the file `name` in `directory` as a disk.
    pub(super) fn attach(
        &self,
        directory: BorrowedFd<'_>,
        name: &str,
        label: &str,
    ) -> io::Result<LoopDevice> {
        let order = Order::Attach { name: name.to_owned(), label: label.to_owned() };
        match self.ask(&order, &[directory])? {
            (Answer::Disk(number), Some(device)) => {
                Ok(LoopDevice::from_file(device.into(), number))
            }
            _ => Err(lost()),
        }
    }

    /// Makes `file` the backing file of the disk, or the file `name` in this directory.
    pub(super) fn change(
        &self,
        disk: &LoopDevice,
        file: BorrowedFd<'_>,
        name: Option<&str>,
    ) -> io::Result<()> {
        let order = Order::Change { name: name.map(str::to_owned) };
        self.ask(&order, &[disk.as_fd(), file]).map(drop)
    }

    /// Reads a small file in `directory`.
    pub(super) fn read(&self, directory: BorrowedFd<'_>, name: &str) -> io::Result<Vec<u8>> {
        match self.ask(&Order::Read { name: name.to_owned() }, &[directory])?.0 {
            Answer::Content(content) => Ok(content),
            _ => Err(lost()),
        }
    }

    /// Makes the helper keep a descriptor open, so that it and not the worker closes it last.
    pub(super) fn hold(self: &Arc<Self>, descriptor: BorrowedFd<'_>) -> io::Result<HeldDescriptor> {
        let descriptor = Arc::new(descriptor.try_clone_to_owned()?);
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        self.ask(&Order::Hold { id }, &[descriptor.as_fd()])?;
        self.lock().held.insert(id, descriptor);
        Ok(HeldDescriptor { helper: self.clone(), id })
    }

    /// Returns whether the helper still has descriptors to close. For the last one of a file
    /// system, closing takes the kernel as long as it needs to drop the names in memory.
    pub(super) fn is_releasing(&self) -> bool {
        self.releasing.load(Ordering::Acquire) > 0
    }

    /// Sends an order, to a new helper if this one has died.
    fn ask(
        &self,
        order: &Order,
        descriptors: &[BorrowedFd<'_>],
    ) -> io::Result<(Answer, Option<OwnedFd>)> {
        let answers = self.send(order, descriptors).or_else(|_| {
            // It died, perhaps before it was ever asked.
            self.send(order, descriptors)
        })?;
        let (answer, mut files) = wire::receive(&answers)?.ok_or_else(lost)?;
        match answer {
            Answer::Failed(code) => Err(io::Error::from_raw_os_error(code)),
            answer => Ok((answer, files.pop())),
        }
    }

    /// Sends an order; returns where its answer arrives.
    fn send(&self, order: &Order, descriptors: &[BorrowedFd<'_>]) -> io::Result<OwnedFd> {
        let (ours, theirs) = wire::pair()?;
        let mut inner = self.lock();
        let orders = match &inner.process {
            Some((orders, _)) => orders,
            None => {
                let process = self.start(&inner.held)?;
                &inner.process.insert(process).0
            }
        };
        let all: Vec<_> = [theirs.as_fd()].iter().chain(descriptors).copied().collect();
        if let Err(error) = wire::send(orders.as_fd(), order, &all) {
            if let Some((_, Some(mut child))) = inner.process.take() {
                tracing::warn!(%error, "the helper is gone");
                // Its end of the connection is closed, but a thread of it may have to wait for an
                // answer of ours.
                thread::spawn(move || child.wait());
            }
            return Err(error);
        }
        Ok(ours)
    }

    fn start(&self, held: &HashMap<u64, Arc<OwnedFd>>) -> io::Result<(OwnedFd, Option<Child>)> {
        let (ours, theirs) = wire::pair()?;
        let child = match self.link.program(Role::Helper) {
            Some(mut program) => Some(program.stdin(theirs).spawn()?),
            // A process without a keeper dies with everything it has.
            None => {
                thread::Builder::new().name("helper".to_owned()).spawn(move || {
                    if let Err(error) = serve(theirs) {
                        tracing::error!(%error, "the helper ends");
                    }
                })?;
                None
            }
        };
        for (id, descriptor) in held {
            let (_, answers) = wire::pair()?;
            let all = [answers.as_fd(), descriptor.as_fd()];
            wire::send(ours.as_fd(), &Order::Hold { id: *id }, &all)?;
        }
        Ok((ours, child))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        lock(&self.inner)
    }
}

fn lost() -> io::Error {
    io::Error::other("the helper ended before it answered")
}

impl std::fmt::Debug for Helper {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Helper").field("held", &self.lock().held.len()).finish_non_exhaustive()
    }
}

/// A descriptor that the helper closes when this is dropped.
#[derive(Debug)]
#[must_use = "the helper closes the descriptor when this is dropped"]
pub(super) struct HeldDescriptor {
    helper: Arc<Helper>,
    id: u64,
}

impl Drop for HeldDescriptor {
    fn drop(&mut self) {
        let descriptor = self.helper.lock().held.remove(&self.id);
        // Ours first: the helper's is to be the last.
        drop(descriptor);
        self.helper.releasing.fetch_add(1, Ordering::AcqRel);
        let (helper, id) = (self.helper.clone(), self.id);
        let release = move || {
            // Without a helper nothing holds it any more.
            let _ = helper.ask(&Order::Release { id }, &[]);
            helper.releasing.fetch_sub(1, Ordering::AcqRel);
        };
        // Without a thread, the descriptor stays open until the helper ends.
        if let Err(error) = thread::Builder::new().name("release".to_owned()).spawn(release) {
            tracing::warn!(%error, "a file system stays until the daemon ends");
            self.helper.releasing.fetch_sub(1, Ordering::AcqRel);
        }
    }
}
