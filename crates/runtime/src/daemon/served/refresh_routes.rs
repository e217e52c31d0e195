//! Keeps the routes of images in use current.

use std::{sync::Weak, time::Duration};

use crate::daemon::node::Node;

/// Pause between two looks at the files: well within the deadline of a reader that waits for an
/// operator to put them right.
const LOOK: Duration = Duration::from_secs(5);

/// Keeps the routes of images in use current, for as long as the node serves.
pub(in crate::daemon) async fn keep_current(node: Weak<Node>) {
    loop {
        tokio::time::sleep(LOOK).await;
        let Some(node) = node.upgrade() else { return };
        let images = node.images.all().await;
        // Files are read.
        let refreshed = tokio::task::spawn_blocking(move || {
            images.iter().for_each(|image| image.refresh());
        });
        refreshed
            .await
            .unwrap_or_else(|error| tracing::error!(%error, "registries stay as they were"));
    }
}
