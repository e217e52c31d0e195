//! The pieces of each daemon, and how it gets more.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    ops::Range,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
};

use super::{
    Fault, Logged, Stats,
    origin::{Origin, Refusal},
};

/// The scheduler's knowledge, and the pieces of all daemons.
#[derive(Debug)]
pub(super) struct Pool {
    /// Bytes of a piece.
    piece: u64,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
pub(super) struct State {
    peers: Vec<Peer>,
    under_way: HashSet<Claim>,
    /// The scheduler's knowledge, by blob.
    pub(super) known: HashMap<String, Known>,
}

/// The scheduler's knowledge of a blob.
#[derive(Clone, Debug, Default)]
pub(super) struct Known {
    /// The pieces that a daemon has fetched from the registry for all, with their ranges.
    pub(super) pieces: BTreeMap<u64, Range<u64>>,
    /// Downloads begun, finished ones included.
    pub(super) downloads: u32,
}

/// One daemon.
#[derive(Debug, Default)]
pub(super) struct Peer {
    pub(super) fault: Option<Fault>,
    pub(super) stats: Stats,
    pub(super) log: Vec<Logged>,
    pub(super) at_socket: Vec<Logged>,
    /// Sizes of blobs, by their digests.
    sizes: HashMap<String, u64>,
    pieces: HashMap<(String, u64), Piece>,
    /// Blobs that it was told to fetch as a whole.
    expected: HashSet<String>,
}

#[derive(Debug)]
struct Piece {
    content: Arc<Vec<u8>>,
    /// Whether the piece was announced to others.
    shared: bool,
}

/// A request to a registry in progress.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Claim {
    /// For which daemon alone, if not for all of them.
    alone: Option<usize>,
    blob: String,
    /// The piece; `None` for the size of the blob.
    piece: Option<u64>,
}

/// One request of a client.
#[derive(Clone, Debug)]
pub(super) struct Task {
    pub(super) pool: Arc<Pool>,
    /// The daemon that was asked.
    pub(super) number: usize,
    /// The digest in hexadecimal digits.
    pub(super) blob: String,
    pub(super) origin: Origin,
    /// Whether to ask other daemons, and to announce pieces to them.
    pub(super) shared: bool,
}

impl Pool {
    pub(super) fn new(piece: u64) -> Self {
        Pool { piece, state: Mutex::default(), changed: Condvar::new() }
    }

    /// Adds a daemon.
    pub(super) fn join(&self) -> usize {
        let peers = &mut self.lock().peers;
        peers.push(Peer::default());
        peers.len() - 1
    }

    /// Looks at a daemon, or changes it.
    pub(super) fn change<T>(&self, number: usize, change: impl FnOnce(&mut Peer) -> T) -> T {
        let result = change(&mut self.lock().peers[number]);
        self.changed.notify_all();
        result
    }

    /// Waits while the daemon has one of these faults.
    pub(super) fn wait_out(&self, number: usize, faults: &[Fault]) {
        let has = |state: &mut State| {
            state.peers[number].fault.is_some_and(|fault| faults.contains(&fault))
        };
        drop(self.changed.wait_while(self.lock(), has).unwrap_or_else(PoisonError::into_inner));
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        // A panicking connection must fail its own test, not hide behind a poisoned lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// A piece as another daemon hands it out.
    fn piece_of_peers(&self, key: &(String, u64)) -> Option<Vec<u8>> {
        let able = |peer: &&Peer| {
            matches!(
                peer.fault,
                None | Some(Fault::DiskFull | Fault::WrongBytes | Fault::ProxyGone)
            )
        };
        self.peers.iter().filter(able).find_map(|peer| {
            let piece = peer.pieces.get(key).filter(|piece| piece.shared)?;
            Some(peer.hand_out(piece.content.to_vec()))
        })
    }
}

impl Peer {
    /// Bytes as they are sent to a client, with the peer's fault.
    pub(super) fn hand_out(&self, mut bytes: Vec<u8>) -> Vec<u8> {
        if self.fault == Some(Fault::WrongBytes) {
            bytes.iter_mut().for_each(|byte| *byte = !*byte);
        }
        bytes
    }
}

impl Task {
    /// Registers a download with the scheduler.
    pub(super) fn begin(&self) {
        let mut state = self.pool.lock();
        if self.shared && state.peers[self.number].fault != Some(Fault::Alone) {
            state.known.entry(self.blob.clone()).or_default().downloads += 1;
        }
    }

    /// The numbers and ranges of the pieces that overlap `range`.
    pub(super) fn pieces(&self, range: &Range<u64>, size: u64) -> Vec<(u64, Range<u64>)> {
        let bytes = self.pool.piece;
        let numbers = range.start / bytes..range.end.div_ceil(bytes);
        numbers.map(|number| (number, number * bytes..size.min((number + 1) * bytes))).collect()
    }

    /// The size of the blob in bytes. Each daemon asks the registry itself, once.
    pub(super) fn size(&self) -> Result<u64, Refusal> {
        let claim = Claim { alone: Some(self.number), blob: self.blob.clone(), piece: None };
        let found =
            self.find_or_claim(|state| match state.peers[self.number].sizes.get(&self.blob) {
                Some(size) => Ok(*size),
                None => Err(claim.clone()),
            });
        let claim = match found {
            Ok(size) => return Ok(size),
            Err(claim) => claim,
        };
        let asked = self.ask(0..1);
        let mut state = self.release(&claim);
        let size = asked?.1;
        state.peers[self.number].sizes.insert(self.blob.clone(), size);
        Ok(size)
    }

    /// The bytes of `range`, which the blob has.
    pub(super) fn read(&self, range: Range<u64>) -> Result<Vec<u8>, Refusal> {
        let size = self.size()?;
        let mut bytes = Vec::new();
        for (number, Range { start, .. }) in self.pieces(&range, size) {
            let piece = self.piece(number, size)?;
            let from = range.start.saturating_sub(start) as usize;
            let to = (range.end - start).min(piece.len() as u64) as usize;
            bytes.extend_from_slice(&piece[from..to]);
        }
        Ok(bytes)
    }

    /// Fetches everything that is missing, once.
    pub(super) fn expect_whole(&self) {
        if !self.pool.change(self.number, |peer| peer.expected.insert(self.blob.clone())) {
            return;
        }
        let Ok(size) = self.size() else { return };
        for number in 0..size.div_ceil(self.pool.piece) {
            if self.piece(number, size).is_err() {
                return;
            }
        }
    }

    fn piece(&self, number: u64, size: u64) -> Result<Arc<Vec<u8>>, Refusal> {
        let key = (self.blob.clone(), number);
        let found = self.find_or_claim(|state| {
            let own = &state.peers[self.number];
            if let Some(piece) = own.pieces.get(&key) {
                return Ok(Ok(piece.content.clone()));
            }
            if own.fault == Some(Fault::DiskFull) {
                return Ok(Err(Refusal::Own(507)));
            }
            let shared = self.shared && own.fault != Some(Fault::Alone);
            if shared && let Some(content) = state.piece_of_peers(&key) {
                let (own, content) = (&mut state.peers[self.number], Arc::new(content));
                own.stats.from_peers += content.len() as u64;
                own.pieces.insert(key.clone(), Piece { content: content.clone(), shared });
                return Ok(Ok(content));
            }
            let alone = (!shared).then_some(self.number);
            Err(Claim { alone, blob: self.blob.clone(), piece: Some(number) })
        });
        let claim = match found {
            Ok(piece) => return piece,
            Err(claim) => claim,
        };
        let start = number * self.pool.piece;
        let asked = self.ask(start..size.min(start + self.pool.piece));
        let mut state = self.release(&claim);
        let (content, shared) = (Arc::new(asked?.0), claim.alone.is_none());
        if shared {
            let known = state.known.entry(self.blob.clone()).or_default();
            known.pieces.insert(number, start..start + content.len() as u64);
        }
        let own = &mut state.peers[self.number];
        own.pieces.insert(key, Piece { content: content.clone(), shared });
        Ok(content)
    }

    /// Returns what `find` finds. If it returns a claim instead, waits until no other request holds
    /// the same claim, looks again, and takes it: the caller then fetches, and calls
    /// [`Task::release`].
    fn find_or_claim<T>(&self, find: impl Fn(&mut State) -> Result<T, Claim>) -> Result<T, Claim> {
        let mut state = self.pool.lock();
        loop {
            let claim = match find(&mut state) {
                Ok(found) => return Ok(found),
                Err(claim) => claim,
            };
            if state.under_way.insert(claim.clone()) {
                return Err(claim);
            }
            state = self.pool.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Releases a claim and wakes those that wait for it, once the daemon no longer hangs.
    fn release(&self, claim: &Claim) -> MutexGuard<'_, State> {
        self.pool.wait_out(self.number, &[Fault::Hung]);
        let mut state = self.pool.lock();
        state.under_way.remove(claim);
        self.pool.changed.notify_all();
        state
    }

    /// Some bytes from the registry, and how many the blob has.
    fn ask(&self, range: Range<u64>) -> Result<(Vec<u8>, u64), Refusal> {
        let answer = self.origin.read(range);
        self.pool.change(self.number, |peer| {
            peer.stats.asked_origin += 1;
            if let Ok((bytes, _)) = &answer {
                peer.stats.from_origin += bytes.len() as u64;
            }
            // Data that an ended process fetched is lost.
            if peer.fault == Some(Fault::Gone) { Err(Refusal::Own(500)) } else { answer }
        })
    }
}
