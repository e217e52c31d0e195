//! `--trace-run`: runs an image once on a temporary node, to record the reads of its start.

use std::{
    ffi::OsString,
    fs,
    os::unix::process::ExitStatusExt as _,
    path::Path,
    process::ExitStatus,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use lazuli_builder::BootstrapLayer;
use lazuli_image::{Digest, Trace, oci::LazyImage};
use lazuli_registry::{ImageName, LayoutName, Options};
use lazuli_runtime::{
    daemon::{Client, Stop},
    prefetch::Traces,
};
use rustix::process::{Pid, Signal, kill_process};
use tokio::{
    process::{Child, Command},
    time::{sleep, timeout},
};

use crate::{
    container::Bundle,
    image::{push, scratch},
    interrupt::{HeldSignals, Signals},
    path_context::PathContext as _,
};

/// Interval for checking whether the start is over.
const STEP: Duration = Duration::from_millis(200);

/// Time for the command to end after SIGTERM. Its result is discarded anyway.
const END: Duration = Duration::from_secs(2);

/// Time for the daemon to write the trace.
const NOTES: Duration = Duration::from_secs(10);

/// Only demand fetches: the kernel sends no events for a complete blob, so prefetched chunks would
/// be missing from the trace.
const CONFIG: &str =
    "[fetch]\namplify_bytes = 0\n[prefetch]\nahead = \"record\"\nrest_bytes_per_second = 0\n";

/// The temporary node's policy, see [`run`].
const POLICY: &str = "default = \"accept\"\n";

/// The trace of one start of `image`, which runs `command`, or its own without one.
///
/// # Errors
/// The command failed before its start was over, or nothing was read; or a signal asks this process
/// to end.
pub(crate) async fn run(
    blobs: Vec<push::Blob>,
    bootstrap: BootstrapLayer,
    image: LazyImage,
    command: &[OsString],
) -> Result<Trace> {
    let prefix = "lazuli-trace-";
    let directory = tempfile::Builder::new().prefix(prefix).tempdir_in(scratch::parent())?;
    let layout = LayoutName { directory: directory.path().join("image"), image: None };
    let layout = ImageName::Layout(layout);
    let manifest = image.digest;
    let repository = lazuli_registry::open(&layout, &Options::default())?;
    push::push(&*repository, blobs, bootstrap, image, None, None).await?;
    let config = directory.path().join("config.toml");
    // No policy knows the image's name here; the source has been admitted under its own name.
    let policy = directory.path().join("policy.toml");
    let text = format!("policy = {policy:?}\n{CONFIG}");
    for (path, text) in [(&policy, POLICY), (&config, &text)] {
        fs::write(path, text).cannot("write", path)?;
    }
    let node = Node { root: directory.path().join("root"), config };
    let traced = node.run(&layout, &manifest, command).await;
    // Clean up in this order even after a failure: container, daemon, directory.
    let swept = if node.root.exists() { Bundle::create(&node.root).map(drop) } else { Ok(()) };
    let stopped = Client::connect(&node.root).map_or(Ok(()), |daemon| daemon.stop(Stop::Forced));
    let traced = traced?;
    swept?;
    stopped?;
    Ok(traced)
}

/// A state directory and its configuration.
struct Node {
    root: std::path::PathBuf,
    config: std::path::PathBuf,
}

impl Node {
    async fn run(
        &self,
        image: &ImageName,
        manifest: &Digest,
        command: &[OsString],
    ) -> Result<Trace> {
        // From here on, signals end the container, and this process cleans up after it.
        let _held = HeldSignals::new();
        let mut signals = Signals::new()?;
        let mut child = Command::new("/proc/self/exe")
            .arg0("lazuli")
            .arg("--root")
            .arg(&self.root)
            .arg("--config")
            .arg(&self.config)
            // Isolated from the network, so that services of this machine don't influence the
            // trace, and unprivileged, because the image is untrusted.
            .args(["run", "--network", "none", "--user-namespace", &image.to_string(), "--"])
            .args(command)
            .spawn()
            .context("cannot run the image")?;
        let traces = Traces::of(&self.root);
        let status = tokio::select! {
            status = child.wait() => status?,
            trace = recorded(&traces, manifest) => {
                end(&mut child, &self.root).await?;
                return Ok(trace);
            }
            _ = signals.next() => {
                end(&mut child, &self.root).await?;
                bail!("interrupted")
            }
        };
        if !status.success() {
            bail!("the image's run failed with {}", describe(status));
        }
        let recorded = timeout(NOTES, recorded(&traces, manifest)).await;
        recorded.ok().context("the image's run read nothing of it")
    }
}

fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, signal) => format!("signal {}", signal.unwrap_or_default()),
    }
}

/// Waits for the trace.
async fn recorded(traces: &Traces, manifest: &Digest) -> Trace {
    loop {
        if let Some(trace) = traces.get(manifest) {
            return trace;
        }
        sleep(STEP).await;
    }
}

/// Ends `lazuli run`: SIGTERM, then SIGKILL.
async fn end(child: &mut Child, root: &Path) -> Result<()> {
    let asked = Instant::now();
    if let Some(pid) = child.id().and_then(|pid| Pid::from_raw(pid.cast_signed())) {
        let _ = kill_process(pid, Signal::TERM);
    }
    // The kernel doesn't deliver it to a container's first process without a handler.
    if timeout(END, child.wait()).await.is_err() {
        tracing::info!(root = %root.display(), after = ?asked.elapsed(), "the command does not end");
        child.kill().await.context("cannot end the image's run")?;
    }
    Ok(())
}
