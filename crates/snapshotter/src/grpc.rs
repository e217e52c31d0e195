//! The gRPC service: containerd's requests and answers.

use std::{path::Path, pin::Pin, sync::Arc};

use tokio_stream::Stream;
use tonic::{Request, Response, Status};

use crate::{
    Images, Overview, SnapshotError,
    api::snapshots::{
        CleanupRequest, CommitSnapshotRequest, Info, Kind as ApiKind, ListSnapshotsRequest,
        ListSnapshotsResponse, MountsRequest, MountsResponse, PrepareSnapshotRequest,
        PrepareSnapshotResponse, RemoveSnapshotRequest, StatSnapshotRequest, StatSnapshotResponse,
        UpdateSnapshotRequest, UpdateSnapshotResponse, UsageRequest, UsageResponse,
        ViewSnapshotRequest, ViewSnapshotResponse, snapshots_server::Snapshots,
    },
    requests::{Snapshotter, Wanted},
    snapshotters::Snapshotters,
    store::{Kind, Snapshot},
};

/// Snapshots in one message of a list; far from the 4 MiB that a client takes.
const PAGE: usize = 100;

/// The service.
#[derive(Debug)]
pub(crate) struct Service(Arc<Snapshotters>);

impl Service {
    pub(crate) async fn open(
        state: &Path,
        files: Arc<dyn Images>,
        machines: Arc<dyn Images>,
    ) -> Result<Self, SnapshotError> {
        Ok(Service(Arc::new(Snapshotters::open(state, files, machines).await?)))
    }

    pub(crate) fn overview(&self) -> Overview {
        Overview(self.0.clone())
    }

    /// Runs a request as a task of its own: a disconnected client must not leave it half done.
    async fn run<T, F>(&self, name: &str, work: impl FnOnce(Snapshotter) -> F) -> Result<T, Status>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, SnapshotError>> + Send + 'static,
    {
        let snapshotter = self.0.named(name).await?.clone();
        let result = tokio::spawn(work(snapshotter)).await;
        let result = result.unwrap_or(Err(SnapshotError::Panicked));
        result.map_err(|error| {
            match &error {
                SnapshotError::AlreadyExists(_) | SnapshotError::NotFound(_) => {
                    tracing::debug!(%error, "request failed");
                }
                _ => tracing::warn!(%error, "request failed"),
            }
            error.into()
        })
    }
}

#[tonic::async_trait]
impl Snapshots for Service {
    async fn prepare(
        &self,
        request: Request<PrepareSnapshotRequest>,
    ) -> Result<Response<PrepareSnapshotResponse>, Status> {
        let PrepareSnapshotRequest { snapshotter, key, parent, labels } = request.into_inner();
        let wanted = Wanted { key, parent: named(parent), labels: labels.into_iter().collect() };
        let mounts = self.run(&snapshotter, |s| async move { s.prepare(wanted).await }).await?;
        Ok(Response::new(PrepareSnapshotResponse { mounts }))
    }

    async fn view(
        &self,
        request: Request<ViewSnapshotRequest>,
    ) -> Result<Response<ViewSnapshotResponse>, Status> {
        let ViewSnapshotRequest { snapshotter, key, parent, labels } = request.into_inner();
        let wanted = Wanted { key, parent: named(parent), labels: labels.into_iter().collect() };
        let mounts = self.run(&snapshotter, |s| async move { s.view(wanted).await }).await?;
        Ok(Response::new(ViewSnapshotResponse { mounts }))
    }

    async fn mounts(
        &self,
        request: Request<MountsRequest>,
    ) -> Result<Response<MountsResponse>, Status> {
        let MountsRequest { snapshotter, key } = request.into_inner();
        let mounts = self.run(&snapshotter, |s| async move { s.mounts(key).await }).await?;
        Ok(Response::new(MountsResponse { mounts }))
    }

    async fn commit(
        &self,
        request: Request<CommitSnapshotRequest>,
    ) -> Result<Response<()>, Status> {
        let CommitSnapshotRequest { snapshotter, name, key, labels, parent } = request.into_inner();
        let (labels, parent) = (labels.into_iter().collect(), named(parent));
        let done =
            self.run(&snapshotter, |s| async move { s.commit(key, name, parent, labels).await });
        done.await.map(Response::new)
    }

    async fn remove(
        &self,
        request: Request<RemoveSnapshotRequest>,
    ) -> Result<Response<()>, Status> {
        let RemoveSnapshotRequest { snapshotter, key } = request.into_inner();
        self.run(&snapshotter, |s| async move { s.remove(key).await }).await.map(Response::new)
    }

    async fn stat(
        &self,
        request: Request<StatSnapshotRequest>,
    ) -> Result<Response<StatSnapshotResponse>, Status> {
        let StatSnapshotRequest { snapshotter, key } = request.into_inner();
        let snapshot = self.run(&snapshotter, |s| async move { s.stat(key).await }).await?;
        Ok(Response::new(StatSnapshotResponse { info: Some(info(snapshot)) }))
    }

    async fn update(
        &self,
        request: Request<UpdateSnapshotRequest>,
    ) -> Result<Response<UpdateSnapshotResponse>, Status> {
        let UpdateSnapshotRequest { snapshotter, info: wanted, update_mask } = request.into_inner();
        let Some(wanted) = wanted else { return Err(Status::invalid_argument("no info")) };
        let fields = update_mask.unwrap_or_default().paths;
        let labels = wanted.labels.into_iter().collect();
        let updated =
            self.run(&snapshotter, |s| async move { s.update(wanted.name, labels, fields).await });
        Ok(Response::new(UpdateSnapshotResponse { info: Some(info(updated.await?)) }))
    }

    type ListStream = Pin<Box<dyn Stream<Item = Result<ListSnapshotsResponse, Status>> + Send>>;

    async fn list(
        &self,
        request: Request<ListSnapshotsRequest>,
    ) -> Result<Response<Self::ListStream>, Status> {
        let ListSnapshotsRequest { snapshotter, filters } = request.into_inner();
        let snapshots = self.run(&snapshotter, |s| async move { s.list(&filters).await }).await?;
        let infos: Vec<_> = snapshots.into_iter().map(info).collect();
        let pages: Vec<_> = infos
            .chunks(PAGE)
            .map(|page| Ok(ListSnapshotsResponse { info: page.to_vec() }))
            .collect();
        Ok(Response::new(Box::pin(tokio_stream::iter(pages))))
    }

    async fn usage(
        &self,
        request: Request<UsageRequest>,
    ) -> Result<Response<UsageResponse>, Status> {
        let UsageRequest { snapshotter, key } = request.into_inner();
        let usage = self.run(&snapshotter, |s| async move { s.usage(key).await }).await?;
        let [size, inodes] = [usage.size, usage.inodes].map(u64::cast_signed);
        Ok(Response::new(UsageResponse { size, inodes }))
    }

    async fn cleanup(&self, request: Request<CleanupRequest>) -> Result<Response<()>, Status> {
        let CleanupRequest { snapshotter } = request.into_inner();
        self.run(&snapshotter, |s| async move { s.clean_up().await }).await.map(Response::new)
    }
}

/// Protocol buffers have no way to leave a string out.
fn named(parent: String) -> Option<String> {
    Some(parent).filter(|parent| !parent.is_empty())
}

fn info(snapshot: Snapshot) -> Info {
    let kind = match snapshot.kind {
        Kind::View => ApiKind::View,
        Kind::Active => ApiKind::Active,
        Kind::Committed => ApiKind::Committed,
    };
    Info {
        name: snapshot.name,
        parent: snapshot.parent.unwrap_or_default(),
        kind: kind.into(),
        created_at: Some(snapshot.created.into()),
        updated_at: Some(snapshot.updated.into()),
        labels: snapshot.labels.into_iter().collect(),
    }
}
