use std::path::PathBuf;

use anyhow::Result;
use clap::Args;

use crate::kubernetes::Reporter;

/// Report the state of a Kubernetes node to its API server
///
/// For the pod of the DaemonSet; docs/kubernetes.md describes the reports.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// The node's name
    #[arg(long)]
    node: String,
    /// The directory with the pod's token and ca.crt
    #[arg(
        long,
        value_name = "DIR",
        default_value = "/var/run/secrets/kubernetes.io/serviceaccount"
    )]
    service_account: PathBuf,
    /// A program whose verbs `doctor` and `status` print what `lazuli` prints with --json on the
    /// node
    program: PathBuf,
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let Arguments { node, service_account, program } = arguments;
    let reporter = Reporter {
        node: node.clone(),
        program: program.clone(),
        service_account: service_account.clone(),
    };
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(reporter.run())
}
