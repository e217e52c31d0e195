//! The configuration that upstream's clients give with each image: where its blobs are.

use std::path::Path;

use anyhow::{Context as _, Result, bail};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use lazuli_registry::Login;
use serde::Deserialize;

use crate::bounded_file;

/// The repository of an image's blobs.
#[derive(Debug)]
pub(super) struct Backend {
    /// `HOST/REPOSITORY`.
    pub(super) image: String,
    pub(super) plain_http: bool,
    pub(super) login: Option<Login>,
}

#[derive(Deserialize)]
struct Document {
    device: Option<Device>,
    id_mapping: Option<[u32; 3]>,
}

#[derive(Deserialize)]
struct Device {
    backend: Kind,
}

#[derive(Deserialize)]
struct Kind {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    config: Registry,
}

/// What matters of it: the node's own configuration has mirrors, certificates and proxies.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Registry {
    scheme: String,
    host: String,
    repo: String,
    auth: Option<String>,
    registry_token: Option<String>,
}

/// Reads a file with a configuration.
pub(super) fn read(path: &Path) -> Result<String> {
    let text = bounded_file::read(path)?;
    text.with_context(|| format!("there is no configuration {}", path.display()))
}

impl Backend {
    /// # Errors
    /// It is not JSON, or asks for what Lazuli has not.
    pub(super) fn parse(config: &str) -> Result<Self> {
        let document: Document =
            serde_json::from_str(config).context("the configuration is not nydusd's")?;
        if document.id_mapping.is_some() {
            bail!(
                "`id_mapping` is not supported: user ids are mapped where containers are mounted"
            );
        }
        let Some(Device { backend: Kind { kind, config } }) = document.device else {
            bail!("the configuration has no `device.backend`, expected its first version");
        };
        if kind != "registry" {
            bail!("`device.backend.type` is `{kind}`, expected `registry`");
        }
        if config.host.is_empty() || config.repo.is_empty() {
            bail!("`device.backend.config` lacks `host` or `repo`");
        }
        if config.registry_token.is_some_and(|token| !token.is_empty()) {
            bail!("`registry_token` is not supported, expected `auth`, which outlasts a token");
        }
        let plain_http = match &*config.scheme {
            "http" => true,
            "https" | "" => false,
            other => bail!("`scheme` is `{other}`, expected `http` or `https`"),
        };
        let login = config.auth.filter(|auth| !auth.is_empty()).map(|auth| login(&auth));
        let image = format!("{}/{}", config.host, config.repo);
        Ok(Backend { image, plain_http, login: login.transpose()? })
    }
}

/// A login as clients encode it.
fn login(auth: &str) -> Result<Login> {
    let decoded = BASE64_STANDARD.decode(auth).ok();
    let text = decoded.and_then(|bytes| String::from_utf8(bytes).ok());
    let login = text.as_deref().and_then(|text| text.split_once(':'));
    let (user, secret) = login.context("`auth` is not base64 of USER:PASSWORD")?;
    Ok(Login::new(user, secret))
}

/// The configuration with another login, as clients encode it.
///
/// # Errors
/// It is not JSON, or none of a registry.
pub(super) fn with_login(config: &str, auth: &str) -> Result<String> {
    let mut document: serde_json::Value = serde_json::from_str(config)?;
    let registry = document.pointer_mut("/device/backend/config");
    let registry = registry.and_then(serde_json::Value::as_object_mut);
    let registry = registry.context("the configuration has no `device.backend.config`")?;
    registry.insert("auth".to_owned(), auth.into());
    Ok(document.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What nydus-snapshotter 0.15 writes.
    fn written(config: &str) -> String {
        format!(
            r#"{{"device":{{"id":"/3","backend":{{"type":"registry","config":{config}}},
            "cache":{{"type":"blobcache","config":{{"work_dir":"/c"}}}}}},"mode":"direct",
            "digest_validate":false,"enable_xattr":true,"fs_prefetch":{{"enable":true}}}}"#
        )
    }

    #[test]
    fn a_registry_with_and_without_a_login() {
        let config = written(r#"{"host":"r.example:5000","repo":"a/b","readahead":false}"#);
        let backend = Backend::parse(&config).unwrap();
        assert_eq!((&*backend.image, backend.plain_http), ("r.example:5000/a/b", false));
        assert!(backend.login.is_none());
        let auth = BASE64_STANDARD.encode("me:pass:word");
        let config = with_login(&config, &auth).unwrap();
        let login = Backend::parse(&config).unwrap().login;
        assert_eq!(login, Some(Login::new("me", "pass:word")));
    }

    #[test]
    fn what_is_not_supported_is_refused_by_name() {
        let registry = |more: &str| written(&format!(r#"{{"host":"r","repo":"a"{more}}}"#));
        for (config, expected) in [
            (r#"{"device":{"backend":{"type":"oss"}}}"#.to_owned(), "`oss`, expected `registry`"),
            (r#"{"version":2,"backend":{}}"#.to_owned(), "no `device.backend`"),
            (registry(r#","registry_token":"t""#), "`registry_token` is not supported"),
            (registry(r#","scheme":"ftp""#), "`scheme` is `ftp`"),
            (registry(r#","auth":"me:password""#), "not base64 of USER:PASSWORD"),
            (written("{}"), "lacks `host` or `repo`"),
            (registry("").replacen('{', r#"{"id_mapping":[0,1,2],"#, 1), "`id_mapping`"),
            ("{".to_owned(), "not nydusd's"),
        ] {
            let error = format!("{:#}", Backend::parse(&config).unwrap_err());
            assert!(error.contains(expected), "{error}");
        }
    }
}
