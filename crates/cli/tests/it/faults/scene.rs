//! A registry, its mirrors, and an image of them that is mounted.

use std::path::PathBuf;

use lazuli_image::Digest;
use lazuli_testkit::{
    odd,
    registry::{FakeRegistry, Login},
};
use serde_json::Value;

use crate::lazuli::Lazuli;

/// A reader's result. Wrong bytes are not an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Seen {
    Right,
    Eio,
}

impl Seen {
    pub(super) fn text(self) -> &'static str {
        match self {
            Seen::Right => "right bytes",
            Seen::Eio => "EIO",
        }
    }
}

pub(super) struct Scene {
    pub(super) lazuli: Lazuli,
    pub(super) registry: FakeRegistry,
    pub(super) mirrors: Vec<FakeRegistry>,
    mountpoint: PathBuf,
}

/// Decoded bytes of each file, which is one chunk, so that reading one file is one request.
const SIZE: usize = 300_000;

/// The files and their seeds.
const FILES: [(&str, u64); 3] = [("first", 1), ("second", 2), ("third", 3)];

impl Scene {
    /// With the image mounted.
    pub(super) fn new(deadline: u64, mirrors: usize) -> Self {
        let scene = Self::prepare(deadline, mirrors);
        scene.mount();
        scene
    }

    /// Without a daemon yet.
    pub(super) fn prepare(deadline: u64, mirrors: usize) -> Self {
        let lazuli = Lazuli::new();
        let start = || {
            let server = FakeRegistry::start().unwrap();
            // Any client gets a token, for a time.
            server.require(Login::Bearer(String::new(), String::new()));
            server.redirect_blobs();
            server
        };
        let registry = start();
        let mirrors: Vec<_> = (0..mirrors).map(|_| start()).collect();
        let source = lazuli.directory("source");
        for (name, seed) in FILES {
            std::fs::write(source.join(name), content(seed)).unwrap();
        }
        for server in mirrors.iter().chain([&registry]) {
            lazuli.ok(["convert", "dir:source", &format!("{}/app:1", server.host())]);
        }
        let urls: Vec<_> = mirrors.iter().map(|m| format!("\"http://{}\"", m.host())).collect();
        let config = format!(
            "[fetch]\namplify_bytes = 0\ndeadline_seconds = {deadline}\n\n\
             [[registry]]\nhost = \"{}\"\nmirrors = [{}]\n",
            registry.host(),
            urls.join(", ")
        );
        lazuli.configure(&config);
        let mountpoint = lazuli.directory("mnt");
        Scene { lazuli, registry, mirrors, mountpoint }
    }

    pub(super) fn mount(&self) {
        self.lazuli.ok(["mount", &self.image(), self.mountpoint.to_str().unwrap()]);
        assert_eq!(self.status()["driver"], "fanotify");
    }

    fn image(&self) -> String {
        format!("{}/app:1", self.registry.host())
    }

    /// Mirrors, then the registry.
    pub(super) fn servers(&self) -> impl Iterator<Item = &FakeRegistry> {
        self.mirrors.iter().chain([&self.registry])
    }

    pub(super) fn status(&self) -> Value {
        self.lazuli.mount_status(&self.mountpoint)
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.mountpoint.join(name)
    }

    /// Reads a file of the mount.
    pub(super) fn read(&self, name: &str) -> Seen {
        match std::fs::read(self.path(name)) {
            Ok(bytes) => {
                let (_, seed) = FILES.into_iter().find(|file| file.0 == name).unwrap();
                assert!(bytes == content(seed), "{name} has wrong bytes");
                Seen::Right
            }
            Err(error) => {
                assert_eq!(error.raw_os_error(), Some(5), "{name}: {error}");
                Seen::Eio
            }
        }
    }

    /// The blob with the data of all files, and its bytes.
    pub(super) fn blob(&self) -> (Digest, Vec<u8>) {
        let raw = self.registry.manifest("app", "1").unwrap();
        let manifest: Value = serde_json::from_slice(&raw).unwrap();
        let digest = manifest["layers"][0]["digest"].as_str().unwrap().parse().unwrap();
        (digest, self.registry.blob("app", &digest).unwrap())
    }
}

/// Half of it compresses well.
pub(super) fn content(seed: u64) -> Vec<u8> {
    let mut content = odd::random(seed, SIZE / 2);
    content.resize(SIZE, seed as u8);
    content
}
