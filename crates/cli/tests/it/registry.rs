//! Debian's docker-registry on a loopback port.

use std::{
    net::TcpListener,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use tempfile::TempDir;

pub(crate) struct Registry {
    child: Child,
    address: String,
    _storage: TempDir,
}

impl Registry {
    pub(crate) fn start() -> Self {
        let storage = tempfile::tempdir().unwrap();
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let address = format!("127.0.0.1:{port}");
        let config = storage.path().join("config.yml");
        let text = format!(
            "version: 0.1\nlog: {{level: error}}\nstorage:\n  filesystem: {{rootdirectory: {}}}\n  \
             delete: {{enabled: true}}\nhttp: {{addr: \"{address}\"}}\n",
            storage.path().join("data").display()
        );
        std::fs::write(&config, text).unwrap();
        let child = Command::new("docker-registry")
            .arg("serve")
            .arg(&config)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("docker-registry, which `make test` installs");
        let registry = Registry { child, address, _storage: storage };
        let started = Instant::now();
        while std::net::TcpStream::connect(&registry.address).is_err() {
            assert!(started.elapsed() < Duration::from_secs(20), "docker-registry does not listen");
            thread::sleep(Duration::from_millis(20));
        }
        registry
    }

    /// A reference to a repository in it.
    pub(crate) fn image(&self, name: &str) -> String {
        format!("{}/{name}", self.address)
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
