//! A registry with an image, and nodes that mount it, each with a Dragonfly daemon.

use std::{
    fs, io,
    ops::Range,
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use lazuli_testkit::{
    dragonfly::{Daemon, Swarm},
    oci::{Compression, Image as Source, Layer},
    odd,
    registry::{FakeRegistry, Login},
};

use crate::lazuli::Lazuli;

/// Files of the image; each is one chunk, and one half of them is in each blob.
pub(super) const FILES: usize = 40;

/// Decoded bytes of a file, which do not compress.
const SIZE: usize = 200_000;

/// Bytes of a piece: a file is in several of them.
const PIECE: u64 = 64 << 10;

/// Only read data is requested.
pub(super) const FETCH: &str = "[fetch]\namplify_bytes = 0\ndeadline_seconds = 20\n";

/// With background fetches disabled.
pub(super) const QUIET: &str = "[prefetch]\nahead = \"nothing\"\nrest_bytes_per_second = 0\n";

/// An image of two blobs, and daemons that know each other.
pub(super) struct Image {
    pub(super) registry: FakeRegistry,
    pub(super) swarm: Swarm,
    pub(super) name: String,
}

/// A node with a daemon.
pub(super) struct Node {
    pub(super) lazuli: Lazuli,
    pub(super) daemon: Daemon,
}

impl Image {
    pub(super) fn new() -> Self {
        Self::of_files(SIZE)
    }

    /// With files of `size` bytes.
    pub(super) fn of_files(size: usize) -> Self {
        let registry = FakeRegistry::start().unwrap();
        let lazuli = Lazuli::new();
        let tar = |numbers: Range<usize>| {
            let mut tar = tar::Builder::new(Vec::new());
            for number in numbers {
                let content = odd::random(number as u64, size);
                let mut header = tar::Header::new_ustar();
                header.set_size(size as u64);
                header.set_mode(0o644);
                tar.append_data(&mut header, format!("file-{number:02}"), &content[..]).unwrap();
            }
            Layer::new(tar.into_inner().unwrap(), Compression::None)
        };
        let layers = [tar(0..FILES / 2), tar(FILES / 2..FILES)];
        Source::new(layers).write_layout(&lazuli.path("source"), "x").unwrap();
        let name = format!("{}/app:1", registry.host());
        lazuli.ok(["convert", "oci:source:x", &name]);
        registry.reset_stats();
        Image { registry, swarm: Swarm::with_pieces_of(PIECE), name }
    }

    /// A stopped node with `config` and the address of its daemon; `credentials`: whether it shows
    /// them to the daemon.
    pub(super) fn node(&self, config: &str, credentials: bool) -> Node {
        self.node_with(config, credentials, false)
    }

    /// A stopped node that uses the daemon's socket too, without credentials.
    pub(super) fn node_with_socket(&self, config: &str) -> Node {
        self.node_with(config, false, true)
    }

    fn node_with(&self, config: &str, credentials: bool, has_socket: bool) -> Node {
        let (lazuli, daemon) = (Lazuli::new(), self.swarm.daemon().unwrap());
        let (proxy, health) = (daemon.proxy(), daemon.health());
        let mut p2p = format!(
            "[p2p]\nengine = \"dragonfly\"\nproxy = \"{proxy}\"\nhealth = \"{health}\"\ncredentials = {credentials}\n"
        );
        if has_socket {
            let (socket, links) = (lazuli.path("dfdaemon.sock"), lazuli.directory("links"));
            daemon.listen_at(&socket).unwrap();
            p2p += &format!("socket = {socket:?}\nlinks = {links:?}\n");
        }
        lazuli.configure_all(&format!("{config}\n{p2p}"));
        let login = r#"{"username": "joe", "password": "secret"}"#;
        let logins = format!(r#"{{"auths": {{"{}": {login}}}}}"#, self.registry.host());
        fs::write(lazuli.directory("docker").join("config.json"), logins).unwrap();
        lazuli.directory("mnt");
        Node { lazuli, daemon }
    }

    pub(super) fn mount(&self, node: &Node) {
        node.lazuli.ok(["mount", &self.name, node.mountpoint().to_str().unwrap()]);
    }

    /// Requires a login from now on, which all nodes have.
    pub(super) fn require_login(&self) {
        self.registry.require(Login::Basic("joe".into(), "secret".into()));
    }

    /// Requires a token from now on, which any client gets without a login.
    pub(super) fn require_token(&self, node: &Node) {
        self.registry.require(Login::Bearer(String::new(), String::new()));
        fs::remove_file(node.lazuli.path("docker/config.json")).unwrap();
    }

    /// Stored bytes of all its data.
    pub(super) fn size(&self) -> u64 {
        (FILES * SIZE) as u64
    }
}

impl Node {
    pub(super) fn mountpoint(&self) -> PathBuf {
        self.lazuli.path("mnt")
    }

    /// Reads a file, which has to have the right bytes if it has any.
    pub(super) fn try_read(&self, number: usize) -> io::Result<()> {
        let content = fs::read(self.mountpoint().join(format!("file-{number:02}")))?;
        assert!(content == odd::random(number as u64, content.len()), "file {number} is wrong");
        Ok(())
    }

    #[track_caller]
    pub(super) fn read(&self, number: usize) {
        self.try_read(number).unwrap_or_else(|error| panic!("file {number}: {error}"));
    }

    /// Reads files until the daemon delivers one, and returns the duration in seconds.
    pub(super) fn returns(&self, numbers: Range<usize>) -> f64 {
        let (started, served) = (Instant::now(), self.daemon.stats().served);
        for number in numbers {
            self.read(number);
            if self.daemon.stats().served > served {
                return started.elapsed().as_secs_f64();
            }
            thread::sleep(Duration::from_millis(250));
        }
        panic!("the daemon is not asked any more");
    }

    pub(super) fn chunks_ready(&self) -> u64 {
        self.lazuli.mount_status(&self.mountpoint())["chunks_ready"].as_u64().unwrap()
    }
}
