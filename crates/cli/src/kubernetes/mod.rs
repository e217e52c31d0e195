//! Reports this node to Kubernetes: a condition, events, and the end of a start-up taint.
//!
//! It runs in the DaemonSet's pod, beside the daemon and without a way into it: it asks `lazuli
//! doctor` and `lazuli status`, and talks to the API server with the pod's service account.

mod api;
mod condition;
mod events;
mod observe;
mod text;

use std::{path::PathBuf, time::Duration};

use anyhow::Result;

use self::{api::ApiServer, condition::Condition, events::Events, observe::observe};

/// Interval between looks, the same as that of the pod's readiness probe.
const PERIOD: Duration = Duration::from_secs(15);

/// A node and its reports.
#[derive(Debug)]
pub(crate) struct Reporter {
    /// Its name in the cluster.
    pub(crate) node: String,
    /// A program whose verbs `doctor` and `status` print what those of `lazuli` print with
    /// `--json`.
    pub(crate) program: PathBuf,
    /// A directory with the files `token` and `ca.crt`.
    pub(crate) service_account: PathBuf,
}

impl Reporter {
    /// Reports until the process is ended. Failures are retried with the next observation.
    ///
    /// # Errors
    /// The address of the API server is not in the environment.
    pub(crate) async fn run(&self) -> Result<()> {
        let server = ApiServer::in_cluster(self.service_account.clone())?;
        let mut events = Events::default();
        let mut last_failure = String::new();
        loop {
            let failure = match self.look(&server, &mut events).await {
                Ok(()) => String::new(),
                Err(error) => format!("{error:#}"),
            };
            // Once, however often it fails.
            if failure != last_failure && !failure.is_empty() {
                tracing::warn!(error = failure, "the state of this node is not reported");
            }
            last_failure = failure;
            tokio::time::sleep(PERIOD).await;
        }
    }

    async fn look(&self, server: &ApiServer, events: &mut Events) -> Result<()> {
        let observation = observe(&self.program).await;
        let node = server.node(&self.node).await?;
        let condition = Condition::of(&observation.rows);
        if let Some(patch) = condition.patch(&node) {
            server.patch_status(&self.node, &patch).await?;
            tracing::info!(status = %condition.status, reason = condition.reason, "LazyPulls");
        }
        if let Some(patch) = condition.untaint(&node) {
            server.patch(&self.node, &patch).await?;
            tracing::info!(taint = condition::TAINT, "the node's start-up taint is removed");
        }
        let Ok(status) = &observation.status else { return Ok(()) };
        let mut result = Ok(());
        for event in events.of(&self.node, status) {
            // A namespace that is being deleted refuses its events, so send all others before
            // returning the error.
            result = server.create_event(&event).await.and(result);
        }
        result
    }
}
