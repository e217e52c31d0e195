//! An isolated network of nodes.
//!
//! Each node is a kernel network namespace with one address; a pair of virtual Ethernet interfaces
//! joins it to a bridge. The network disappears with its processes, however they end. Needs root,
//! and `ip` and `unshare` in `PATH`.

use std::{
    fs::File,
    io::{self, Read as _, Write as _},
    marker::PhantomData,
    net::{IpAddr, Ipv4Addr},
    os::fd::AsFd as _,
    process::{Child, Command, Stdio},
};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// The bridge, with the network's first address. The thread that made it stays in the network until
/// this is dropped, and with it all processes and sockets that the thread makes.
#[derive(Debug)]
pub struct Network {
    bridge: Namespace,
    home: File,
    nodes: u8,
    /// Only the same thread can leave the network.
    _thread: PhantomData<*const ()>,
}

/// A node of a [`Network`].
#[derive(Debug)]
pub struct Node {
    namespace: Namespace,
    address: IpAddr,
}

impl Network {
    /// Makes a network without nodes, and moves this thread to its bridge.
    pub fn enter() -> io::Result<Self> {
        let home = File::open("/proc/thread-self/ns/net")?;
        let network = Network { bridge: Namespace::new()?, home, nodes: 0, _thread: PhantomData };
        network.bridge.enter()?;
        ip("link add lan type bridge")?;
        ip(&format!("address add {}/24 dev lan", network.address()))?;
        ip("link set lan up")?;
        ip("link set lo up")?;
        Ok(network)
    }

    /// The address of the bridge.
    pub fn address(&self) -> IpAddr {
        address(1)
    }

    /// Joins another node to it, of at most 253.
    pub fn join(&mut self) -> io::Result<Node> {
        self.nodes = self.nodes.checked_add(1).filter(|nodes| *nodes < 254).ok_or_else(|| {
            io::Error::new(io::ErrorKind::QuotaExceeded, "a network has 253 nodes at most")
        })?;
        let node = Node { namespace: Namespace::new()?, address: address(self.nodes + 1) };
        let (port, there) = (format!("port{}", self.nodes), node.namespace.holder.id());
        ip(&format!("link add {port} type veth peer name eth0 netns {there}"))?;
        ip(&format!("link set {port} master lan up"))?;
        node.inside(|| {
            ip(&format!("address add {}/24 dev eth0", node.address))?;
            ip("link set eth0 up")?;
            ip("link set lo up")
        })??;
        Ok(node)
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        let _ = enter_namespace(&self.home);
    }
}

impl Node {
    /// Its address.
    pub fn address(&self) -> IpAddr {
        self.address
    }

    /// Has this thread do something there. Processes that it starts stay there.
    pub fn inside<T>(&self, action: impl FnOnce() -> T) -> io::Result<T> {
        let here = File::open("/proc/thread-self/ns/net")?;
        self.namespace.enter()?;
        let result = action();
        enter_namespace(&here)?;
        Ok(result)
    }
}

/// A network namespace.
#[derive(Debug)]
struct Namespace {
    /// A `cat`, which ends with its standard input.
    holder: Child,
    file: File,
}

impl Namespace {
    fn new() -> io::Result<Self> {
        let mut cat = Command::new("unshare");
        cat.args(["--net", "cat"]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut holder = cat.spawn()?;
        // The echo proves that the process runs.
        if let (Some(input), Some(output)) = (&mut holder.stdin, &mut holder.stdout) {
            input.write_all(b"?").and_then(|()| output.read_exact(&mut [0]))?;
        }
        let file = File::open(format!("/proc/{}/ns/net", holder.id()))?;
        Ok(Namespace { holder, file })
    }

    fn enter(&self) -> io::Result<()> {
        enter_namespace(&self.file)
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        drop(self.holder.stdin.take());
        let _ = self.holder.wait();
    }
}

/// Moves this thread into a namespace, and no other thread of the process.
fn enter_namespace(namespace: &File) -> io::Result<()> {
    Ok(move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?)
}

fn address(number: u8) -> IpAddr {
    // Of the block for tests between networks (RFC 2544).
    Ipv4Addr::new(198, 18, 0, number).into()
}

/// Runs iproute2's `ip`.
fn ip(arguments: &str) -> io::Result<()> {
    let output = Command::new("ip").args(arguments.split(' ')).output()?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(io::Error::other(format!("ip {arguments}: {}", said.trim())));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::{
        net::{TcpListener, TcpStream},
        thread,
    };

    use super::*;
    use crate::kernel::{Feature, require};

    #[test]
    fn nodes_reach_the_bridge_and_each_other_from_their_own_addresses() {
        if !require(Feature::Root) || !require(Feature::Program("ip")) {
            return;
        }
        let mut network = Network::enter().unwrap();
        let (first, second) = (network.join().unwrap(), network.join().unwrap());
        let connects = |from: &Node, to: TcpListener| {
            let address = to.local_addr().unwrap();
            from.inside(|| drop(TcpStream::connect(address).unwrap())).unwrap();
            to.accept().unwrap().1.ip()
        };
        let bridge = TcpListener::bind((network.address(), 0)).unwrap();
        assert_eq!(connects(&first, bridge), first.address());
        let neighbour = first.inside(|| TcpListener::bind((first.address(), 0)).unwrap()).unwrap();
        assert_eq!(connects(&second, neighbour), second.address());
        // Refused: it is another machine's address.
        assert!(TcpListener::bind((second.address(), 0)).is_err());
        let bridge = network.address();
        drop(network);
        // This thread is back where it was, as all others always were.
        assert!(TcpListener::bind((bridge, 0)).is_err());
        assert!(thread::spawn(move || TcpListener::bind((bridge, 0)).is_err()).join().unwrap());
    }
}
