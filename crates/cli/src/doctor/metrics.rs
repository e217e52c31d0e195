//! Checks that metrics are served.

use std::{
    io::{self, Read, Write},
    net::TcpStream,
    os::unix::net::UnixStream,
    time::Duration,
};

use lazuli_metrics::Address;

use super::{Node, Row};

/// It is on this machine.
const DEADLINE: Duration = Duration::from_secs(1);

/// Most of an answer that is read: all of the metrics are some kilobytes.
const LIMIT: u64 = 1 << 20;

pub(super) fn serving(node: &Node<'_>) -> Option<Row> {
    const CHECK: &str = "metrics";
    let address = node.session.config.metrics.as_ref()?.address().ok()?;
    match scrape(&address) {
        Ok(page) if page.ends_with("# EOF\n") => {
            Some(Row::fine(CHECK, format!("served at {address}")))
        }
        Ok(_) => {
            let found = format!("another program answers at {address}");
            let fix = "[metrics] listen in /etc/lazuli/config.toml, then systemctl reload lazuli";
            Some(Row::advice(CHECK, found, fix))
        }
        Err(error) => {
            let found = format!("nothing answers at {address}: {error}");
            Some(Row::advice(CHECK, found, "systemctl reload lazuli; journalctl -u lazuli"))
        }
    }
}

fn scrape(address: &Address) -> io::Result<String> {
    match address {
        Address::Tcp(address) => {
            let mut address = *address;
            if address.ip().is_unspecified() {
                // Where to listen, not where to connect.
                address.set_ip(match address.is_ipv4() {
                    true => [127, 0, 0, 1].into(),
                    false => std::net::Ipv6Addr::LOCALHOST.into(),
                });
            }
            let stream = TcpStream::connect_timeout(&address, DEADLINE)?;
            stream.set_read_timeout(Some(DEADLINE))?;
            stream.set_write_timeout(Some(DEADLINE))?;
            ask(stream)
        }
        Address::Unix(path) => {
            let stream = UnixStream::connect(path)?;
            stream.set_read_timeout(Some(DEADLINE))?;
            stream.set_write_timeout(Some(DEADLINE))?;
            ask(stream)
        }
    }
}

fn ask(mut stream: impl Read + Write) -> io::Result<String> {
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n")?;
    let mut answer = Vec::new();
    stream.take(LIMIT).read_to_end(&mut answer)?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}
