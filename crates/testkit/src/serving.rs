//! Ports of a server in this process that can be closed for a while.

use std::{
    io,
    net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

/// Ports at one address.
#[derive(Debug)]
pub(crate) struct Ports {
    addresses: Vec<SocketAddr>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Whether connections are refused.
    away: bool,
    stopped: bool,
    open: Vec<TcpStream>,
}

impl Ports {
    /// Listens on two free ports.
    pub(crate) fn two(address: IpAddr) -> io::Result<(Self, [TcpListener; 2])> {
        let listeners = [TcpListener::bind((address, 0))?, TcpListener::bind((address, 0))?];
        let addresses = vec![listeners[0].local_addr()?, listeners[1].local_addr()?];
        Ok((Ports { addresses, state: Mutex::default() }, listeners))
    }

    /// Where the first or the second one is.
    pub(crate) fn address(&self, number: usize) -> SocketAddr {
        self.addresses[number]
    }

    /// Hands connections to `serve` until the end.
    pub(crate) fn serve(&self, mut listener: TcpListener, serve: impl Fn(TcpStream)) {
        let Ok(address) = listener.local_addr() else { return };
        loop {
            let Ok((stream, _)) = listener.accept() else { return };
            let away = || {
                let state = self.lock();
                (!state.stopped).then_some(state.away)
            };
            match away() {
                None => return,
                Some(false) => {}
                Some(true) => {
                    drop((stream, listener));
                    while away() == Some(true) {
                        thread::sleep(Duration::from_millis(1));
                    }
                    match TcpListener::bind(address) {
                        Ok(again) => listener = again,
                        Err(_) => return,
                    }
                    continue;
                }
            }
            if let Ok(clone) = stream.try_clone() {
                self.lock().open.push(clone);
            }
            serve(stream);
        }
    }

    /// Closes all connections and refuses new ones.
    pub(crate) fn go_away(&self) {
        self.lock().away = true;
        self.cut();
    }

    /// Listens again, at the same addresses.
    pub(crate) fn come_back(&self) {
        self.lock().away = false;
    }

    /// Closes all connections, for good.
    pub(crate) fn stop(&self) {
        self.lock().stopped = true;
        self.cut();
    }

    /// Closes all connections and makes the listeners look at the state.
    fn cut(&self) {
        for stream in self.lock().open.drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
        for address in &self.addresses {
            let _ = TcpStream::connect(address);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No panic can leave the state half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
