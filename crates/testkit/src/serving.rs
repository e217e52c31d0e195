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
    /// The addresses at which connections are refused.
    away: Vec<SocketAddr>,
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

    /// Address of the first or the second port.
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
                (!state.stopped).then_some(state.away.contains(&address))
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
        self.only(&[]);
    }

    /// Listens again, at the same addresses.
    pub(crate) fn come_back(&self) {
        self.lock().away = Vec::new();
    }

    /// Listens at these alone from now on. Closes all connections if any is refused.
    pub(crate) fn only(&self, numbers: &[usize]) {
        let away = self.addresses.iter().enumerate().filter(|(at, _)| !numbers.contains(at));
        let away: Vec<_> = away.map(|(_, address)| *address).collect();
        let refuses = !away.is_empty();
        self.lock().away = away;
        if refuses {
            self.cut();
        }
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
