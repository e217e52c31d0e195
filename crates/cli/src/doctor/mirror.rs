//! The mirror, and whether containerd asks it.

use std::{net::TcpStream, path::Path, time::Duration};

use toml::{Table, Value};

use super::{Node, Row};
use crate::{bounded_file, mirror};

/// It is on this machine.
const DEADLINE: Duration = Duration::from_secs(1);

/// The command that writes the files again.
const SET_UP: &str = "lazuli setup mirror";

pub(super) fn listening(node: &Node<'_>) -> Option<Row> {
    const CHECK: &str = "mirror";
    let Some(table) = &node.session.config.mirror else {
        return Some(Row::advice(
            CHECK,
            "not set up: pull secrets of Kubernetes do not reach Lazuli, and pulls begin at registries",
            "[mirror] in /etc/lazuli/config.toml, then systemctl reload lazuli; lazuli setup mirror",
        ));
    };
    let listen = table.listen;
    if let Err(error) = TcpStream::connect_timeout(&listen, DEADLINE) {
        let found = format!("nothing listens at {listen}: {error}");
        return Some(Row::advice(CHECK, found, "systemctl reload lazuli"));
    }
    Some(Row::fine(CHECK, format!("listens at {listen}")))
}

pub(super) fn hosts(node: &Node<'_>) -> Option<Row> {
    const CHECK: &str = "hosts";
    let table = node.session.config.mirror.as_ref()?;
    let directories = node.session.config.hosts_directories();
    let first = directories.split(':').find(|directory| !directory.is_empty())?;
    let file = Path::new(first).join("_default/hosts.toml");
    let url = format!("https://{}", table.listen);
    let names_it = |text: &str| {
        let hosts: Option<Table> = text.parse().ok();
        hosts.is_some_and(|hosts| host(&hosts, &url).is_some())
    };
    match bounded_file::read(&file) {
        Ok(Some(text)) if names_it(&text) => {
            Some(Row::fine(CHECK, format!("{} names the mirror", file.display())))
        }
        Ok(_) => {
            let found = format!("{} does not name the mirror", file.display());
            Some(Row::advice(CHECK, found, SET_UP))
        }
        Err(error) => Some(Row::advice(CHECK, format!("{error:#}"), SET_UP)),
    }
}

fn host<'a>(hosts: &'a Table, url: &str) -> Option<&'a Value> {
    hosts.get("host")?.get(url)
}

pub(super) fn certificates(node: &Node<'_>) -> Option<Row> {
    const CHECK: &str = "certificates";
    node.session.config.mirror.as_ref()?;
    let directory = mirror::directory(node.session);
    let names = ["ca.pem", "server.pem", "client.pem"];
    let missing: Vec<_> = names.into_iter().filter(|name| !directory.join(name).exists()).collect();
    if missing.is_empty() {
        return Some(Row::fine(CHECK, format!("in {}", directory.display())));
    }
    let found = format!("{} lacks {}", directory.display(), missing.join(", "));
    Some(Row::advice(CHECK, found, SET_UP))
}
