//! The API server, as a pod of the cluster reaches it.

use std::{env, path::PathBuf, time::Duration};

use anyhow::{Context, Result, bail};
use reqwest::{
    Certificate, Client, Method,
    header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue},
    redirect,
};
use serde_json::Value;

use super::{condition::Node, events::Event, text::plain};
use crate::bounded_file;

/// Time limit for a request, its answer included.
const DEADLINE: Duration = Duration::from_secs(10);

/// Biggest answer in bytes. An object has at most 1.5 MiB in etcd.
const LIMIT: usize = 4 << 20;

/// The API server.
#[derive(Debug)]
pub(super) struct ApiServer {
    base: String,
    service_account: PathBuf,
}

impl ApiServer {
    /// The API server in the environment of every pod.
    ///
    /// # Errors
    /// The environment names none.
    pub(super) fn in_cluster(service_account: PathBuf) -> Result<Self> {
        let variable = |name: &str| {
            env::var(name).with_context(|| format!("{name} is not set: expected in a pod"))
        };
        let (host, port) =
            (variable("KUBERNETES_SERVICE_HOST")?, variable("KUBERNETES_SERVICE_PORT")?);
        let host = if host.contains(':') { format!("[{host}]") } else { host };
        Ok(ApiServer { base: format!("https://{host}:{port}"), service_account })
    }

    /// Reads a node.
    pub(super) async fn node(&self, name: &str) -> Result<Node> {
        let answer = self.call(Method::GET, &format!("/api/v1/nodes/{name}"), "", None).await?;
        serde_json::from_slice(&answer).with_context(|| format!("node {name} is not a Node"))
    }

    /// Changes a node by a JSON patch.
    pub(super) async fn patch(&self, name: &str, patch: &Value) -> Result<()> {
        let path = format!("/api/v1/nodes/{name}");
        let kind = "application/json-patch+json";
        self.call(Method::PATCH, &path, kind, Some(patch)).await.map(drop)
    }

    /// Changes a node's status. Conditions of other types stay.
    pub(super) async fn patch_status(&self, name: &str, patch: &Value) -> Result<()> {
        let path = format!("/api/v1/nodes/{name}/status");
        let kind = "application/strategic-merge-patch+json";
        self.call(Method::PATCH, &path, kind, Some(patch)).await.map(drop)
    }

    /// Creates an event.
    pub(super) async fn create_event(&self, event: &Event) -> Result<()> {
        let path = format!("/api/v1/namespaces/{}/events", event.namespace);
        self.call(Method::POST, &path, "application/json", Some(&event.body)).await.map(drop)
    }

    /// Sends a request over a connection of its own, since a node sends only a few in five minutes.
    /// Reads the service account's files each time, since the kubelet replaces them.
    async fn call(
        &self,
        method: Method,
        path: &str,
        kind: &'static str,
        body: Option<&Value>,
    ) -> Result<Vec<u8>> {
        let url = format!("{}{path}", self.base);
        let request = self.client()?.request(method.clone(), &url);
        let mut request = request.header(AUTHORIZATION, self.token()?);
        if let Some(body) = body {
            request = request.header(CONTENT_TYPE, kind).body(body.to_string());
        }
        let mut response = request.send().await.context("the API server does not answer")?;
        let mut answer = Vec::new();
        while let Some(part) = response.chunk().await? {
            if answer.len() + part.len() > LIMIT {
                bail!("{method} {url}: the answer has more than {LIMIT} bytes");
            }
            answer.extend_from_slice(&part);
        }
        if !response.status().is_success() {
            let said: Value = serde_json::from_slice(&answer).unwrap_or_default();
            let said = plain(said["message"].as_str().unwrap_or("no message"));
            bail!("{method} {url}: {}: {said}", response.status());
        }
        Ok(answer)
    }

    fn client(&self) -> Result<Client> {
        let authority = Certificate::from_pem(self.file("ca.crt")?.as_bytes())?;
        let builder = Client::builder().tls_certs_only([authority]).timeout(DEADLINE).no_proxy();
        Ok(builder.redirect(redirect::Policy::none()).build()?)
    }

    fn token(&self) -> Result<HeaderValue> {
        let token = format!("Bearer {}", self.file("token")?.trim());
        let mut token: HeaderValue =
            token.parse().context("the service account's token is not a header's value")?;
        token.set_sensitive(true);
        Ok(token)
    }

    fn file(&self, name: &str) -> Result<String> {
        let path = self.service_account.join(name);
        bounded_file::read(&path)?
            .with_context(|| format!("{} is not there: expected in a pod", path.display()))
    }
}
