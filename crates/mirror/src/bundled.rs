//! Images that the node was delivered with, for pulls while their registry is away.
//!
//! They are for every client: a pod needs no login for an image that the operator has put on the
//! node. While the registry answers, it alone decides.

use std::sync::Arc;

use hyper::HeaderMap;
use lazuli_image::Digest;
use lazuli_registry::{Document, Layout, Pull as _, Reference, Selector};
use tokio::time::Instant;

use crate::{
    ANSWER_LIMIT, Mirror,
    manifests::lazy,
    reply::{Problem, Reply},
    sessions::Session,
};

impl Mirror {
    /// The manifest that `reference` names, from the registry, or while it is away, from the
    /// bundle.
    pub(crate) async fn manifest_or_bundled(
        self: &Arc<Self>,
        session: &Arc<Session>,
        reference: &Reference,
    ) -> Result<Document, Problem> {
        let started = Instant::now();
        let why = match self.manifest(session, reference).await {
            Err(Problem::Away(why)) => why,
            answer => return answer,
        };
        if !self.is_late_itself(session, started)
            && let Some(document) = self.bundled_manifest(session, reference).await
        {
            session.was_away(started);
            tracing::info!(%reference, why, "the registry is away: sent the bundle's manifest");
            self.counters.stale();
            return Ok(document);
        }
        Err(self.unanswered(session, reference, why).await)
    }

    async fn bundled_manifest(&self, session: &Session, reference: &Reference) -> Option<Document> {
        let layout = self.bundle_of(reference)?;
        let document = layout.document(None).await.ok()?;
        Some(match reference.selector() {
            Selector::Tag(_) => lazy(self, session, reference, &layout, document).await,
            Selector::Digest(_) => document,
        })
    }

    /// The same for a blob.
    pub(crate) async fn blob_or_bundled(
        self: &Arc<Self>,
        session: &Arc<Session>,
        digest: Digest,
        headers: &HeaderMap,
        is_head: bool,
    ) -> Result<Reply, Problem> {
        let Some(layout) = self.bundle_of(&session.reference) else {
            return self.blob(session, digest, headers, is_head).await;
        };
        let started = Instant::now();
        let why = match self.blob(session, digest, headers, is_head).await {
            Err(Problem::Away(why)) if !self.is_late_itself(session, started) => why,
            answer => return answer,
        };
        let bundled = Arc::new(session.bundled(layout));
        let answer = self.blob(&bundled, digest, headers, is_head).await;
        let answer = answer.map_err(|_| Problem::Away(why))?;
        session.was_away(started);
        self.counters.stale();
        Ok(answer)
    }

    /// Returns whether a question of `started` may have had no answer in time because it waited for
    /// other fetches, and not for the registry.
    fn is_late_itself(&self, session: &Session, started: Instant) -> bool {
        started.elapsed() >= ANSWER_LIMIT && session.has_heard_since(started)
    }

    fn bundle_of(&self, reference: &Reference) -> Option<Layout> {
        Layout::in_bundle(self.bundle.as_ref()?, reference)
    }

    /// Whether to leave a registry alone that was away a moment ago: the bundle may answer instead.
    pub(crate) fn rests(&self, session: &Session) -> Option<Problem> {
        let is_away = session.is_away() && self.bundle_of(&session.reference).is_some();
        is_away.then(|| Problem::Away("it was away a moment ago".to_owned()))
    }
}
