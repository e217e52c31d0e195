//! Running an image once, on a node of its own that is gone afterwards, to see what a start reads.

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
use lazuli_runtime::{daemon::Client, prefetch::Traces};
use rustix::process::{Pid, Signal, kill_process};
use tokio::{
    process::{Child, Command},
    time::{sleep, timeout},
};

use crate::{
    container::Bundle,
    interrupt::{HeldSignals, Signals},
    push,
};

/// How often it is looked whether the start is over.
const STEP: Duration = Duration::from_millis(200);

/// How long a command may take to end that was asked to: what it did was for show only.
const END: Duration = Duration::from_secs(2);

/// How long the daemon may take to write down what it saw.
const NOTES: Duration = Duration::from_secs(10);

/// Nothing arrives that nobody asks for: about a blob that is complete the kernel asks no more, so
/// nobody would see what is read of it.
const CONFIG: &str =
    "[fetch]\namplify_bytes = 0\n[prefetch]\nahead = \"record\"\nrest_bytes_per_second = 0\n";

/// What the daemon may serve.
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
    let directory = tempfile::Builder::new().prefix(prefix).tempdir_in(push::scratch())?;
    let layout = LayoutName { directory: directory.path().join("image"), image: None };
    let layout = ImageName::Layout(layout);
    let manifest = image.digest;
    let repository = lazuli_registry::open(&layout, &Options::default())?;
    push::push(&*repository, blobs, bootstrap, image, None, None).await?;
    let config = directory.path().join("config.toml");
    // The image's name here is none that a policy knows; the source has passed it under its own.
    let policy = directory.path().join("policy.toml");
    let text = format!("policy = {policy:?}\n{CONFIG}");
    for (path, text) in [(&policy, POLICY), (&config, &text)] {
        fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    let node = Node { root: directory.path().join("root"), config };
    let traced = node.run(&layout, &manifest, command).await;
    // Whatever is left of the container goes before the daemon, and the daemon before the
    // directory, whatever fails.
    let swept = if node.root.exists() { Bundle::create(&node.root).map(drop) } else { Ok(()) };
    let stopped = Client::connect(&node.root).map_or(Ok(()), |daemon| daemon.stop(true));
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
        // From here on signals end the container, not this process, which has to clean up after it.
        let _held = HeldSignals::new();
        let mut signals = Signals::new()?;
        let mut child = Command::new("/proc/self/exe")
            .arg0("lazuli")
            .arg("--root")
            .arg(&self.root)
            .arg("--config")
            .arg(&self.config)
            // What else runs on this machine, and what listens there, does not change what is hot.
            // And the image is a stranger's: it gets no power over the machine that converts it.
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

/// Ends `lazuli run`, if it does not do so by itself.
async fn end(child: &mut Child, root: &Path) -> Result<()> {
    let asked = Instant::now();
    if let Some(pid) = child.id().and_then(|pid| Pid::from_raw(pid.cast_signed())) {
        let _ = kill_process(pid, Signal::TERM);
    }
    // A first process without a handler does not hear of it.
    if timeout(END, child.wait()).await.is_err() {
        tracing::info!(root = %root.display(), after = ?asked.elapsed(), "the command does not end");
        child.kill().await.context("cannot end the image's run")?;
    }
    Ok(())
}
