//! The worker's connection to its keeper.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, io,
    os::fd::{AsFd, OwnedFd},
    process::{Child, Command},
    sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock},
    thread,
    time::Duration,
};

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::{
    descriptors::Descriptors,
    info::KeeperInfo,
    names::{JOURNAL, LISTENER, LOCK, LOG, PREDECESSOR},
    programs::{Programs, Role},
    service,
    wire::{Channel, Kind, Message, TRIAL, unexpected},
};
use crate::sync::lock;

/// Time limit for the keeper to pass a descriptor on to systemd. It has no other work; a keeper of
/// an earlier version never confirms.
const PASSED_ON: Duration = Duration::from_secs(1);

/// Pause between attempts to start a keeper.
const PAUSE: Duration = Duration::from_secs(1);

/// An order from the keeper to its worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// End, and leave nothing mounted.
    Stop,
    /// Exit at once; a successor continues.
    Leave,
}

type Shared = Arc<dyn AsFd + Send + Sync>;

/// See the module. Also keeps the descriptors that were handed over, for the next keeper if this
/// one dies.
pub struct Link {
    inner: Mutex<Inner>,
    orders: UnboundedSender<Order>,
    trial: Mutex<Option<Trial>>,
    questions: Mutex<Questions>,
    answered: Condvar,
    programs: OnceLock<Programs>,
}

/// Questions sent to the keeper after descriptors, and the number of its answers.
#[derive(Default)]
struct Questions {
    /// Whether a thread listens for answers.
    has_listener: bool,
    asked: u64,
    answered: u64,
}

/// The state of a worker on trial.
struct Trial {
    /// Held open: the old keeper resumes when it closes.
    predecessor: Channel,
    serving: bool,
}

#[derive(Default)]
struct Inner {
    /// `None` in a process without a keeper.
    channel: Option<Arc<Channel>>,
    held: BTreeMap<String, Shared>,
    /// Names of descriptors that the keeper has from an earlier worker, and that need not be sent
    /// again.
    given: BTreeSet<String>,
    info: KeeperInfo,
    keeper: Option<Child>,
}

/// Handed to a worker when it starts.
#[derive(Debug)]
pub struct Given<T> {
    /// The result of reading the journal, if there was one.
    pub journal: Option<T>,
    /// Everything else that its predecessor had handed to the keeper.
    pub descriptors: Descriptors,
    /// Later orders of the keeper.
    pub orders: UnboundedReceiver<Order>,
}

impl Link {
    /// Meets the keeper at standard input. `journal` gets the journal before any other descriptor
    /// is open, standard input, output and error aside: it may have to reserve numbers.
    pub fn enter<T>(
        journal: impl FnOnce(OwnedFd) -> io::Result<T>,
    ) -> io::Result<(Arc<Self>, Given<T>)> {
        let channel = Channel::new(rustix::stdio::stdin())?;
        let (mut descriptors, mut info) = (Descriptors::default(), KeeperInfo::default());
        let (mut journal, mut opened) = (Some(journal), None);
        let trial = loop {
            match channel.receive()? {
                Some(Message { kind: Kind::Keeper, text, .. }) => {
                    info = KeeperInfo::from_json(&text)?;
                }
                Some(Message { kind: Kind::Descriptor, text, descriptor: Some(descriptor) }) => {
                    match journal.take_if(|_| text == JOURNAL) {
                        Some(journal) => opened = Some(journal(descriptor)?),
                        None => descriptors.insert(text, descriptor),
                    }
                }
                Some(Message { kind: Kind::Go, text, .. }) => break text == TRIAL,
                Some(message) => return Err(unexpected(&message)),
                None => return Err(io::ErrorKind::UnexpectedEof.into()),
            }
        };
        let trial = match descriptors.remove(PREDECESSOR).filter(|_| trial) {
            Some(predecessor) => {
                Some(Trial { predecessor: Channel::new(predecessor)?, serving: false })
            }
            None => None,
        };
        let channel = Channel::new(channel.as_fd().try_clone_to_owned()?)?;
        let (orders, receiver) = unbounded_channel();
        let mut given: BTreeSet<_> = descriptors.iter().map(|(name, _)| name.to_owned()).collect();
        given.extend(opened.is_some().then(|| JOURNAL.to_owned()));
        let inner = Inner { channel: Some(Arc::new(channel)), given, info, ..Inner::default() };
        let link = Arc::new(Link::new(inner, orders, trial));
        for name in [LOCK, LISTENER, LOG] {
            if let Some(descriptor) = descriptors.remove(name) {
                link.lock().held.insert(name.to_owned(), Arc::new(descriptor));
            }
        }
        Ok((link, Given { journal: opened, descriptors, orders: receiver }))
    }

    /// For a process without a keeper: everything dies with it.
    pub fn alone() -> Arc<Self> {
        let (orders, _) = unbounded_channel();
        Arc::new(Link::new(Inner::default(), orders, None))
    }

    fn new(inner: Inner, orders: UnboundedSender<Order>, trial: Option<Trial>) -> Self {
        let (questions, answered) = Default::default();
        let programs = OnceLock::new();
        Link { inner: inner.into(), orders, trial: trial.into(), questions, answered, programs }
    }

    /// Listens to the keeper from a thread, and starts another one when it dies.
    pub fn attend(self: &Arc<Self>, programs: Programs) -> io::Result<()> {
        let link = self.clone();
        self.programs.get_or_init(|| programs.clone());
        self.questions().has_listener = true;
        let listen = move || link.listen(&programs);
        thread::Builder::new().name("keeper".to_owned()).spawn(listen).map(drop)
    }

    /// Command that starts this program in another role; `None` in a process without a keeper.
    pub(crate) fn program(&self, role: Role) -> Option<Command> {
        self.programs.get().map(|programs| programs(role))
    }

    fn listen(&self, programs: &Programs) {
        loop {
            let Some(channel) = self.lock().channel.clone() else { return };
            match channel.receive() {
                Ok(Some(message)) => match message.kind {
                    Kind::Keeper => match KeeperInfo::from_json(&message.text) {
                        Ok(info) => self.lock().info = info,
                        Err(error) => tracing::warn!(%error, "cannot understand the keeper"),
                    },
                    Kind::Report => {
                        self.questions().answered += 1;
                        self.answered.notify_all();
                    }
                    Kind::Confirmed => drop(self.trial().take()),
                    Kind::Stop => drop(self.orders.send(Order::Stop)),
                    Kind::Leave => drop(self.orders.send(Order::Leave)),
                    kind => tracing::warn!(?kind, "the keeper says what no keeper says"),
                },
                Ok(None) => self.replace_keeper(programs),
                Err(error) => tracing::error!(%error, "cannot understand the keeper"),
            }
        }
    }

    /// Starts another keeper, and hands everything to it.
    fn replace_keeper(&self, programs: &Programs) {
        match self.trial().take() {
            Some(trial) if !trial.serving => {
                // The old daemon resumes as soon as this process is gone.
                tracing::error!("the takeover failed");
                std::process::exit(1);
            }
            // The keeper died at the very end of the takeover. Fails when it had told the old one
            // before.
            Some(trial) => drop(trial.predecessor.send(Kind::Done, "", None)),
            None => {}
        }
        tracing::error!("the keeper died, starting another one");
        if let Some(mut keeper) = self.lock().keeper.take() {
            // Its connection is closed, so it ends now.
            let _ = keeper.wait();
        }
        while let Err(error) = self.start_keeper(programs) {
            tracing::error!(%error, "cannot start a keeper: readers depend on this process alone");
            thread::sleep(PAUSE);
        }
        // It was asked nothing, and has everything.
        let mut questions = self.questions();
        questions.answered = questions.asked;
        self.answered.notify_all();
    }

    fn start_keeper(&self, programs: &Programs) -> io::Result<()> {
        let (ours, theirs) = Channel::pair()?;
        let keeper = programs(Role::Keeper).stdin(theirs).spawn()?;
        let mut inner = self.lock();
        inner.keeper = Some(keeper);
        for (name, descriptor) in &inner.held {
            ours.send(Kind::Descriptor, name, Some(descriptor.as_fd()))?;
        }
        ours.send(Kind::Go, "", None)?;
        inner.channel = Some(Arc::new(ours));
        // The new keeper has only the held descriptors.
        inner.given.clear();
        Ok(())
    }

    /// Hands a copy of a descriptor to the keeper, until the result is dropped. When this returns,
    /// the descriptor stays open whatever happens to this process, and to the keeper if there is a
    /// service manager. A name that an earlier worker has used and that was not
    /// [released](Link::release) since must come with the descriptor in [`Given`].
    pub fn hold(self: &Arc<Self>, name: String, descriptor: Shared) -> KeptDescriptor {
        let mut inner = self.lock();
        let is_new = !inner.given.remove(&name);
        if is_new {
            inner.tell(Kind::Descriptor, &name, Some(&descriptor));
        }
        inner.held.insert(name.clone(), descriptor);
        drop(inner);
        if is_new && !service::address().is_empty() {
            self.await_keeper();
        }
        KeptDescriptor { link: self.clone(), name }
    }

    /// Waits until the keeper has dealt with everything that it was told.
    fn await_keeper(&self) {
        let mut questions = self.questions();
        if !questions.has_listener {
            return;
        }
        questions.asked += 1;
        let number = questions.asked;
        self.lock().tell(Kind::Report, "", None);
        let waited = self
            .answered
            .wait_timeout_while(questions, PASSED_ON, |questions| questions.answered < number);
        if waited.is_ok_and(|(_, waited)| waited.timed_out()) {
            tracing::warn!("the keeper does not say that it passed a descriptor on");
        }
    }

    /// Lets the keeper close a descriptor that a predecessor had handed over and that is not needed
    /// any more.
    pub fn release(&self, name: &str) {
        let mut inner = self.lock();
        inner.held.remove(name);
        inner.given.remove(name);
        inner.tell(Kind::Release, name, None);
    }

    /// Readers are served.
    pub fn serving(&self) {
        if let Some(trial) = &mut *self.trial() {
            trial.serving = true;
        }
        self.lock().tell(Kind::Serving, "", None);
    }

    /// Everything that predecessors left unanswered is answered.
    pub fn settled(&self) {
        self.lock().tell(Kind::Settled, "", None);
    }

    /// Nothing is mounted any more, and this process ends.
    pub fn stopped(&self) {
        self.lock().tell(Kind::Stopped, "", None);
    }

    /// The keeper, as it introduced itself; `None` in a process without one.
    pub fn keeper(&self) -> Option<KeeperInfo> {
        let inner = self.lock();
        inner.channel.is_some().then(|| inner.info.clone())
    }

    fn questions(&self) -> MutexGuard<'_, Questions> {
        lock(&self.questions)
    }

    fn trial(&self) -> MutexGuard<'_, Option<Trial>> {
        lock(&self.trial)
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        lock(&self.inner)
    }
}

impl Inner {
    fn tell(&self, kind: Kind, text: &str, descriptor: Option<&Shared>) {
        let Some(channel) = &self.channel else { return };
        let descriptor = descriptor.map(|descriptor| descriptor.as_fd());
        if let Err(error) = channel.send(kind, text, descriptor) {
            // A keeper that died gets a successor, which gets everything that is held.
            tracing::debug!(%error, ?kind, text, "the keeper is gone");
        }
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link").field("keeper", &self.keeper()).finish_non_exhaustive()
    }
}

/// A descriptor that the keeper holds as long as this lives, and longer if this process dies.
#[derive(Debug)]
#[must_use = "the keeper closes the descriptor when this is dropped"]
pub struct KeptDescriptor {
    link: Arc<Link>,
    name: String,
}

impl Drop for KeptDescriptor {
    fn drop(&mut self) {
        self.link.release(&self.name);
    }
}
