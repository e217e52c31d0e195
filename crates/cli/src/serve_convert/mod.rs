//! Makes images lazy that are pushed to a registry, as its events report them.
//!
//! ```text
//! server ─▶ events ─▶ queue ─▶ work ─┬ lacking   which form the registry lacks
//!   │         │      ┌─▶│            ├ child     `lazuli copy`, `lazuli index`, `lazuli convert`
//!   │         │    sync │            └ deleted   what was stored beside a deleted image
//!   │         │      │  └ a file for each tag
//!   │         │      └ other registries, every so often
//!   │         └ names, parsed; in the operator's repositories
//!   └ HTTP with a secret
//! ```
//!
//! An event only says where to look: what is done depends on what the registry has then. So events
//! may be repeated, late or forged, and those that our own pushes cause end without work.

mod child;
mod deleted;
mod events;
mod lacking;
mod queue;
mod repositories;
mod server;
mod sync;
mod work;

use std::{path::PathBuf, sync::Arc, time::Duration};

use anyhow::{Context as _, Result};
use lazuli_metrics::{Address, answer_all};
use lazuli_registry::{ImageName, Reference};
use tokio::sync::watch;

use self::{queue::Queue, server::Receiver, work::Worker};
use crate::{Session, image::sign::Sign, interrupt::Signals, path_context::PathContext as _};

pub(crate) use self::{
    repositories::{Repositories, is_registry},
    sync::RepositorySync,
};

/// The form that images get.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Form {
    /// An index beside the unchanged image.
    #[default]
    Index,
    /// The tag becomes an index of the image and its lazy form.
    Both,
}

/// The table `[convert]`, checked.
#[derive(Debug)]
pub(crate) struct Settings {
    pub(crate) listen: Address,
    pub(crate) secret_file: PathBuf,
    /// Host and port of the registry, as images name it. No event names another.
    pub(crate) registry: String,
    pub(crate) repositories: Repositories,
    /// Repositories that follow those of other registries.
    pub(crate) syncs: Vec<RepositorySync>,
    pub(crate) form: Form,
    /// The private key for statements and signatures.
    pub(crate) sign: Option<PathBuf>,
    /// The queue, and scratch files.
    pub(crate) directory: PathBuf,
    /// How many jobs are run at a time.
    pub(crate) jobs: usize,
    /// Time limit for a job.
    pub(crate) deadline: Duration,
}

impl Settings {
    /// Returns whether an image is in the repositories, or a copy.
    fn has(&self, image: &Reference) -> bool {
        let name = image.repository();
        let is_copy =
            |sync: &RepositorySync| sync.to == name && image.tag().is_none_or(|tag| sync.has(tag));
        image.registry() == self.registry
            && (self.repositories.has(name) || self.syncs.iter().any(is_copy))
    }
}

/// Time for children to clean up when the server is asked to end.
const LEAVING: Duration = Duration::from_secs(10);

/// Waits until the server leaves.
async fn leaves(leaving: &mut watch::Receiver<bool>) {
    // An error means that it has left.
    let _ = leaving.wait_for(|leaving| *leaving).await;
}

/// Receives events and works on them until a signal asks this process to end.
///
/// # Errors
/// It cannot begin: secret, key, directory or address cannot be used.
pub(crate) fn serve(session: &Session, settings: Settings) -> Result<()> {
    // Events are short, and the work is done by children. They have to be started by a thread that
    // lives as long as this process, since the kernel ends them with it: here it is the main one.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let secret = server::read_secret(&settings.secret_file)?;
    let access = session.config.registries()?;
    // A key that cannot be used is found now, and not by every job.
    let any: ImageName = format!("{}/any", settings.registry).parse()?;
    Sign::with(settings.sign.clone()).signer(&any, &access).context("convert.sign")?;
    let queue = Arc::new(Queue::open(&settings.directory)?);
    runtime.block_on(async {
        let mut signals = Signals::new()?;
        let address = settings.listen.clone();
        let listener = address.listen().await.cannot("listen at", address.to_string())?;
        let settings = Arc::new(settings);
        let receiver = Arc::new(Receiver::new(secret, settings.clone(), queue.clone()));
        let (leave, leaving) = watch::channel(false);
        let worker =
            Arc::new(Worker::new(session, settings.clone(), queue.clone(), access.clone()));
        let workers: Vec<_> = (0..settings.jobs)
            .map(|_| tokio::spawn(worker.clone().run(leaving.clone())))
            .collect();
        for sync in settings.syncs.iter().cloned() {
            let registry = settings.registry.clone();
            tokio::spawn(sync.follow(registry, queue.clone(), access.clone(), leaving.clone()));
        }
        let (registry, jobs) = (&settings.registry, queue.len());
        tracing::info!(%address, %registry, jobs, "receiving events");
        tokio::select! {
            () = answer_all(listener, server::LIMITS, move |request| receiver.clone().answer(request)) => {}
            signal = signals.next() => tracing::info!(signal = signal.as_raw(), "leaving"),
        }
        // Nothing is received any more; jobs in progress stay in the queue.
        leave.send_replace(true);
        let ended = futures_util::future::join_all(workers);
        if tokio::time::timeout(LEAVING, ended).await.is_err() {
            tracing::warn!("jobs did not end within {LEAVING:?}");
        }
        Ok(())
    })
}
