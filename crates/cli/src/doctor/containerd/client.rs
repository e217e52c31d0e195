//! Questions to a running containerd.

use std::{collections::HashMap, os::unix::net::UnixStream, path::Path, time::Duration};

use anyhow::{Context as _, Result};
use rustix::net::sockopt::socket_peercred;
use serde_json::Value;
use tonic::{
    Request, Status,
    client::Grpc,
    codegen::http::uri::PathAndQuery,
    transport::{Channel, Endpoint},
};
use tonic_prost::ProstCodec;

use super::Files;

/// It is on this machine, and answers from memory.
const DEADLINE: Duration = Duration::from_secs(5);

/// The state of a running containerd.
#[derive(Debug)]
pub(crate) struct Running {
    pub(super) version: String,
    /// Its files, which may have changed since it has read them.
    pub(crate) files: Files,
    /// The plugin that is Lazuli's snapshotter, if containerd has one.
    pub(super) plugin: Option<Plugin>,
    /// Its configuration of runtimes in use; `null` where CRI does not run.
    pub(super) config: Value,
    /// The directory of the default snapshotter.
    pub(super) images: Option<String>,
}

/// A plugin that containerd has.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Plugin {
    pub(super) exports: HashMap<String, String>,
    pub(super) capabilities: Vec<String>,
    /// Why it could not be loaded.
    pub(super) problem: Option<String>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Nothing {}

#[derive(Clone, PartialEq, prost::Message)]
struct VersionResponse {
    #[prost(string, tag = "1")]
    version: String,
}

#[derive(Clone, PartialEq, prost::Message)]
struct PluginsRequest {
    #[prost(string, repeated, tag = "1")]
    filters: Vec<String>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct PluginsResponse {
    #[prost(message, repeated, tag = "1")]
    plugins: Vec<PluginMessage>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct PluginMessage {
    #[prost(string, tag = "1")]
    kind: String,
    #[prost(string, tag = "2")]
    id: String,
    #[prost(map = "string, string", tag = "5")]
    exports: HashMap<String, String>,
    #[prost(string, repeated, tag = "6")]
    capabilities: Vec<String>,
    #[prost(message, optional, tag = "7")]
    problem: Option<Problem>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Problem {
    #[prost(string, tag = "2")]
    message: String,
}

#[derive(Clone, PartialEq, prost::Message)]
struct StatusRequest {
    #[prost(bool, tag = "1")]
    verbose: bool,
}

#[derive(Clone, PartialEq, prost::Message)]
struct StatusResponse {
    #[prost(map = "string, string", tag = "2")]
    info: HashMap<String, String>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct ImageFsInfoResponse {
    #[prost(message, repeated, tag = "1")]
    file_systems: Vec<FileSystem>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct FileSystem {
    #[prost(message, optional, tag = "2")]
    id: Option<FileSystemId>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct FileSystemId {
    #[prost(string, tag = "1")]
    mountpoint: String,
}

impl Running {
    /// Asks the containerd that listens at `socket`. Lazuli's snapshotter listens at `ours`.
    pub(crate) fn ask(socket: &Path, ours: &Path) -> Result<Self> {
        let at = || format!("no containerd answers at {}", socket.display());
        let stream = UnixStream::connect(socket).with_context(at)?;
        let pid = socket_peercred(&stream)?.pid.as_raw_nonzero().get().cast_unsigned();
        let files = Files::of(pid, ours);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let asked = runtime
            .block_on(async { tokio::time::timeout(DEADLINE, Self::ask_all(socket, files)).await });
        asked.with_context(at)?.with_context(at)
    }

    async fn ask_all(socket: &Path, files: Files) -> Result<Self, Status> {
        let endpoint = Endpoint::from_shared(format!("unix:{}", socket.display()));
        let endpoint = endpoint.map_err(|error| Status::invalid_argument(error.to_string()))?;
        let channel = endpoint.connect_lazy();
        let call = Call(channel);
        let VersionResponse { version } =
            call.unary("/containerd.services.version.v1.Version/Version", Nothing {}).await?;
        let filters = vec![format!("type==io.containerd.snapshotter.v1,id=={}", files.name())];
        let request = PluginsRequest { filters };
        let PluginsResponse { plugins } = call
            .unary("/containerd.services.introspection.v1.Introspection/Plugins", request)
            .await?;
        let request = StatusRequest { verbose: true };
        let status = call.unary("/runtime.v1.RuntimeService/Status", request).await;
        let StatusResponse { info } = or_without_cri(status)?;
        let images = call.unary("/runtime.v1.ImageService/ImageFsInfo", Nothing {}).await;
        let ImageFsInfoResponse { file_systems } = or_without_cri(images)?;
        let config = info.get("config").and_then(|text| serde_json::from_str(text).ok());
        Ok(Running {
            version,
            files,
            plugin: plugins.into_iter().next().map(Plugin::from),
            config: config.unwrap_or_default(),
            // The first one is the default snapshotter's.
            images: file_systems.into_iter().next().and_then(|it| Some(it.id?.mountpoint)),
        })
    }
}

/// Uses the default if containerd runs without CRI and so doesn't know the method.
fn or_without_cri<T: Default>(answer: Result<T, Status>) -> Result<T, Status> {
    match answer {
        Err(status) if status.code() == tonic::Code::Unimplemented => Ok(T::default()),
        other => other,
    }
}

impl From<PluginMessage> for Plugin {
    fn from(message: PluginMessage) -> Self {
        let PluginMessage { exports, capabilities, problem, .. } = message;
        Plugin { exports, capabilities, problem: problem.map(|problem| problem.message) }
    }
}

struct Call(Channel);

impl Call {
    async fn unary<Q, A>(&self, method: &'static str, request: Q) -> Result<A, Status>
    where
        Q: prost::Message + Send + Sync + 'static,
        A: prost::Message + Default + Send + Sync + 'static,
    {
        let mut client = Grpc::new(self.0.clone());
        client.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
        let codec = ProstCodec::<Q, A>::default();
        let path = PathAndQuery::from_static(method);
        Ok(client.unary(Request::new(request), path, codec).await?.into_inner())
    }
}
