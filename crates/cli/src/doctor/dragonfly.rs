//! The node's Dragonfly daemon.

use std::{
    net::{TcpStream, ToSocketAddrs as _},
    time::Duration,
};

use super::{Node, Row};

/// It is on this machine.
const DEADLINE: Duration = Duration::from_secs(1);

pub(super) fn proxy(node: &Node<'_>) -> Option<Row> {
    const CHECK: &str = "dragonfly";
    let url = node.session.config.dragonfly_proxy()?;
    let address = url.split("://").last().unwrap_or(url).trim_end_matches('/');
    let addresses = address.to_socket_addrs().into_iter().flatten();
    let connected =
        addresses.into_iter().any(|at| TcpStream::connect_timeout(&at, DEADLINE).is_ok());
    if !connected {
        let found = format!("nothing listens at {url}: registries are asked instead");
        return Some(Row::advice(CHECK, found, "systemctl start dfdaemon, or take [p2p] away"));
    }
    Some(Row::fine(CHECK, format!("{url} listens")))
}
