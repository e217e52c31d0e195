//! The fanotify group that answers pre-content events (Linux 6.14 and later).
//!
//! A pre-content event stops a reader *before* the kernel takes bytes out of a file, so that a
//! listener can put them there first. The constants come from the kernel's
//! `include/uapi/linux/fanotify.h`; the C library does not know the newer ones yet.

use std::{
    io,
    os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd},
};

use rustix::io::Errno;

/// `FAN_PRE_ACCESS`: a read is about to take bytes of the file.
pub const PRE_ACCESS: u64 = 0x0010_0000;

/// `FAN_Q_OVERFLOW`: events were lost.
pub const QUEUE_OVERFLOW: u64 = 0x0000_4000;

/// `FANOTIFY_METADATA_VERSION`, in byte 4 of every event.
pub const METADATA_VERSION: u8 = 3;

/// `FAN_EVENT_INFO_TYPE_RANGE`: the info record with offset and count.
pub const INFO_RANGE: u8 = 6;

/// Bytes of `struct fanotify_event_metadata`.
pub const METADATA_SIZE: usize = 24;

/// Bytes of `struct fanotify_event_info_range`.
pub const INFO_RANGE_SIZE: usize = 24;

/// Size of the read buffer. A pre-content event takes 48 bytes; the kernel puts as many whole
/// events into one read as fit. 88 bytes leave room for a record that a later kernel may add, but
/// never hold two events, so that one slow event does not delay another one read with it.
pub const EVENT_BUFFER: usize = 88;

/// Offset of `fd` in `struct fanotify_event_metadata`.
const FD_OFFSET: usize = 16;

/// `FAN_NOFD`: the event has no descriptor.
const NO_FD: i32 = -1;

/// `FAN_ERRNO_SHIFT`: an error number sits in the top byte of a denial.
const ERRNO_SHIFT: u32 = 24;

/// A fanotify group in class `FAN_CLASS_PRE_CONTENT`. Needs CAP_SYS_ADMIN.
///
/// When the last descriptor of a group closes, the kernel **allows** everything that waits for an
/// answer, and the readers see the holes of the file. Unmount first, then drop the group.
#[derive(Debug)]
pub struct Group(OwnedFd);

/// One event as the kernel wrote it, and the descriptor that came with it.
#[derive(Debug)]
pub struct Incoming {
    buffer: [u8; EVENT_BUFFER],
    len: usize,
    /// The watched file, opened read-only by the kernel so that using it raises no event. `None`
    /// for events about the queue itself.
    pub file: Option<OwnedFd>,
}

impl Incoming {
    /// The bytes of the event.
    pub fn bytes(&self) -> &[u8] {
        &self.buffer[..self.len]
    }
}

/// The answer to a waiting reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Response {
    /// The reader continues with the file's present content.
    Allow,
    /// The read fails with EIO. (EROFS turns every error number into EIO, and all kernels with
    /// pre-content events accept EIO here.)
    Deny,
}

impl Group {
    /// Makes a group with unlimited queue and marks. `FAN_UNLIMITED_QUEUE` is set because a full
    /// queue would let readers through to the holes, `FAN_REPORT_TID` for
    /// [`Group::reports_threads`]. `FAN_REPORT_FD_ERROR` is not set: an event that carries an error
    /// instead of a descriptor cannot be answered, so its reader would wait forever.
    pub fn new() -> io::Result<Self> {
        let flags = libc::FAN_CLASS_PRE_CONTENT
            | libc::FAN_CLOEXEC
            | libc::FAN_NONBLOCK
            | libc::FAN_UNLIMITED_QUEUE
            | libc::FAN_UNLIMITED_MARKS
            | libc::FAN_REPORT_TID;
        let event_flags = libc::O_RDONLY | libc::O_LARGEFILE | libc::O_CLOEXEC;
        // SAFETY: needed because no crate wraps this call with these flags. Sound because it takes
        // two integers and no memory.
        let fd = unsafe { libc::fanotify_init(flags, event_flags.cast_unsigned()) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: needed to own the descriptor. Sound because the kernel has just made it for us
        // and no other owner knows its number.
        Ok(Group(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Returns whether events name the reading thread. The group of another version of this program
    /// may name its process instead.
    pub fn reports_threads(&self) -> io::Result<bool> {
        let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", self.0.as_raw_fd()))?;
        let flags = info.lines().find_map(|line| line.strip_prefix("fanotify flags:"));
        let flags = flags.and_then(|line| line.split_whitespace().next());
        let flags = flags.and_then(|flags| u32::from_str_radix(flags, 16).ok());
        Ok(flags.is_some_and(|flags| flags & libc::FAN_REPORT_TID != 0))
    }

    /// Asks for an event before every read of `file`, also through files that are opened later.
    pub fn mark(&self, file: BorrowedFd<'_>) -> io::Result<()> {
        self.change_mark(libc::FAN_MARK_ADD, file)
    }

    /// Removes a [`Group::mark`]. Events already in the queue stay there and need an answer.
    pub fn unmark(&self, file: BorrowedFd<'_>) -> io::Result<()> {
        self.change_mark(libc::FAN_MARK_REMOVE, file)
    }

    fn change_mark(&self, action: libc::c_uint, file: BorrowedFd<'_>) -> io::Result<()> {
        // SAFETY: needed as in `new`. Sound because both descriptors are borrowed for the length of
        // the call and a null path is what the call documents for "the file of this descriptor".
        let result = unsafe {
            libc::fanotify_mark(
                self.0.as_raw_fd(),
                action,
                PRE_ACCESS,
                file.as_raw_fd(),
                std::ptr::null(),
            )
        };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Takes one event out of the queue; `None` if the queue is empty.
    pub fn read(&self) -> io::Result<Option<Incoming>> {
        let mut buffer = [0; EVENT_BUFFER];
        let len = match rustix::io::read(&self.0, &mut buffer) {
            Ok(len) => len,
            Err(Errno::AGAIN) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let mut file = None;
        if len >= METADATA_SIZE {
            let mut number = [0; 4];
            number.copy_from_slice(&buffer[FD_OFFSET..FD_OFFSET + 4]);
            let number = i32::from_ne_bytes(number);
            if number > NO_FD {
                // SAFETY: needed to own the descriptor. Sound because the kernel installed it in
                // our table with this very read, so it is open and no other owner knows its number.
                file = Some(unsafe { OwnedFd::from_raw_fd(number) });
            }
        }
        Ok(Some(Incoming { buffer, len, file }))
    }

    /// Answers the event that came with descriptor `number`, in this process or in an earlier one:
    /// the kernel compares nothing but numbers. Of several events with this number, the oldest gets
    /// the answer. Fails with ENOENT when no reader waits for it any more.
    pub fn respond(&self, number: RawFd, response: Response) -> io::Result<()> {
        let decision = match response {
            Response::Allow => libc::FAN_ALLOW,
            Response::Deny => libc::FAN_DENY | (libc::EIO.cast_unsigned() << ERRNO_SHIFT),
        };
        // struct fanotify_response { __s32 fd; __u32 response; }
        let mut answer = [0; 8];
        answer[..4].copy_from_slice(&number.to_ne_bytes());
        answer[4..].copy_from_slice(&decision.to_ne_bytes());
        rustix::io::retry_on_intr(|| rustix::io::write(&self.0, &answer))?;
        Ok(())
    }
}

/// A group that another process made and handed over.
impl From<OwnedFd> for Group {
    fn from(descriptor: OwnedFd) -> Self {
        Group(descriptor)
    }
}

impl AsFd for Group {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
