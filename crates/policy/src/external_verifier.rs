//! External verifiers, such as notation: programs that speak containerd's image verifier protocol.
//!
//! ```text
//! PROGRAM -name r.example/app:1 -digest sha256:…
//!         -stdin-media-type application/vnd.oci.descriptor.v1+json
//!     the descriptor on standard input; 0: it may run; the reason on standard output
//! ```

use std::{fmt, path::PathBuf, process::Stdio, time::Duration};

use lazuli_image::oci::Descriptor;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    process::Command,
    time::timeout,
};

/// The media type of a verifier program's input.
pub const DESCRIPTOR: &str = "application/vnd.oci.descriptor.v1+json";

/// Bytes of a reason that are read, as in containerd.
const REASON_LIMIT: u64 = 16 << 10;

/// A verifier.
#[derive(Debug)]
pub(crate) struct ExternalVerifier {
    pub(crate) path: PathBuf,
    pub(crate) timeout: Duration,
}

impl fmt::Display for ExternalVerifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.path.display().fmt(f)
    }
}

impl ExternalVerifier {
    /// Asks whether the image may run. An error is the reason why not.
    pub(crate) async fn ask(&self, name: &str, image: &Descriptor) -> Result<(), String> {
        match timeout(self.timeout, self.run(name, image)).await {
            Ok(answer) => answer,
            Err(_) => Err(format!("{self} did not answer within {} s", self.timeout.as_secs())),
        }
    }

    async fn run(&self, name: &str, image: &Descriptor) -> Result<(), String> {
        let failed = |error: &dyn fmt::Display| format!("{self}: {error}");
        let digest = image.digest.to_string();
        let mut child = Command::new(&self.path)
            .args(["-name", name, "-digest", &digest, "-stdin-media-type", DESCRIPTOR])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .map_err(|error| failed(&error))?;
        let descriptor = serde_json::to_vec(image).map_err(|error| failed(&error))?;
        if let Some(mut input) = child.stdin.take() {
            // Ignore errors: a verifier need not read its input.
            let _ = input.write_all(&descriptor).await;
        }
        let mut reason = Vec::new();
        if let Some(output) = child.stdout.take() {
            output
                .take(REASON_LIMIT)
                .read_to_end(&mut reason)
                .await
                .map_err(|error| failed(&error))?;
        }
        let status = child.wait().await.map_err(|error| failed(&error))?;
        if status.success() {
            return Ok(());
        }
        let reason = String::from_utf8_lossy(&reason);
        Err(format!("{self} refuses it ({status}): {}", reason.trim()))
    }
}
