//! Debian's docker-registry on a loopback port.

use std::{
    net::TcpListener,
    path::Path,
    process::{Child, Command, Stdio},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use tempfile::TempDir;

pub(crate) struct Registry {
    child: Child,
    address: String,
    storage: Arc<TempDir>,
}

impl Registry {
    pub(crate) fn start() -> Self {
        Self::over(Arc::new(tempfile::tempdir().unwrap()), "")
    }

    /// A second registry with the same content, over TLS.
    pub(crate) fn with_tls(&self, certificate: &Path, key: &Path) -> Self {
        let (certificate, key) = (certificate.display(), key.display());
        let tls = format!("  tls: {{certificate: \"{certificate}\", key: \"{key}\"}}\n");
        Self::over(self.storage.clone(), &tls)
    }

    /// Sends its events to a port, with a secret.
    pub(crate) fn with_events(address: &str, secret: &str) -> Self {
        let events = format!(
            "notifications:\n  endpoints:\n    - name: lazuli\n      url: http://{address}/\n      \
             headers: {{Authorization: [Bearer {secret}]}}\n      timeout: 10s\n      threshold: 3\n      \
             backoff: 1s\n"
        );
        Self::over(Arc::new(tempfile::tempdir().unwrap()), &events)
    }

    fn over(storage: Arc<TempDir>, more: &str) -> Self {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let address = format!("127.0.0.1:{port}");
        let config = storage.path().join(format!("{port}.yml"));
        let text = format!(
            "version: 0.1\nlog: {{level: error}}\nstorage:\n  filesystem: {{rootdirectory: {}}}\n  \
             delete: {{enabled: true}}\nhttp:\n  addr: \"{address}\"\n{more}",
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
        let registry = Registry { child, address, storage };
        let started = Instant::now();
        while std::net::TcpStream::connect(&registry.address).is_err() {
            assert!(started.elapsed() < Duration::from_secs(20), "docker-registry does not listen");
            thread::sleep(Duration::from_millis(20));
        }
        registry
    }

    /// Its port of the loopback interface.
    pub(crate) fn port(&self) -> &str {
        self.address.rsplit(':').next().unwrap_or_default()
    }

    /// A reference to a repository in it.
    pub(crate) fn image(&self, name: &str) -> String {
        format!("{}/{name}", self.address)
    }

    /// Loses a blob, in all repositories.
    pub(crate) fn remove_blob(&self, digest: &str) {
        let hex = digest.strip_prefix("sha256:").unwrap();
        let blobs = self.storage.path().join("data/docker/registry/v2/blobs/sha256");
        std::fs::remove_dir_all(blobs.join(&hex[..2]).join(hex)).unwrap();
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
