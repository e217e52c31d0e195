//! Making chunks ready without the network, with it as the last resort.

use std::sync::Arc;

use tokio::time::Instant;

use super::{
    super::single_flight::Lease,
    CachedBlob,
    transfer::{self, Transfer},
};
use crate::{error::ReadError, sharing::workers::Priority};

/// A way to make a chunk ready without any network: whether it is now. Blocks.
pub(super) type Locally = fn(&Arc<CachedBlob>, usize) -> Result<bool, ReadError>;

/// Makes some chunks ready `locally`, and fetches those that are not and that a reader waits for.
pub(super) async fn settle(
    blob: Arc<CachedBlob>,
    leases: Vec<Lease>,
    priority: Priority,
    locally: Locally,
) {
    let worker = blob.clone();
    let attempt = move |lease: Lease| match locally(&worker, lease.chunk()) {
        // Dropping the lease sends readers that joined meanwhile to the network.
        Ok(false) => lease.is_wanted().then_some(lease),
        result => {
            lease.finish(result.map(|_| ()));
            None
        }
    };
    let attempt_all = move || leases.into_iter().filter_map(attempt).collect::<Vec<_>>();
    let missing = blob.run(priority, attempt_all).await;
    for lease in missing {
        let deadline = Instant::now() + blob.settings.deadline;
        let transfer = Transfer::on_demand(&blob, vec![lease], deadline);
        blob.workers.runtime().spawn(transfer::run(blob.clone(), transfer));
    }
}
