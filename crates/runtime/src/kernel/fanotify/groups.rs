//! The fanotify groups of a process: one for each image, and one for each blob that several images
//! share.
//!
//! The kernel delivers a group's events in order, and each answer wakes all readers that wait in
//! the group: 40 ms with 10,000 readers. With a group for each image, an image pays only for its
//! own readers, and images that share a blob pay for the readers of that blob.
//!
//! ```text
//! file of one image        the group of that image
//! file of several images   a group of that file
//! 1024 readers wait in it  another group of the same image or file
//! no more groups           the common group
//! ```
//!
//! A group is closed only when its image or file is in no mounted file system: closing it earlier
//! would let a reader through to a hole if the kernel has seen the group's mark but not queued the
//! event yet. A file can move to another group: it is marked in the new one before it is unmarked
//! in the old one, so it always has a mark.

use std::{
    collections::HashMap,
    fs, io,
    os::fd::{AsRawFd as _, OwnedFd},
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use lazuli_image::Digest;
use lazuli_sys::fanotify::Group;
use rustix::{
    buffer::spare_capacity,
    event::{
        EventfdFlags, Timespec,
        epoll::{self, EventData, EventFlags},
        eventfd,
    },
    io::Errno,
};

use super::{
    answer::{Channel, GroupOf, JournalOf, Pending},
    journal::Journal,
};
use crate::{
    keeper::{
        KeptDescriptor, Link,
        names::{GROUP, JOURNAL},
    },
    sync::lock,
};

/// Groups that a user may have. The kernel's default is 128; a node has one image for each of some
/// 250 pods at most.
const WANTED: u32 = 1024;

/// Groups that one image or shared blob has at most.
const MOST: usize = 16;

/// The file with the kernel's limit.
const LIMIT: &str = "/proc/sys/fs/fanotify/max_user_groups";

/// Maximum number of groups reported by one wait.
const READY: usize = 64;

/// Stands for the end among the numbers of groups.
const STOP: u64 = u64::MAX;

/// See the module.
pub(super) struct Groups {
    common: Arc<Channel>,
    table: Mutex<Table>,
    journal: Arc<Journal>,
    /// The descriptor to wait for all groups with.
    poll: OwnedFd,
    stop: OwnedFd,
    link: Arc<Link>,
    _held: [KeptDescriptor; 2],
}

#[derive(Default)]
struct Table {
    /// By image or shared blob, see [`name`]. The last group of one gets its new marks. None has an
    /// empty list.
    own: HashMap<String, Vec<Own>>,
    last: u64,
}

struct Own {
    channel: Arc<Channel>,
    /// The keeper's.
    name: String,
    _held: KeptDescriptor,
}

impl Groups {
    /// Starts with `group` for what gets no group of its own.
    pub(super) fn new(link: &Arc<Link>, group: Group, journal: Journal) -> io::Result<Self> {
        let journal = Arc::new(journal);
        let common = Arc::new(Channel::new(group, journal.clone(), 0, 0)?);
        let poll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(&poll, &stop, EventData::new_u64(STOP), EventFlags::IN)?;
        epoll::add(&poll, &common.group, EventData::new_u64(0), EventFlags::IN)?;
        let held = [
            link.hold(JOURNAL.to_owned(), Arc::new(JournalOf(journal.clone()))),
            link.hold(GROUP.to_owned(), Arc::new(GroupOf(common.clone()))),
        ];
        let (link, table) = (link.clone(), Mutex::default());
        Ok(Groups { common, table, journal, poll, stop, link, _held: held })
    }

    /// Takes over a group of an earlier process.
    pub(super) fn resume(&self, name: String, group: OwnedFd) -> io::Result<()> {
        let owner = name.split('.').next().unwrap_or_default().to_owned();
        self.insert(&mut self.lock(), owner, name, group.into()).map(drop)
    }

    /// The group of an image, or of a blob that several have. The common one when the kernel gives
    /// no more.
    pub(super) fn of(&self, owner: &Digest) -> Arc<Channel> {
        let mut table = self.lock();
        let name = name(owner);
        if let Some(own) = table.own.get(&name).and_then(|all| all.last()) {
            return own.channel.clone();
        }
        let created = create().and_then(|group| self.insert(&mut table, name.clone(), name, group));
        created.unwrap_or_else(|error| {
            tracing::warn!(%owner, %error, "it shares a fanotify group with others");
            self.common.clone()
        })
    }

    /// Gives an image or blob another group for new marks, unless it has enough.
    pub(super) fn add(&self, owner: &Digest) -> io::Result<()> {
        let mut table = self.lock();
        let owner = name(owner);
        let Some(all) = table.own.get(&owner).filter(|all| all.len() < MOST) else { return Ok(()) };
        let mut names = (2..).map(|number: u32| format!("{owner}.{number}"));
        let is_free = |name: &String| !all.iter().any(|own| own.name == *name);
        let Some(name) = names.find(is_free) else { return Ok(()) };
        let group = create()?;
        self.insert(&mut table, owner, name, group).map(drop)
    }

    fn insert(
        &self,
        table: &mut Table,
        owner: String,
        name: String,
        group: Group,
    ) -> io::Result<Arc<Channel>> {
        table.last += 1;
        let channel = Channel::new(group, self.journal.clone(), table.last, key(&owner))?;
        let channel = Arc::new(channel);
        epoll::add(&self.poll, &channel.group, EventData::new_u64(table.last), EventFlags::IN)?;
        // Hand the descriptor to the keeper before marking anything: the last descriptor of a group
        // that closes lets its readers through.
        let held = self.link.hold(name.clone(), Arc::new(GroupOf(channel.clone())));
        let own = Own { channel: channel.clone(), name, _held: held };
        table.own.entry(owner).or_default().push(own);
        Ok(channel)
    }

    /// The group of files that have no group of their own.
    pub(super) fn common(&self) -> &Arc<Channel> {
        &self.common
    }

    /// All groups.
    pub(super) fn all(&self) -> Vec<Arc<Channel>> {
        let table = self.lock();
        let own = table.own.values().flatten().map(|own| own.channel.clone());
        own.chain([self.common.clone()]).collect()
    }

    /// Closes the groups of an image or blob without readers. Remaining events are denied.
    pub(super) fn close(&self, owner: &Digest) {
        let unused = self.lock().own.remove(&name(owner));
        unused.into_iter().flatten().for_each(|own| self.discard(own));
    }

    /// Closes the groups that `is_used` rejects by their names.
    pub(super) fn close_others(&self, is_used: impl Fn(&str) -> bool) {
        let unused: Vec<_> = self.lock().own.extract_if(|name, _| !is_used(name)).collect();
        unused.into_iter().flat_map(|(_, all)| all).for_each(|own| self.discard(own));
    }

    fn discard(&self, own: Own) {
        let _ = epoll::delete(&self.poll, &own.channel.group);
        drop(queued(&own.channel, usize::MAX));
    }

    /// Denies up to `most` events that are queued.
    pub(super) fn deny_queued(&self, most: usize) -> usize {
        self.journal.reads_all();
        let all = self.all();
        let denied: Vec<_> = all.iter().flat_map(|channel| queued(channel, most)).collect();
        let count = denied.len();
        // All of them first: a reader that is denied asks again at once.
        drop(denied);
        count
    }

    /// Waits for events, or for `timeout`. Returns the groups with events; `None` at the end.
    pub(super) fn wait(&self, timeout: Option<Duration>) -> io::Result<Option<Vec<Arc<Channel>>>> {
        let mut ready = Vec::with_capacity(READY);
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        match epoll::wait(&self.poll, spare_capacity(&mut ready), timeout.as_ref()) {
            Err(Errno::INTR) => return Ok(Some(Vec::new())),
            waited => waited?,
        };
        let numbers: Vec<_> = ready.iter().map(|event| event.data.u64()).collect();
        if numbers.contains(&STOP) {
            return Ok(None);
        }
        let table = self.lock();
        let own = table.own.values().flatten().map(|own| &own.channel);
        let all = own.chain([&self.common]);
        Ok(Some(all.filter(|channel| numbers.contains(&channel.number)).cloned().collect()))
    }

    /// Leaves the events of a group in the kernel's queue for now.
    pub(super) fn leave_queued(&self, channel: &Channel) {
        self.wait_for(channel, EventFlags::empty());
    }

    /// Takes the events of a group out of the kernel's queue again.
    pub(super) fn take_queued(&self, channel: &Channel) {
        self.wait_for(channel, EventFlags::IN);
    }

    fn wait_for(&self, channel: &Channel, flags: EventFlags) {
        let data = EventData::new_u64(channel.number);
        // Fails for a group that was closed meanwhile.
        let _ = epoll::modify(&self.poll, &channel.group, data, flags);
    }

    /// Ends [`Groups::wait`] for good.
    pub(super) fn stop(&self) {
        // Fails only when the counter is full, and then it is readable.
        let _ = rustix::io::write(&self.stop, &1_u64.to_ne_bytes());
    }

    pub(super) fn journal(&self) -> &Journal {
        &self.journal
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        lock(&self.table)
    }
}

/// Prefix of the names of the groups of an image or blob, and the keeper's name for the first one.
/// Further ones have a number behind a period.
pub(super) fn name(image: &Digest) -> String {
    format!("{GROUP}-{}", image.hex())
}

/// Identifies groups in the journal; 0 is the common one.
fn key(name: &str) -> u64 {
    let hex = name.rsplit('-').next().and_then(|hex| hex.get(..16));
    hex.and_then(|hex| u64::from_str_radix(hex, 16).ok()).unwrap_or(u64::MAX)
}

/// A new group, with a higher limit if the kernel's is reached.
fn create() -> io::Result<Group> {
    match Group::new() {
        Err(error) if error.raw_os_error() == Some(Errno::MFILE.raw_os_error()) => {
            let limit = fs::read_to_string(LIMIT)?;
            if limit.trim().parse::<u32>().is_ok_and(|limit| limit >= WANTED) {
                return Err(error);
            }
            fs::write(LIMIT, WANTED.to_string())?;
            tracing::info!(before = limit.trim(), now = WANTED, "raised {LIMIT}");
            Group::new()
        }
        created => created,
    }
}

/// Takes up to `most` events out of a group's queue.
fn queued(channel: &Arc<Channel>, most: usize) -> Vec<Pending> {
    let mut pending = Vec::new();
    while pending.len() < most
        && let Ok(Some(mut incoming)) = channel.group.read()
    {
        let event = |file: OwnedFd| Pending::new(channel, file.as_raw_fd(), file);
        pending.extend(incoming.file.take().map(event));
    }
    pending
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_told_apart_by_their_owners() {
        let [one, other] = [1, 2].map(|byte| name(&Digest::sha256([byte; 32])));
        assert_ne!(one, other);
        assert_eq!(key(&one), 0x0101_0101_0101_0101);
        assert_ne!(key(&one), key(&other));
        assert_eq!(key("fanotify-strange"), u64::MAX);
    }
}
