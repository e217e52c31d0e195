//! Connections that are opened before they are needed.

use std::{future::Future, sync::Arc, time::Duration};

use futures_util::{
    FutureExt as _,
    future::{BoxFuture, Shared},
};
use tokio::time::{sleep, timeout};

use crate::transport::health::{Health, NEAR_AT_FIRST};

/// Maximum wait for the connections after the first answer. They started [`NEAR_AT_FIRST`] later
/// than its request, and opening many takes longer than one.
const BEHIND: Duration = Duration::from_millis(10);

/// Connections being opened to a server during the first request; none by default. Clones wait for
/// the same connections.
#[derive(Clone, Debug, Default)]
pub struct Preconnect(Option<(Arc<Health>, Shared<BoxFuture<'static, ()>>)>);

impl Preconnect {
    /// Has `open` done, unless the server turns out to be near.
    pub(crate) fn begin(
        server: Arc<Health>,
        open: impl Future<Output = ()> + Send + 'static,
    ) -> Self {
        let asked = server.clone();
        let opening = tokio::spawn(async move {
            // A near server has answered by then; opening connections earlier would have delayed
            // that answer.
            sleep(NEAR_AT_FIRST).await;
            if !asked.is_near() {
                open.await;
            }
        });
        // Goes on if nobody waits for it.
        Preconnect(Some((server, opening.map(drop).boxed().shared())))
    }

    /// Waits briefly until the connections are open. Call it when the first answer has arrived:
    /// requests that come too early would open as many connections again, and wait for those.
    pub async fn done(self) {
        if let Some((server, opening)) = self.0
            && !server.is_near()
        {
            let _ = timeout(BEHIND, opening).await;
        }
    }
}
