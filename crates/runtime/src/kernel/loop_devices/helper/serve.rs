//! The helper's event loop.

use std::{
    collections::HashMap,
    fs::File,
    io::{self, Read as _},
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::fs::OpenOptionsExt as _,
    },
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
};

use lazuli_sys::loop_device::LoopDevice;
use rustix::{
    fs::{Mode, OFlags, openat},
    io::Errno,
};

use super::wire::{Answer, BLOCK, Order, receive, send};

/// Bytes of the largest file that is read.
const CONTENT: u64 = 1024;

type OpenDescriptors = Arc<Mutex<HashMap<u64, OwnedFd>>>;

/// The life of the helper of a state directory. Its predecessor may have an order to carry out yet.
pub fn run(root: &Path, orders: OwnedFd) -> io::Result<()> {
    let mut options = File::options();
    let lock = options.write(true).create(true).truncate(false).mode(0o600);
    let lock = lock.open(root.join("helper.lock"))?;
    lock.lock()?;
    serve(orders)
}

/// Carries out the orders that arrive at `orders`, each in a thread, until its other end is closed.
/// The process is to end then, whatever its threads wait for.
pub(super) fn serve(orders: OwnedFd) -> io::Result<()> {
    let held = OpenDescriptors::default();
    while let Some((order, mut descriptors)) = receive::<Order>(&orders)? {
        // The first descriptor is the socket for the answer.
        if descriptors.is_empty() {
            continue;
        }
        let answers = descriptors.remove(0);
        match order {
            Order::Hold { id } => {
                held.lock_all().extend(descriptors.pop().map(|descriptor| (id, descriptor)));
                tell(&answers, &Answer::Done, None);
            }
            order => {
                let held = held.clone();
                thread::Builder::new().name("order".to_owned()).spawn(move || {
                    match carry_out(order, descriptors, &held) {
                        Ok((answer, file)) => tell(&answers, &answer, file.as_ref()),
                        Err(error) => {
                            let code = error.raw_os_error().unwrap_or(Errno::IO.raw_os_error());
                            tell(&answers, &Answer::Failed(code), None);
                        }
                    }
                })?;
            }
        }
    }
    Ok(())
}

fn tell(to: &OwnedFd, answer: &Answer, file: Option<&OwnedFd>) {
    let file = file.map(|file| file.as_fd());
    // The worker may be gone, and its successor asks again.
    let _ = send(to.as_fd(), answer, file.as_slice());
}

fn carry_out(
    order: Order,
    descriptors: Vec<OwnedFd>,
    held: &OpenDescriptors,
) -> io::Result<(Answer, Option<OwnedFd>)> {
    let mut descriptors = descriptors.into_iter();
    let mut next = || descriptors.next().ok_or(io::ErrorKind::InvalidInput);
    Ok(match order {
        Order::Open { name } => (Answer::Done, Some(open(next()?, &name)?)),
        Order::Attach { name, label } => {
            let device = LoopDevice::attach(open(next()?, &name)?.as_fd(), &label, BLOCK)?;
            let number = device.number();
            (Answer::Disk(number), Some(device.as_fd().try_clone_to_owned()?))
        }
        Order::Change { name } => {
            let (device, file) = (LoopDevice::from_file(next()?.into(), 0), next()?);
            let file = match name {
                Some(name) => open(file, &name)?,
                None => file,
            };
            device.change(file.as_fd())?;
            (Answer::Done, None)
        }
        Order::Read { name } => {
            let mut content = Vec::new();
            File::from(open(next()?, &name)?).take(CONTENT).read_to_end(&mut content)?;
            (Answer::Content(content), None)
        }
        Order::Wait | Order::Hold { .. } => (Answer::Done, None),
        Order::Release { id } => {
            let descriptor = held.lock_all().remove(&id);
            // For the last descriptor of a file system, the kernel shuts it down here, and waits
            // for reads in progress.
            drop(descriptor);
            (Answer::Done, None)
        }
    })
}

fn open(directory: OwnedFd, name: &str) -> io::Result<OwnedFd> {
    Ok(openat(directory, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
}

trait LockAll<T> {
    /// Locks data that is consistent at every moment, even if a holder panicked.
    fn lock_all(&self) -> MutexGuard<'_, T>;
}

impl<T> LockAll<T> for Mutex<T> {
    fn lock_all(&self) -> MutexGuard<'_, T> {
        self.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
