//! The control socket: its server, its client, and where sockets are.

pub(super) mod client;
pub(super) mod server;
pub(super) mod socket;
