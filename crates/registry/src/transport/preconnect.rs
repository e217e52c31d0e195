//! Connections that are opened before they are needed.

use std::{future::Future, sync::Arc, time::Duration};

use tokio::{
    task::JoinHandle,
    time::{sleep, timeout},
};

use crate::transport::health::{Health, NEAR_AT_FIRST};

/// How long they are waited for when the first answer is here. They began so much later, and as
/// many at once take longer than one.
const BEHIND: Duration = Duration::from_millis(10);

/// Connections to a server that are being opened while it answers the first request; none by
/// default.
#[derive(Debug, Default)]
pub struct Preconnect(Option<(Arc<Health>, JoinHandle<()>)>);

impl Preconnect {
    /// Has `open` done, unless the server turns out to be near.
    pub(crate) fn begin(
        server: Arc<Health>,
        open: impl Future<Output = ()> + Send + 'static,
    ) -> Self {
        let asked = server.clone();
        let opening = tokio::spawn(async move {
            // A near one has answered by then, and would do so later if it had to take all of them
            // first.
            sleep(NEAR_AT_FIRST).await;
            if !asked.is_near() {
                open.await;
            }
        });
        Preconnect(Some((server, opening)))
    }

    /// To be called when the first answer is here. Waits until the connections are open, if that is
    /// soon: requests that come earlier would open as many again, and wait for them.
    pub async fn done(self) {
        if let Some((server, opening)) = self.0
            && !server.is_near()
        {
            let _ = timeout(BEHIND, opening).await;
        }
    }
}
