//! A simulated long-distance connection between a client and a server on this machine.
//!
//! A [`Wire`] forwards TCP connections and adds the effects of distance to each: every byte takes
//! half a round trip, the handshake takes one before the first byte leaves, and the server's data
//! starts with a window of ten segments that doubles with each round trip (slow start), unless that
//! is disabled. All connections share the bandwidth from the server, if it is limited. Nothing is
//! lost.

use std::{
    collections::VecDeque,
    io::{self, Read as _, Write as _},
    net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc::{self, Receiver, Sender},
    },
    thread,
    time::{Duration, Instant},
};

/// Bytes that Linux sends on a new connection before the first acknowledgement: ten Ethernet
/// segments.
const FIRST_WINDOW: usize = 10 * 1460;

/// Maximum window, in bytes: that of a receiver with Linux' automatic buffer sizes.
const LAST_WINDOW: usize = 6 << 20;

/// Bytes that are forwarded at a time, at most.
const PIECE: usize = 64 << 10;

/// The distance between client and server.
#[derive(Clone, Copy, Debug)]
pub struct Distance {
    /// Round trip time of a byte.
    pub round_trip: Duration,
    /// Bytes per second from the server; `None` for no limit.
    pub bytes_per_second: Option<u64>,
    /// Whether connections start with a small window; otherwise only the above limits them.
    pub slow_start: bool,
}

/// A listener that forwards connections to a distant server. Dropping it closes the listener, but
/// no open connection.
#[derive(Debug)]
pub struct Wire {
    address: SocketAddr,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    server: SocketAddr,
    distance: Distance,
    bandwidth: Option<Bandwidth>,
    connections: AtomicU64,
    stopped: AtomicBool,
}

impl Wire {
    /// Forwards from a free port of the loopback interface, with slow start and unlimited
    /// bandwidth.
    pub fn to(server: SocketAddr, round_trip: Duration) -> io::Result<Self> {
        Self::through(server, Distance { round_trip, bytes_per_second: None, slow_start: true })
    }

    /// Forwards from a free port of the loopback interface over `distance`.
    pub fn through(server: SocketAddr, distance: Distance) -> io::Result<Self> {
        Self::between((Ipv4Addr::LOCALHOST, 0).into(), server, distance)
    }

    /// Forwards from the local address `near` over `distance`.
    pub fn between(near: SocketAddr, server: SocketAddr, distance: Distance) -> io::Result<Self> {
        let listener = TcpListener::bind(near)?;
        let address = listener.local_addr()?;
        let (connections, stopped) = (AtomicU64::new(0), AtomicBool::new(false));
        let bandwidth = distance.bytes_per_second.map(|bytes_per_second| Bandwidth {
            bytes_per_second,
            free: Mutex::new(Instant::now()),
        });
        let shared = Arc::new(Shared { server, distance, bandwidth, connections, stopped });
        let clone = shared.clone();
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                if clone.stopped.load(Ordering::Relaxed) {
                    return;
                }
                clone.connections.fetch_add(1, Ordering::Relaxed);
                // A connection that cannot be forwarded is closed.
                let _ = clone.forward(stream);
            }
        });
        Ok(Wire { address, shared })
    }

    /// Host and port of the near end.
    pub fn host(&self) -> String {
        self.address.to_string()
    }

    /// Number of connections so far.
    pub fn connections(&self) -> u64 {
        self.shared.connections.load(Ordering::Relaxed)
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.shared.stopped.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(self.address);
    }
}

impl Shared {
    fn forward(self: &Arc<Self>, near: TcpStream) -> io::Result<()> {
        let far = TcpStream::connect(self.server)?;
        near.set_nodelay(true)?;
        far.set_nodelay(true)?;
        let Distance { round_trip, slow_start, .. } = self.distance;
        let half = round_trip / 2;
        // The handshake on the loopback interface took no time: hold bytes back until a distant one
        // would have ended.
        let opened = Instant::now() + round_trip;
        let up = Direction { from: near.try_clone()?, to: far.try_clone()?, half, opened };
        up.start(None, None);
        let window = Window { size: FIRST_WINDOW, in_flight: VecDeque::new(), round_trip };
        Direction { from: far, to: near, half, opened }
            .start(slow_start.then_some(window), Some(self.clone()));
        Ok(())
    }
}

/// One direction of a connection.
struct Direction {
    from: TcpStream,
    to: TcpStream,
    /// The delay of a byte.
    half: Duration,
    /// No byte leaves before.
    opened: Instant,
}

impl Direction {
    fn start(self, window: Option<Window>, shared: Option<Arc<Shared>>) {
        let (sender, receiver) = mpsc::channel();
        let to = self.to;
        thread::spawn(move || deliver(&receiver, to));
        thread::spawn(move || {
            collect(self.from, self.half, self.opened, window, shared.as_deref(), &sender);
        });
    }
}

/// Takes bytes as the sender may send them.
fn collect(
    mut from: TcpStream,
    half: Duration,
    opened: Instant,
    mut window: Option<Window>,
    shared: Option<&Shared>,
    to: &Sender<(Instant, Vec<u8>)>,
) {
    let mut piece = vec![0; PIECE];
    loop {
        let limit = window.as_mut().map_or(PIECE, |window| window.wait().min(PIECE));
        let Ok(read @ 1..) = from.read(&mut piece[..limit]) else { return };
        if let Some(window) = &mut window {
            window.sent(read);
        }
        let left = match shared.and_then(|shared| shared.bandwidth.as_ref()) {
            Some(bandwidth) => bandwidth.pass(read),
            None => Instant::now(),
        };
        let arrives = left.max(opened) + half;
        if to.send((arrives, piece[..read].to_vec())).is_err() {
            return;
        }
    }
}

/// Hands bytes over when they have arrived; closes behind the last one.
fn deliver(from: &Receiver<(Instant, Vec<u8>)>, mut to: TcpStream) {
    while let Ok((arrives, bytes)) = from.recv() {
        thread::sleep(arrives.saturating_duration_since(Instant::now()));
        if to.write_all(&bytes).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
}

/// The bandwidth that all connections share.
#[derive(Debug)]
struct Bandwidth {
    bytes_per_second: u64,
    /// When the last byte that was sent is through.
    free: Mutex<Instant>,
}

impl Bandwidth {
    /// Waits until the wire accepts more. Returns when these bytes will have passed.
    fn pass(&self, bytes: usize) -> Instant {
        /// Bytes that a device queues before the sender has to wait.
        const QUEUE: Duration = Duration::from_millis(2);
        let through = {
            let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
            let took = Duration::from_secs_f64(bytes as f64 / self.bytes_per_second as f64);
            *free = Instant::now().max(*free) + took;
            *free
        };
        thread::sleep(through.saturating_duration_since(Instant::now() + QUEUE));
        through
    }
}

/// The congestion window of a connection, which limits the unacknowledged bytes.
struct Window {
    size: usize,
    /// When sent data will be acknowledged, and how many bytes.
    in_flight: VecDeque<(Instant, usize)>,
    round_trip: Duration,
}

impl Window {
    /// Waits until the window has space, and returns its size.
    fn wait(&mut self) -> usize {
        loop {
            while self
                .in_flight
                .front()
                .is_some_and(|(acknowledged, _)| *acknowledged <= Instant::now())
            {
                let bytes = self.in_flight.pop_front().map_or(0, |(_, bytes)| bytes);
                self.size = (self.size + bytes).min(LAST_WINDOW);
            }
            let in_flight: usize = self.in_flight.iter().map(|(_, bytes)| bytes).sum();
            match (self.size.saturating_sub(in_flight), self.in_flight.front()) {
                (0, Some((next, _))) => {
                    thread::sleep(next.saturating_duration_since(Instant::now()));
                }
                (room, _) => return room.max(1),
            }
        }
    }

    fn sent(&mut self, bytes: usize) {
        self.in_flight.push_back((Instant::now() + self.round_trip, bytes));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROUND_TRIP: Duration = Duration::from_millis(40);

    /// A server that answers each byte with `answer` bytes.
    fn talkative(answer: usize) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            while let Ok(1) = stream.read(&mut [0]) {
                stream.write_all(&vec![7; answer]).unwrap();
            }
        });
        address
    }

    /// Round trips that an exchange took, rounded down.
    fn ask(stream: &mut TcpStream, answer: usize) -> u128 {
        let started = Instant::now();
        stream.write_all(&[1]).unwrap();
        stream.read_exact(&mut vec![0; answer]).unwrap();
        started.elapsed().as_micros() / ROUND_TRIP.as_micros()
    }

    /// Expects exchanges on a new connection to take this many round trips: never fewer, and no
    /// more in at least one of many attempts, since other processes may delay them.
    fn expect(distance: Distance, answer: usize, expected: &[u128]) {
        let mut fewest = vec![u128::MAX; expected.len()];
        for _ in 0..50 {
            let wire = Wire::through(talkative(answer), distance).unwrap();
            let mut stream = TcpStream::connect(wire.host()).unwrap();
            for (fewest, expected) in fewest.iter_mut().zip(expected) {
                let took = ask(&mut stream, answer);
                assert!(took >= *expected, "{took} round trips, expected {expected}");
                *fewest = took.min(*fewest);
            }
            assert_eq!(wire.connections(), 1);
            if fewest == expected {
                return;
            }
        }
        panic!("{fewest:?} round trips at best, expected {expected:?}");
    }

    fn distance(slow_start: bool) -> Distance {
        Distance { round_trip: ROUND_TRIP, bytes_per_second: None, slow_start }
    }

    #[test]
    fn a_handshake_and_an_exchange_take_a_round_trip_each() {
        expect(distance(true), 1000, &[2, 1]);
    }

    #[test]
    fn limited_bandwidth_delays_bytes() {
        let (round_trip, bytes_per_second) = (Duration::ZERO, Some(1_000_000));
        let distance = Distance { round_trip, bytes_per_second, slow_start: true };
        let wire = Wire::through(talkative(500_000), distance).unwrap();
        let mut stream = TcpStream::connect(wire.host()).unwrap();
        let started = Instant::now();
        ask(&mut stream, 500_000);
        assert!(started.elapsed() > Duration::from_millis(450), "{:?}", started.elapsed());
    }

    #[test]
    fn slow_start_doubles_the_window_each_round_trip() {
        // 14.6, 29.2, 58.4, 116.8 kB: 200 kB need four windows.
        expect(distance(true), 200_000, &[5, 1]);
        expect(distance(false), 200_000, &[2]);
    }
}
