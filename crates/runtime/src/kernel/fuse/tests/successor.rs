//! Handover: a process leaves requests, the next one answers them.

use std::{
    fs::{self, File},
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
    path::{Path, PathBuf},
    sync::{Arc, Condvar, Mutex, mpsc},
    thread,
    time::Duration,
};

use fuse_backend_rs::{
    api::{filesystem::FileSystem, server::Server},
    transport::{FuseBuf, FuseDevWriter, Reader},
};
use lazuli_testkit::kernel::{Feature, require};
use rustix::{
    fs::Advice,
    io::Errno,
    mount::{UnmountFlags, unmount},
};
use tempfile::TempDir;

use super::{
    super::{
        connection::BUFFER,
        journal::Journal,
        mount::mount_directly,
        probe::can_resend,
        session::{Left, SHAPE},
    },
    FuseError, IMAGE, Link, MountPoint, MountTarget, Session, Suid, filesystem, source_with,
};

const LOOKUP: u32 = 1;
const GETATTR: u32 = 3;
const READ: u32 = 15;
const READDIRPLUS: u32 = 44;

/// How long readers may wait, on the busiest machine.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Ends every request of a mount with an error when it is dropped, and after [`TIMEOUT`]. A process
/// cannot end while one of its threads waits for an answer that only the process itself could give.
struct Abort {
    root: PathBuf,
    _alive: mpsc::Sender<()>,
}

impl Abort {
    fn of(root: &Path) -> Self {
        let (alive, ended) = mpsc::channel();
        let late = root.to_owned();
        thread::spawn(move || {
            if ended.recv_timeout(TIMEOUT) == Err(mpsc::RecvTimeoutError::Timeout) {
                abort(&late);
            }
        });
        Abort { root: root.to_owned(), _alive: alive }
    }
}

impl Drop for Abort {
    fn drop(&mut self) {
        abort(&self.root);
    }
}

fn abort(root: &Path) {
    let _ = unmount(root, UnmountFlags::FORCE | UnmountFlags::DETACH);
}

/// A dead process: its mount, and the requests that it had read and not answered.
struct Predecessor {
    device: File,
    journal: Arc<Journal>,
}

impl Predecessor {
    fn mount(at: &Path) -> Self {
        let device = File::options().read(true).write(true).open("/dev/fuse").unwrap();
        mount_directly(&device, at, "source", Suid::Keep).unwrap();
        Predecessor { device, journal: Journal::create(SHAPE).unwrap() }
    }

    /// Answers requests until it has left `count` with one of these codes unanswered.
    fn serve<F: FileSystem + Sync>(&self, filesystem: F, count: usize, leave: &[u32]) {
        let server = Server::new(filesystem);
        let mut reply = vec![0; BUFFER];
        let mut left = 0;
        while left < count {
            let slot = self.journal.take().unwrap();
            slot.read(self.device.as_fd(), &mut reply).unwrap();
            let mut request = slot.request();
            if leave.contains(&u32::from_ne_bytes(request[4..8].try_into().unwrap())) {
                left += 1;
                continue;
            }
            let reader = Reader::<()>::from_fuse_buffer(FuseBuf::new(&mut request)).unwrap();
            let writer = FuseDevWriter::<()>::new(self.device.as_raw_fd(), &mut reply).unwrap();
            server.handle_message(reader, writer.into(), None, None).unwrap();
            slot.empty();
        }
    }

    /// The descriptors that the keeper has after its end.
    fn left(self) -> Left {
        let journal = self.journal.as_fd().try_clone_to_owned().unwrap();
        Left { connection: OwnedFd::from(self.device), journal: Some(journal) }
    }
}

fn place(mountpoint: &Path) -> MountTarget<'_> {
    MountTarget { mountpoint, key: "test", image: IMAGE, place: MountPoint::Free }
}

/// Files `0`, `1`, … that contain their names.
fn numbered(count: usize) -> TempDir {
    let names: Vec<_> = (0..count).map(|number| number.to_string()).collect();
    let files: Vec<_> = names.iter().map(|name| (name.as_str(), name.as_bytes())).collect();
    source_with(&files)
}

/// Something that threads wait for.
#[derive(Clone, Default)]
struct Gate(Arc<(Mutex<bool>, Condvar)>);

impl Gate {
    fn open(&self) {
        *self.0.0.lock().unwrap() = true;
        self.0.1.notify_all();
    }

    fn wait(&self) {
        drop(self.0.1.wait_while(self.0.0.lock().unwrap(), |open| !*open).unwrap());
    }
}

#[test]
fn a_successor_answers_unanswered_events() {
    const READERS: usize = 12;
    if !require(Feature::Root) || !require(Feature::Fuse) {
        return;
    }
    let source = numbered(READERS);
    for leave in [GETATTR, LOOKUP, READ, READDIRPLUS] {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let predecessor = Predecessor::mount(root);
        let abort = Abort::of(root);
        let readers: Vec<_> = (0..READERS)
            .map(|number| {
                let root = root.to_owned();
                thread::spawn(move || {
                    let content = fs::read(root.join(number.to_string())).unwrap();
                    assert_eq!(content, number.to_string().as_bytes());
                    assert_eq!(fs::read_dir(root).unwrap().count(), READERS);
                })
            })
            .collect();
        // Each of them waits for one request, but a directory is listed by one at a time.
        let count = if leave == READDIRPLUS { 1 } else { READERS };
        predecessor.serve(filesystem(source.path(), |_| Ok(())), count, &[leave]);
        assert!(readers.iter().all(|reader| !reader.is_finished()));
        let image = filesystem(source.path(), |_| Ok(()));
        let session = Session::resume(image, predecessor.left(), place(root), &Link::alone());
        for reader in readers {
            reader.join().unwrap();
        }
        drop((abort, session.unwrap()));
    }
}

#[test]
fn inherited_requests_do_not_delay_others() {
    // More requests than there are slots.
    const FILES: usize = SHAPE.slots + 40;
    if !require(Feature::Root) || !require(Feature::Fuse) {
        return;
    }
    let source = numbered(FILES);
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    let predecessor = Predecessor::mount(root);
    let abort = Abort::of(root);
    let opener = thread::spawn({
        let root = root.to_owned();
        move || {
            let open = |number: usize| {
                let file = File::open(root.join(number.to_string())).unwrap();
                // Has the kernel send a request, and does not wait.
                rustix::fs::fadvise(&file, 0, None, Advice::WillNeed).unwrap();
                file
            };
            (0..FILES).map(open).collect::<Vec<_>>()
        }
    });
    predecessor.serve(filesystem(source.path(), |_| Ok(())), SHAPE.slots, &[READ]);
    let gate = Gate::default();
    let wait = gate.clone();
    let image = filesystem(source.path(), move |_| {
        wait.wait();
        Ok(())
    });
    let session = Session::resume(image, predecessor.left(), place(root), &Link::alone()).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let caught_up = session.caught_up();
    let early = async { tokio::time::timeout(Duration::from_millis(20), caught_up).await };
    assert!(runtime.block_on(early).is_err());
    gate.open();
    let caught_up = session.caught_up();
    runtime.block_on(async { tokio::time::timeout(TIMEOUT, caught_up).await }).unwrap();
    for (number, file) in opener.join().unwrap().into_iter().enumerate() {
        assert_eq!(std::io::read_to_string(file).unwrap(), number.to_string());
    }
    drop((abort, session));
}

/// A mount of a version that had no journal.
#[test]
fn a_mount_without_a_journal_gets_one_where_the_kernel_can_repeat_requests() {
    if !require(Feature::Root) || !require(Feature::Fuse) {
        return;
    }
    let source = numbered(1);
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    let predecessor = Predecessor::mount(root);
    let abort = Abort::of(root);
    let file = root.join("0");
    let reader = thread::spawn(move || fs::read(file));
    predecessor.serve(filesystem(source.path(), |_| Ok(())), 1, &[READ]);
    let left = Left { journal: None, ..predecessor.left() };
    let image = filesystem(source.path(), |_| Ok(()));
    match Session::resume(image, left, place(root), &Link::alone()) {
        Ok(session) => {
            assert!(can_resend().unwrap());
            assert_eq!(reader.join().unwrap().unwrap(), b"0");
            drop((abort, session));
        }
        Err(FuseError::Resume { error, .. }) => {
            assert_eq!(error.raw_os_error(), Some(Errno::INVAL.raw_os_error()));
            assert!(!can_resend().unwrap(), "{error}");
            drop(abort);
            reader.join().unwrap().unwrap_err();
        }
        Err(error) => panic!("{error}"),
    }
}
